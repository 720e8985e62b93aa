"""Ranges for in-kernel event tracing: in the kernels under CuTe DSL's option, and only there."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys

import pytest
import torch

pytest.importorskip("cutlass")

from fa4_hd256 import BackwardConfig, ForwardConfig
from fa4_hd256.kernels.problem_class import GradientClass, ProblemClass
from fa4_hd256.run.catalogue import KernelSpec
from fa4_hd256.run.compile import compile_kernel

pytestmark = pytest.mark.architecture("sm_100a")

BF16 = ProblemClass(torch.bfloat16)


def backward(kind: str) -> KernelSpec:
    return KernelSpec(kind, BackwardConfig().of_kernel(kind), GradientClass(BF16))


KERNELS = {
    "forward": KernelSpec("forward", ForwardConfig(), BF16),
    "dK/dV": backward("backward_dkdv"),
    "dQ": backward("backward_dq"),
    "dV": backward("backward_dv"),
    "products": backward("backward_products"),
}
NAMES = {
    "forward": {"load", "QK", "PV0", "PV1", "softmax", "rescale O", "drain O"},
    "dK/dV": {
        "load", "S", "dP", "dV", "dK", "P", "dS", "write P", "write dS", "drain dK and dV",
    },
    "dQ": {"load", "S", "dP", "dQ", "P", "dS", "drain dQ"},
    "dV": {"load", "S", "dP", "dV", "P", "dS", "drain dV"},
    "products": {"load", "sum", "drain sum"},
}  # fmt: skip

#: CuTe DSL reads its options when it is imported, so this takes a process of its own.
COMPILE = """
import pickle, sys
from fa4_hd256.run.compile import compile_kernel
print(compile_kernel(pickle.load(sys.stdin.buffer)).ptx)
"""


def declared(ptx: str) -> set[str]:
    """The ranges that iket declares in a module; blanks of their names are underscores."""
    return set(re.findall(r"__iket_evt_decl_(\w+?)_\d+_attrs", ptx))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.sampled
def test_under_the_option_every_role_has_its_ranges(kernel):
    path = os.pathsep.join(sys.path)
    found = subprocess.run(
        [sys.executable, "-c", COMPILE], input=pickle.dumps(KERNELS[kernel]), capture_output=True,
        env={**os.environ, "CUTE_DSL_COMPILER_OPT": "iket", "PYTHONPATH": path},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr.decode()
    names = {text.replace(" ", "_") for text in NAMES[kernel]}
    assert declared(found.stdout.decode()) == names


@pytest.mark.parametrize("spec", KERNELS.values(), ids=KERNELS)
@pytest.mark.sampled("forward")
def test_the_default_kernel_has_none(spec):
    assert "iket" not in compile_kernel(spec).ptx
