"""A kernel that only schedules: it records which cluster did which tile, how often and when."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa4_hd256.schedulers import PackedBlocks, TileOrder, TileProblem, tile_coordinates

# Warps 0 and 1 work, warp 2 schedules; every warp runs the loop. Warp 0 says when the next tile is
# wanted.
NUM_WARPS = 3
FIELDS = 4


@cute.jit
def _record(record: cute.Tensor, work, turn: Int32, cluster_size: cutlass.Constexpr):
    """Note a tile: times done, cluster, order, and 1 + the rank of the CTA that noted it."""
    rank = Int32(0)
    if cutlass.const_expr(cluster_size > 1):
        rank = cute.arch.block_idx_in_cluster()
    tile = (work.batch, work.head, work.block, rank, cute.arch.warp_idx())
    record[(*tile, 0)] = record[(*tile, 0)] + 1
    record[(*tile, 1)] = cute.arch.block_idx()[0] // cluster_size
    record[(*tile, 2)] = turn
    record[(*tile, 3)] = 1 + rank


@cute.kernel
def _kernel(
    record: cute.Tensor, counter: cute.Tensor, order: TileOrder, scheduler_class: cutlass.Constexpr
):
    allocator, size = cutlass.memory.SmemAllocator(), scheduler_class.cluster_size
    channel = scheduler_class.setup(allocator, NUM_WARPS * size, counter)
    cute.arch.mbarrier_init_fence()
    if cutlass.const_expr(size > 1):
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    is_writer = cute.arch.lane_idx() == 0
    scheduler = scheduler_class.create(order, channel)
    turn = Int32(0)
    if warp == NUM_WARPS - 1:
        work = scheduler.initial_work()
        while work.is_valid:
            scheduler.prefetch_next_work()
            if is_writer:
                _record(record, work, turn, size)
            work = scheduler.advance_to_next_work()
            turn += 1
        scheduler.producer_tail()
    else:
        work = scheduler.initial_work()
        while work.is_valid:
            if is_writer:
                _record(record, work, turn, size)
            if warp == 0:
                scheduler.want_next_work()
            work = scheduler.advance_to_next_work()
            turn += 1


@cute.jit
def schedule(
    record: cute.Tensor,
    counter: cute.Tensor,
    sizes: tuple,
    max_active_clusters: Int32,
    settings: cutlass.Constexpr,
):
    """record: (batches, heads, blocks, CTAs, warps, 4) int32, zero at the start.

    counter: (1,) int32, zero.  sizes: (blocks, heads, batches, section heads), Int32.  settings:
    scheduler class, later_blocks_first.
    """
    scheduler_class, later_blocks_first = settings
    problem = TileProblem(*sizes, later_blocks_first)
    grid = scheduler_class.grid_shape(problem, max_active_clusters)
    size = scheduler_class.cluster_size
    _kernel(record, counter, problem.order(), scheduler_class).launch(
        grid=grid, block=(32 * NUM_WARPS, 1, 1), cluster=(size, 1, 1) if size > 1 else None
    )


@cute.kernel
def _places(record: cute.Tensor, order: TileOrder):
    number, _, _ = cute.arch.block_idx()
    block, _, sequence = tile_coordinates(number, order)
    record[number, cute.arch.lane_idx(), 0] = Int32(block)
    record[number, cute.arch.lane_idx(), 1] = Int32(sequence)


@cute.jit
def places(record: cute.Tensor, offsets: cute.Tensor, sizes: tuple, rows: cutlass.Constexpr):
    """Record what each lane finds for each number of blocks in a row.  record: (numbers, 32, 2)
    int32; offsets, rows: as `PackedBlocks` has them; sizes: Int32 rows of the longest sequence and
    of all."""
    longest, total = sizes
    sequences = cute.size(offsets) - 1
    problem = TileProblem((longest + rows - 1) // rows, Int32(1), Int32(sequences))
    problem = problem.in_a_row(PackedBlocks(offsets, rows), total)
    _places(record, problem.device_order()).launch(
        grid=(cute.size(record, mode=[0]), 1, 1), block=(32, 1, 1)
    )
