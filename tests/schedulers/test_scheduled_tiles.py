"""The schedulers in the simulator: every tile once, the same order, tiles really stolen."""

import functools

import cutlass
import numpy as np
import pytest
import torch
from cross_compile import compile_sm100
from cutlass.cute.runtime import from_dlpack
from scheduler_kernels import FIELDS, NUM_WARPS, schedule

import sm100_sim
from schedulers import (
    CLUSTER_SIZE,
    ClcScheduler,
    StaticPersistentScheduler,
    StaticSingleTileScheduler,
    TileProblem,
    tile_coordinates,
)

pytestmark = pytest.mark.simulator

SCHEDULERS = (StaticPersistentScheduler, StaticSingleTileScheduler, ClcScheduler)


def _tensor(record):
    tensor = from_dlpack(record)
    # The sizes are dynamic: one compilation serves every problem.
    for mode in range(record.ndim):
        tensor = tensor.mark_compact_shape_dynamic(mode=mode, stride_order=record.dim_order())
    return tensor


@functools.cache
def _compiled(scheduler_class, later_blocks_first):
    record = torch.zeros(2, 3, 5, CLUSTER_SIZE, NUM_WARPS, FIELDS, dtype=torch.int32)
    sizes = tuple(cutlass.Int32(size) for size in (5, 3, 2, 1))
    settings = (scheduler_class, later_blocks_first)
    return compile_sm100(schedule, _tensor(record), sizes, cutlass.Int32(4), settings)


def _run(scheduler_class, problem, resident, seed=None, **options):
    """The record of a run, indexed [batch, head, block, CTA, warp, field]; the report."""
    shape = (problem.num_batches, problem.num_heads, problem.num_blocks)
    record = torch.zeros(*shape, CLUSTER_SIZE, NUM_WARPS, FIELDS, dtype=torch.int32)
    sizes = (*shape[::-1], problem.section_heads)
    report = sm100_sim.launch(
        _compiled(scheduler_class, problem.later_blocks_first),
        _tensor(record),
        tuple(cutlass.Int32(size) for size in sizes),
        cutlass.Int32(resident),
        clusters=resident,
        seed=seed,
        **options,
    )
    return record.numpy(), report


def _check_exactly_once(record):
    assert (record[..., 0] == 1).all(), "each CTA and warp does each tile once"
    assert (record[..., 3] == [[1] * NUM_WARPS, [2] * NUM_WARPS]).all()
    for field in (1, 2):
        agreed = record[..., :1, :1, field]
        assert (record[..., field] == agreed).all(), "both CTAs and all warps agree"


# (blocks, heads, batches, section): one tile; odd counts; single heads and batches; a last
# section that is narrower; one section wider than all pairs.
PROBLEMS = [(1, 1, 1, 1), (5, 3, 2, 4), (7, 1, 1, 1), (1, 8, 3, 8), (3, 6, 1, 100)]


@pytest.mark.parametrize("scheduler_class", SCHEDULERS)
@pytest.mark.parametrize("sizes", PROBLEMS, ids=str)
@pytest.mark.parametrize("resident", [1, 4, 64])
def test_every_tile_is_done_exactly_once(scheduler_class, sizes, resident):
    problem = TileProblem(*sizes, later_blocks_first=sizes[0] % 2 == 1)
    record, _ = _run(scheduler_class, problem, resident)
    _check_exactly_once(record)


@pytest.mark.parametrize("scheduler_class", [StaticPersistentScheduler, ClcScheduler])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_adversarial_schedules(scheduler_class, seed):
    record, _ = _run(scheduler_class, TileProblem(5, 3, 2, 2, True), 3, seed)
    _check_exactly_once(record)


@pytest.mark.parametrize("later_blocks_first", [False, True])
@pytest.mark.parametrize("sizes", PROBLEMS, ids=str)
def test_the_device_decodes_as_the_host(sizes, later_blocks_first):
    """One tile a cluster: cluster number i must have done tile i of the host's order."""
    problem = TileProblem(*sizes, later_blocks_first)
    record, _ = _run(StaticSingleTileScheduler, problem, 64)
    order = problem.order()
    for index in range(problem.num_tiles):
        block, head, batch = tile_coordinates(index, order)
        assert record[batch, head, block, 0, 0, 1] == index


def test_static_persistent_strides_over_the_order():
    problem, resident = TileProblem(5, 3, 2, 2, True), 4
    record, report = _run(StaticPersistentScheduler, problem, resident)
    assert report.grid == (resident * CLUSTER_SIZE, 1, 1)
    assert report.clc["try_cancel"] == 0
    order = problem.order()
    for index in range(problem.num_tiles):
        block, head, batch = tile_coordinates(index, order)
        assert record[batch, head, block, 0, 0, 1] == index % resident
        assert record[batch, head, block, 0, 0, 2] == index // resident


@pytest.mark.parametrize("resident", [1, 3, 8])
def test_clc_really_steals(resident):
    problem = TileProblem(5, 3, 2, 2, True)
    record, report = _run(ClcScheduler, problem, resident)
    _check_exactly_once(record)
    workers = np.unique(record[..., 1])
    # Whoever was not launched had its tile cancelled and done by another cluster.
    stolen = problem.num_tiles - len(workers)
    assert report.clc["stolen"] == stolen > 0
    assert (record[..., 2] > 0).sum() == stolen * CLUSTER_SIZE * NUM_WARPS
    # One query a tile done, the failed one at the end included: none after a failure.
    assert report.clc["try_cancel"] == problem.num_tiles


def test_clc_with_nothing_to_steal():
    problem = TileProblem(3, 1, 1)
    record, report = _run(ClcScheduler, problem, 64)
    _check_exactly_once(record)
    assert report.clc == {"try_cancel": 3, "stolen": 0, "refused": 0}


@pytest.mark.parametrize("resident", [1, 2, 3, 5])
def test_clc_whatever_requests_get(resident):
    """Seeds refuse requests early, hand tiles out in any order and responses over late.

    Tiles: one, one less and one more than are resident, an odd number of many more.
    """
    refused, orders = 0, set()
    for tiles in sorted({1, max(1, resident - 1), resident, resident + 1, 2 * resident + 9}):
        problem = TileProblem(tiles, 1, 1)
        for seed in range(10):
            record, report = _run(ClcScheduler, problem, resident, seed)
            _check_exactly_once(record)
            refused += report.clc["refused"]
            assert report.clc["try_cancel"] == tiles
            launched = len(np.unique(record[..., 1]))
            assert launched == tiles - report.clc["stolen"] <= resident + report.clc["refused"]
            orders.add(record[0, 0, :, 0, 0, 1:3].tobytes())
    assert refused > 0 and len(orders) > 10


def test_a_cancel_that_arrives_very_late():
    """Responses take effect when nothing else can go on."""
    record, report = _run(ClcScheduler, TileProblem(9, 1, 1), 2, schedule="lazy")
    _check_exactly_once(record)
    assert report.clc == {"try_cancel": 9, "stolen": 7, "refused": 0}


def test_a_problem_without_tiles_has_no_grid():
    with pytest.raises(ValueError, match="a problem without tiles must not be launched"):
        TileProblem(0, 1, 1)
