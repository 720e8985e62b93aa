"""What the schedulers compile to, and their grids."""

import functools
from collections import Counter

import cutlass
import pytest
import torch
from cross_compile import compile_sm100, opcode_counts
from cutlass.cute.runtime import from_dlpack
from scheduler_kernels import FIELDS, NUM_WARPS, schedule

from schedulers import (
    CLUSTER_SIZE,
    ClcScheduler,
    StaticPersistentScheduler,
    StaticSingleTileScheduler,
    TileProblem,
)

SCHEDULERS = (StaticPersistentScheduler, StaticSingleTileScheduler, ClcScheduler)


@functools.cache
def _opcodes(scheduler_class) -> Counter:
    record = torch.zeros(2, 3, 5, CLUSTER_SIZE, NUM_WARPS, FIELDS, dtype=torch.int32)
    sizes = tuple(cutlass.Int32(size) for size in (5, 3, 2, 1))
    settings = (scheduler_class, True)
    compiled = compile_sm100(schedule, from_dlpack(record), sizes, cutlass.Int32(4), settings)
    return opcode_counts(compiled)


def _starting(counts, prefix):
    return sum(count for opcode, count in counts.items() if opcode.startswith(prefix))


def test_clc_is_in_the_compiled_kernel():
    counts = _opcodes(ClcScheduler)
    try_cancel = (
        "clusterlaunchcontrol.try_cancel.async.shared::cta"
        ".mbarrier::complete_tx::bytes.multicast::cluster::all.b128"
    )
    assert counts[try_cancel] == 1, "one place in the program makes queries"
    # The working warps' loop and the scheduler warp's loop each decode the response.
    assert _starting(counts, "clusterlaunchcontrol.query_cancel.is_canceled") == 2
    assert _starting(counts, "clusterlaunchcontrol.query_cancel.get_first_ctaid") == 2
    assert counts["ld.shared.b128"] == 2, "one 128-bit load a response"
    assert counts["fence.proxy.async.shared::cta"] == 2
    assert counts["fence.release.sync_restrict::shared::cta.cluster"] == 2
    assert counts["mbarrier.arrive.relaxed.cluster.shared::cluster.b64"] == 2
    assert _starting(counts, "mbarrier.arrive.release.cluster") == 0
    assert counts["mbarrier.arrive.expect_tx.shared::cluster.b64"] == 1


@pytest.mark.parametrize("scheduler_class", [StaticPersistentScheduler, StaticSingleTileScheduler])
def test_static_schedulers_exchange_nothing(scheduler_class):
    counts = _opcodes(scheduler_class)
    assert _starting(counts, "clusterlaunchcontrol") == 0
    assert _starting(counts, "mbarrier") == 0


@pytest.mark.parametrize("scheduler_class", SCHEDULERS)
def test_decoding_a_tile_costs_no_division(scheduler_class):
    counts = _opcodes(scheduler_class)
    assert _starting(counts, "div.") == 0 and _starting(counts, "rem.") == 0
    assert counts["mul.hi.u32"] > 0


@pytest.mark.parametrize(
    ("scheduler_class", "clusters"),
    [
        (StaticPersistentScheduler, (4, 30)),
        (StaticSingleTileScheduler, (30, 30)),
        (ClcScheduler, (30, 30)),
    ],
)
def test_grid_shapes(scheduler_class, clusters):
    problem = TileProblem(5, 3, 2)
    for resident, expected in zip((4, 74), clusters):
        assert scheduler_class.grid_shape(problem, resident) == (expected * CLUSTER_SIZE, 1, 1)
