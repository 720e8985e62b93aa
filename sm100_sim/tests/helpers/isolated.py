"""Settings of a test process, made before NumPy and PyTorch are imported."""

from __future__ import annotations

import os

from project import PROJECT

# Each xdist worker has one core.
if "PYTEST_XDIST_WORKER" in os.environ:
    for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "SM100_SIM_THREADS"):
        os.environ.setdefault(_name, "1")

# Workers share translated kernels, and a test run leaves the user's own cache alone.
os.environ.setdefault("SM100_SIM_CACHE_DIR", str(PROJECT / ".cache"))

# Other settings of the user for his own runs do not reach the tests.
_KEPT = ("SM100_SIM_THREADS", "SM100_SIM_CACHE_DIR")
for _name in [name for name in os.environ if name.startswith("SM100_SIM_") and name not in _KEPT]:
    del os.environ[_name]
os.environ.pop("CUTE_DSL_ARCH", None)
