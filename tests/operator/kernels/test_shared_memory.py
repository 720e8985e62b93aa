"""Operands that kernels lay into shared memory are as large as the regions of their plans.

A view that is larger than its region overlaps the next one, which no result needs to show.
"""

from __future__ import annotations

import cutlass.cute as cute
import pytest
import torch

from fa4_hd256.models import MODELS
from fa4_hd256.run import building
from fa4_hd256.run.ahead.build import TARGETS
from fa4_hd256.run.ahead.needs import Needs, specs_of

#: Every tile kernel of a dense call, with keys of both types, with a stored dS and without.
NEEDS = Needs(
    uses=("training", "prefill", "decode"), forms=("dense",), use_clc=False,
    kv_dtypes=(None, torch.float8_e4m3fn),
)  # fmt: skip
ELEMENT_BYTES = 2


class Sizes:
    """Shared memory that notes operands: name -> bytes of each view."""

    def __init__(self):
        self.operands = {}

    def operand(self, name, rows, columns, stages, dtype=None):
        self.operands.setdefault(name, []).append(rows * columns * stages * ELEMENT_BYTES)

    def region(self, name, element_type, alignment):
        return None


def kernels(arch):
    """Return the tile kernels of a target's plans, one of each class and configuration."""
    target, found = TARGETS[arch], {}
    for spec in specs_of(MODELS["qwen3.8-27b"], NEEDS, target.architecture, target.gpu):
        kernel = building.build(spec)[0]
        if hasattr(kernel, "smem"):
            found.setdefault((type(kernel), spec.config), kernel)
    return found.values()


@pytest.mark.parametrize(
    ("arch", "known"),
    [("sm_100a", {"ForwardKernel", "DecodeKernel", "DecodeE4m3Kernel", "DqKernel", "DkdvKernel"}),
     ("sm_90a", {"DqKernel"})],
)  # fmt: skip
def test_operands_fill_their_regions(arch, known, monkeypatch):
    for name in ("make_tensor", "make_layout", "make_ordered_layout", "make_composed_layout",
                 "make_swizzle", "tile_to_shape"):  # fmt: skip
        monkeypatch.setattr(cute, name, lambda *given, **options: None)
    checked = set()
    for kernel in kernels(arch):
        memory = Sizes()
        kernel.smem(memory)
        plan = getattr(kernel, "smem_plan", None) or kernel.plan.smem
        regions = {region.name: region.num_bytes for region in plan.regions}
        for name, sizes in memory.operands.items():
            assert set(sizes) == {regions[name]}, (type(kernel).__name__, name)
        checked.add(type(kernel).__name__)
    assert known | {"DvKernel", "ProductsKernel"} <= checked, checked
