"""Tests of exact and of rounded products pass under other settings of the BLAS libraries, too.

Which order a library sums in depends on the CPU, on the shapes and on the threads. What this
machine takes by itself is what the whole suite runs under; here are the settings that any CPU of
its kind can run: the oldest kernels, one order for all shapes, other numbers of threads.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Directory that tests run from: beside `tests`, its folders would be found in place of the
#: packages.
ROOT = Path(__file__).resolve().parents[1]
#: Products on the CPU compared bit for bit, or within bounds of float64.
SELECTION = (
    "tests/operator/check/test_reference.py::test_rows_in_parts",
    "tests/operator/check/test_reference.py::test_rows_without_a_visible_key_have_no_gradient",
    "sm100_sim/tests/isa/test_tcgen05.py::test_mma_types",
    "sm100_sim/tests/isa/test_tcgen05.py::test_mma_with_a_in_tmem",
    "sm100_sim/tests/native/test_native_routines.py::test_products_are_the_same_bits",
)

SETTINGS = {
    "oldest kernels, one thread": {
        "OPENBLAS_CORETYPE": "Prescott", "MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1",
    },
    "other kernels, two threads": {
        "OPENBLAS_CORETYPE": "Nehalem", "MKL_CBWR": "AUTO", "OPENBLAS_NUM_THREADS": "2",
        "OMP_NUM_THREADS": "2", "MKL_DYNAMIC": "FALSE", "OMP_WAIT_POLICY": "PASSIVE",
    },
}  # fmt: skip


@pytest.mark.simulator
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.sampled
def test_products(settings):
    environment = {**os.environ, **settings}
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *SELECTION],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr
