"""Compiled code of the schedulers, and their grids."""

import functools
from collections import Counter

import cutlass
import pytest
import torch
from cross_compile import compile_for, opcode_counts
from cutlass.cute.runtime import from_dlpack
from scheduler_kernels import FIELDS, NUM_WARPS, schedule

from fa4_hd256.schedulers import (
    CLUSTER_SIZE,
    ClcScheduler,
    CounterScheduler,
    StaticPersistentScheduler,
    TileProblem,
    of_clusters,
)

COUNTERS = (of_clusters(CounterScheduler, 1), CounterScheduler)
SCHEDULERS = (StaticPersistentScheduler, ClcScheduler, *COUNTERS)


@functools.cache
def _opcodes(scheduler_class) -> Counter:
    size = scheduler_class.cluster_size
    record = from_dlpack(torch.zeros(2, 3, 5, size, NUM_WARPS, FIELDS, dtype=torch.int32))
    counter = from_dlpack(torch.zeros(1, dtype=torch.int32))
    sizes = tuple(cutlass.Int32(size) for size in (5, 3, 2, 1))
    target = "sm_90a" if scheduler_class in COUNTERS else "sm_100a"
    compiled = compile_for(
        target, schedule, record, counter, sizes, cutlass.Int32(4), (scheduler_class, True)
    )
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


def test_the_counter_is_in_the_compiled_kernel():
    one, pair = (_opcodes(scheduler_class) for scheduler_class in COUNTERS)
    for counts in (one, pair):
        assert counts["atom.relaxed.gpu.global.inc.u32"] == 1, "one place in the program counts"
        assert _starting(counts, "clusterlaunchcontrol") == 0
    # A single CTA needs nothing of a cluster; a pair gets the number by an asynchronous store each.
    assert _starting(one, "mapa") == _starting(one, "st.async") == _starting(one, "barrier.cl") == 0
    assert pair["st.async.shared::cluster.mbarrier::complete_tx::bytes.b32"] == 1


def test_the_static_scheduler_exchanges_nothing():
    counts = _opcodes(StaticPersistentScheduler)
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
        (ClcScheduler, (30, 30)),
        (CounterScheduler, (4, 30)),
    ],
)
def test_grid_shapes(scheduler_class, clusters):
    problem = TileProblem(5, 3, 2)
    for resident, expected in zip((4, 74), clusters):
        assert scheduler_class.grid_shape(problem, resident) == (expected * CLUSTER_SIZE, 1, 1)
        single = of_clusters(scheduler_class, 1)
        assert single.grid_shape(problem, resident) == (expected, 1, 1)
        assert of_clusters(single, CLUSTER_SIZE).cluster_size == CLUSTER_SIZE
