"""The schedulers in the simulator: every tile once, the same order, tiles really stolen; their
compiled code and their grids."""

import functools

import cutlass
import numpy as np
import pytest
import torch
from cross_compile import compile_for
from cutlass.cute.runtime import from_dlpack
from scheduler_kernels import FIELDS, NUM_WARPS, places, schedule

import sm100_sim
from fa4_hd256.schedulers import (
    CLUSTER_SIZE,
    ClcScheduler,
    CounterScheduler,
    PackedBlocks,
    StaticPersistentScheduler,
    TileProblem,
    of_clusters,
    tile_coordinates,
)

pytestmark = pytest.mark.simulator

# Schedulers by a counter, for clusters of one CTA and of a pair; static ones for both, too.
COUNTERS = (of_clusters(CounterScheduler, 1), CounterScheduler)
PERSISTENT = (
    StaticPersistentScheduler, of_clusters(StaticPersistentScheduler, 1), ClcScheduler, *COUNTERS
)  # fmt: skip


def _tensor(record):
    tensor = from_dlpack(record)
    # The sizes are dynamic: one compilation serves every problem.
    for mode in range(record.ndim):
        tensor = tensor.mark_compact_shape_dynamic(mode=mode, stride_order=record.dim_order())
    return tensor


@functools.cache
def _compiled(scheduler_class, later_blocks_first):
    size = scheduler_class.cluster_size
    record = torch.zeros(2, 3, 5, size, NUM_WARPS, FIELDS, dtype=torch.int32)
    counter = from_dlpack(torch.zeros(1, dtype=torch.int32))
    sizes = tuple(cutlass.Int32(size) for size in (5, 3, 2, 1))
    settings = (scheduler_class, later_blocks_first)
    target = "sm_90a" if scheduler_class in COUNTERS else "sm_100a"
    arguments = _tensor(record), counter, sizes, cutlass.Int32(4), settings
    return compile_for(target, schedule, *arguments)


def _run(scheduler_class, problem, resident, seed=None, **options):
    """The record of a run, indexed [batch, head, block, CTA, warp, field]; the report. The counter
    is 0 before it and after."""
    shape = (problem.num_batches, problem.num_heads, problem.num_blocks)
    cluster = scheduler_class.cluster_size
    record = torch.zeros(*shape, cluster, NUM_WARPS, FIELDS, dtype=torch.int32)
    counter = torch.zeros(1, dtype=torch.int32)
    sizes = (*shape[::-1], problem.section_heads)
    report = sm100_sim.launch(
        _compiled(scheduler_class, problem.later_blocks_first),
        _tensor(record),
        from_dlpack(counter),
        tuple(cutlass.Int32(size) for size in sizes),
        cutlass.Int32(resident),
        clusters=resident,
        seed=seed,
        **options,
    )
    assert not counter.any()
    return record.numpy(), report


def _check_exactly_once(record):
    assert (record[..., 0] == 1).all(), "each CTA and warp does each tile once"
    ranks = np.arange(record.shape[3])[:, None]
    assert (record[..., 3] == np.tile(1 + ranks, NUM_WARPS)).all()
    for field in (1, 2):
        agreed = record[..., :1, :1, field]
        assert (record[..., field] == agreed).all(), "all CTAs and all warps agree"


# (blocks, heads, batches, section): one tile; odd counts; single heads and batches; a last
# section that is wider, or the only one; one section wider than all pairs.
PROBLEMS = [(1, 1, 1, 1), (5, 3, 3, 4), (5, 3, 2, 4), (7, 1, 1, 1), (1, 8, 3, 8), (3, 6, 1, 100)]


@pytest.mark.parametrize("scheduler_class", PERSISTENT)
@pytest.mark.parametrize("sizes", PROBLEMS, ids=str)
@pytest.mark.parametrize("resident", [1, 4, 64])
def test_every_tile_is_done_exactly_once(scheduler_class, sizes, resident):
    problem = TileProblem(*sizes, later_blocks_first=True)
    record, _ = _run(scheduler_class, problem, resident)
    _check_exactly_once(record)


@pytest.mark.parametrize("scheduler_class", PERSISTENT)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_adversarial_schedules(scheduler_class, seed):
    record, _ = _run(scheduler_class, TileProblem(5, 3, 2, 2, True), 3, seed)
    _check_exactly_once(record)


@pytest.mark.parametrize("later_blocks_first", [False, True])
@pytest.mark.parametrize("sizes", PROBLEMS, ids=str)
def test_the_device_decodes_as_the_host(sizes, later_blocks_first):
    """One tile a cluster: cluster number i must have done tile i of the host's order."""
    problem = TileProblem(*sizes, later_blocks_first)
    record, _ = _run(StaticPersistentScheduler, problem, problem.num_tiles)
    order = problem.order()
    for index in range(problem.num_tiles):
        block, head, batch = tile_coordinates(index, order)
        assert record[batch, head, block, 0, 0, 1] == index


# Counts around the lanes of a warp, one more or less, more than a warp finds at the second look;
# many of them empty.
@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 1024, 1025, 2100])
def test_a_warp_finds_the_sequences_of_blocks_in_a_row(count):
    rows = 4
    generator = np.random.default_rng(count)
    lengths = generator.integers(0, 3, count) * generator.integers(1, 4, count)
    lengths[count // 2] = 5 * count
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    whole = TileProblem(-(-int(lengths.max()) // rows), 1, count)
    problem = whole.in_a_row(PackedBlocks(offsets.tolist(), rows), int(offsets[-1]))
    assert problem.packed.is_used == (count > 1)
    record = torch.full((problem.num_tiles, 32, 2), -1, dtype=torch.int32)
    sizes = tuple(cutlass.Int32(int(size)) for size in (lengths.max(), offsets[-1]))
    arguments = _tensor(record), _tensor(torch.from_numpy(offsets)), sizes
    sm100_sim.launch(_compiled_places(rows), *arguments)
    order = problem.order()
    expected = [tile_coordinates(number, order)[::2] for number in range(problem.num_tiles)]
    assert record.tolist() == [[list(found)] * 32 for found in expected]


@functools.cache
def _compiled_places(rows):
    record, offsets = (torch.zeros(*shape, dtype=torch.int32) for shape in ((3, 32, 2), (4,)))
    sizes = cutlass.Int32(1), cutlass.Int32(1)
    return compile_for("sm_90a", places, _tensor(record), _tensor(offsets), sizes, rows)


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


@pytest.mark.parametrize("scheduler_class", COUNTERS)
@pytest.mark.parametrize("resident", [1, 3, 8])
def test_the_counter_gives_tiles_to_who_is_done(scheduler_class, resident):
    """Each resident cluster has a tile of its own; the others come in any order."""
    problem, orders = TileProblem(5, 3, 2, 2, True), set()
    for seed in range(5):
        record, report = _run(scheduler_class, problem, resident, seed)
        _check_exactly_once(record)
        assert report.grid == (resident * scheduler_class.cluster_size, 1, 1)
        assert len(np.unique(record[..., 1])) == resident
        assert (record[..., 2] == 0).sum() == resident * NUM_WARPS * scheduler_class.cluster_size
        order = problem.order()
        for index in range(resident):
            block, head, batch = tile_coordinates(index, order)
            assert (record[batch, head, block, ..., 1:3] == (index, 0)).all()
        orders.add(record[..., 0, 0, 1:3].tobytes())
    assert len(orders) > 1 or resident == 1


@pytest.mark.parametrize("scheduler_class", COUNTERS)
def test_the_counter_with_nothing_to_give(scheduler_class):
    """One count in vain a cluster, as many as there are tiles: it is 0 again."""
    record, _ = _run(scheduler_class, TileProblem(3, 1, 1), 64)
    _check_exactly_once(record)
    assert (record[..., 2] == 0).all()


@pytest.mark.parametrize("scheduler_class", COUNTERS)
def test_the_counter_under_the_sanitizer(scheduler_class):
    """No race in it. A cluster of several CTAs ends by a barrier of its own, which the kernels
    have: the same is found of the scheduler by cluster launch control without one."""
    problem = TileProblem(5, 3, 2, 2, True)
    record, report = _run(scheduler_class, problem, 3, sanitize=True)
    _check_exactly_once(record)
    assert {found.split(":")[0] for found in map(str, report.findings)} <= {"exit-too-early"}
    assert not report.findings or scheduler_class.cluster_size > 1


def test_a_problem_without_tiles_has_no_grid():
    with pytest.raises(ValueError, match="a problem without tiles must not be launched"):
        TileProblem(0, 1, 1)


# ---------------------------------------------------------------- compiled code


@pytest.mark.parametrize(
    ("scheduler_class", "clusters"),
    [(StaticPersistentScheduler, (4, 30)), (ClcScheduler, (30, 30)), (CounterScheduler, (4, 30))],
)
def test_grid_shapes(scheduler_class, clusters):
    problem = TileProblem(5, 3, 2)
    for resident, expected in zip((4, 74), clusters):
        assert scheduler_class.grid_shape(problem, resident) == (expected * CLUSTER_SIZE, 1, 1)
        single = of_clusters(scheduler_class, 1)
        assert single.grid_shape(problem, resident) == (expected, 1, 1)
        assert of_clusters(single, CLUSTER_SIZE).cluster_size == CLUSTER_SIZE
