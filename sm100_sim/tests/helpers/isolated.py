"""Settings of a test process, made before NumPy and PyTorch are imported."""

from __future__ import annotations

import os
import sys

from project import PROJECT

# Tests start some hundred Python processes. Without bytecode on disk each of them compiles PyTorch
# and CuTe DSL again, 9 s of CPU instead of 4. Nothing is written beside the sources, as requested.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    sys.dont_write_bytecode = False
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(PROJECT / ".cache" / "bytecode"))
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"]

# tvm_ffi would build an extension in C++ where it is imported first, and where that fails in every
# process: 9 s of CPU for a faster DLPack, which no test is about.
os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")

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
