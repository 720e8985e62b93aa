"""Microbenchmarks: replayed by the timing model, each must give back the constant that the model
started from; the same kernels run without an error in the simulator."""

from __future__ import annotations

from dataclasses import replace

import micro_replays
import numpy as np
import pytest

from bench.bringup.micro import memory, microbenchmarks, rates, tensor
from bench.bringup.micro.simulated import simulate
from sm100_sim.timing import Values, load

pytestmark = pytest.mark.simulator


TABLE = microbenchmarks(148, has_tcgen05=True)
#: Benchmarks whose kernels the model follows from one cluster, and how far off they may be: reads
#: of the clock and the loop itself take up to a clock per round, 5 % of a rate; columns of TMEM are
#: rounded up to clocks.
FOLLOWED = {
    "exp2 interval": 0.2, "exp2 latency": 0.2, "shared load": 0.2, "shuffle": 0.2,
    "bar.sync": 0.5, "bar.sync a warp": 0.1, "mbarrier arrive": 0.5, "mbarrier test": 0.5,
    "wake-up": 0.5, "remote arrive": 0.5, "cluster barrier": 0.5,
    "TMA load from L2": 1.0, "TMA rate of an SM": 0.5, "TMA store": 1.0, "TMEM load": 2.0,
    "TMEM load rate": 0.05, "TMEM store": 1.0, "MMA latency beyond the closed form": 1.0,
    "MMA switch": 0.5,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _assembler():
    """Replays need ptxas, which triton has, and numba."""
    if micro_replays.missing():
        pytest.skip(micro_replays.missing())


@pytest.mark.parametrize("name", FOLLOWED)
@pytest.mark.sampled(
    "exp2 latency", "shared load", "bar.sync a warp", "mbarrier arrive", "remote arrive",
    "TMA load from L2", "TMEM load rate", "MMA switch",
)  # fmt: skip
def test_the_model_gives_its_own_constant_back(name):
    """The figure read from a GPU's clocks is the constant by which the model makes such clocks."""
    wanted = getattr(load(micro_replays.MACHINE).values(), TABLE[name].constant)
    if TABLE[name].unit.startswith("clocks"):
        wanted = np.rint(wanted)  # the replay counts whole ones
    assert micro_replays.figure(TABLE[name]) == pytest.approx(wanted, abs=FOLLOWED[name])


@pytest.mark.parametrize("kernel", [
    tensor._products(2, 256, 256, tensor.SMEM, 8, 1, 4, 2), replace(tensor._query(), grid=64),
    rates._stream(2, True), rates._stream(2, False), rates._busy(20, 2), memory._cold_load(),
], ids=lambda kernel: kernel.name)  # fmt: skip
def test_kernels_that_the_model_does_not_follow_run(kernel):
    """Kernels of the whole GPU, on fewer SMs, and one that reads a gigabyte: no error, no hang."""
    simulate(replace(kernel, buffer=min(kernel.buffer, 1 << 27)))


def test_every_constant_is_one_of_the_models():
    named = [m.constant for m in TABLE.values() if m.constant]
    assert set(named) <= set(Values._fields)
    assert len(named) == len(set(named)), "a constant is set by one figure"


def test_a_gpu_without_tensor_memory_is_not_asked_for_it():
    hopper = microbenchmarks(132, has_tcgen05=False)
    assert "CLC query" not in hopper and "TMEM load" not in hopper
    assert set(hopper) < set(TABLE)
