"""A ring of two tiles that one warp fills by TMA and four warps read; a GPU script from sm_90 on.

    SM100_SIM_SANITIZE=1 python -m sm100_sim examples/single_warp_tma.py [--release]

The warps wait for a tile's mbarrier and for each other before they read, so that none is a tile
behind. But without --release nothing stands between their reads and the next fill of the slot,
which the loading warp issues as soon as it has read its own part. With --release a barrier does.
Written for docs/findings.md, after the pattern of an example of NVIDIA's.
"""

from __future__ import annotations

import argparse

import cutlass
import torch
from cutlass import cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack

ROWS, COLUMNS, TILES, SLOTS = 128, 32, 8, 2
THREADS = 128
TILE_BYTES = ROWS * COLUMNS * 4


@cute.kernel
def copy_kernel(
    atom: cute.CopyAtom,
    source: cute.Tensor,
    target: cute.Tensor,
    layout: cute.Layout,
    release: cutlass.Constexpr,
):
    """target = source, (ROWS, TILES * COLUMNS) float32, by one CTA of THREADS threads."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    shared = cutlass.memory.SmemAllocator()
    ring = shared.allocate_tensor(cutlass.Float32, layout, 128)
    full = shared.allocate_array(cutlass.Int64, SLOTS)
    if warp == 0:
        with cute.arch.elect_one():
            for slot in cutlass.range_constexpr(SLOTS):
                cute.arch.mbarrier_init(full + slot, 1)
            cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    tiles = cute.local_tile(source, (ROWS, COLUMNS), (0, None))
    to_ring, from_tiles = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(ring, 0, 2), cute.group_modes(tiles, 0, 2)
    )
    for tile in cutlass.range(TILES + 1, unroll=1):
        if warp == 0 and tile < TILES:
            slot = tile % SLOTS
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + slot, TILE_BYTES)
            cute.copy(atom, from_tiles[None, tile], to_ring[None, slot], tma_bar_ptr=full + slot)
        if tile > 0:
            read = tile - 1
            cute.arch.mbarrier_wait(full + read % SLOTS, read // SLOTS % 2)
            cute.arch.sync_threads()
            for column in cutlass.range_constexpr(COLUMNS):
                target[thread, read * COLUMNS + column] = ring[thread, column, read % SLOTS]
        if cutlass.const_expr(release):
            cute.arch.sync_threads()


@cute.jit
def copy(source: cute.Tensor, target: cute.Tensor, release: cutlass.Constexpr):
    """Launch copy_kernel."""
    slot = cute.make_layout((ROWS, COLUMNS), stride=(COLUMNS, 1))
    atom, tensor = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(), source, slot, (ROWS, COLUMNS)
    )
    ring = cute.make_layout((ROWS, COLUMNS, SLOTS), stride=(COLUMNS, 1, ROWS * COLUMNS))
    copy_kernel(atom, tensor, target, ring, release).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))


def run(release: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor and its copy, (ROWS, TILES * COLUMNS) float32; release: with the barrier."""
    source = torch.arange(ROWS * TILES * COLUMNS, dtype=torch.float32, device="cuda")
    source = source.reshape(ROWS, TILES * COLUMNS)
    target = torch.zeros_like(source)
    copy(from_dlpack(source, assumed_align=16), from_dlpack(target, assumed_align=16), release)
    torch.cuda.synchronize()
    return source, target


def main() -> None:
    """Copy a tensor and count the elements that differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--release", action="store_true", help="with the barrier")
    source, target = run(parser.parse_args().release)
    print(f"{int((source != target).sum())} of {source.numel()} elements differ")


if __name__ == "__main__":
    main()
