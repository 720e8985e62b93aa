"""A machine that is worse in one constant makes no kernel faster."""

import functools

import pytest

from lab.model import ours
from lab.model.calls import Kind
from sm100_sim import timing
from sm100_sim.timing import load, replay_program

MACHINE = load("b200")
#: Kernels whose tensor core is busy while TMA brings what later products read. (kernel, sample):
#: The products of dS are bound by such bytes, the forward by the tensor core.
KERNELS = (("products", (1024, 1)), ("forward", (512, 2)))
#: Gain of a replay by chance where warps meet in another order.
CHANCE = 0.01


@functools.cache
def program(kernel, sample):
    compiled, arguments = ours.call(ours.Variant(Kind(False), kernel=kernel), sample)
    return timing.predict(compiled, *arguments, machine=MACHINE, draws=0)[-1].compiled


@pytest.mark.parametrize(("kernel", "sample"), KERNELS)
@pytest.mark.parametrize(
    ("constant", "worse"),
    [
        ("l2_bytes_per_clock_sm", (128, 96, 64, 48, 32, 24)),
        ("tmem_columns_per_clock", (1, 0.5, 0.25)),
        ("store_bytes_per_clock", (64, 32, 16)),
        ("tma_load_l2", (300, 600, 1200)),
        ("tmem_load", (60, 120, 240, 420)),
        ("mufu_interval", (4, 8, 16)),
    ],
)
@pytest.mark.sampled("*-forward-sample1")
def test_a_worse_machine_is_never_faster(kernel, sample, constant, worse):
    values = MACHINE.values()._replace(l2_terabytes=60.0)
    clocks = [
        replay_program(program(kernel, sample), values._replace(**{constant: one})).clocks
        for one in worse
    ]
    best = 0
    for one, found in zip(worse, clocks, strict=True):
        assert found >= best * (1 - CHANCE), f"{constant} of {one}: {found} clocks, {best} before"
        best = max(best, found)
