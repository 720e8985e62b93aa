"""Base of Hopper's forward kernels: rows of keys and values in pages of any size, copied by warps.

NOTE [copied rows].  A few warps copy rows by cp.async, 16 bytes per lane: eight lanes copy the 128
bytes that a row has in a block of 64 columns, thus a warp four rows at once.  cp.async writes
through the generic proxy: who multiplies waits for the copies, and fences for the async proxy.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ..context import want_next_tile_if
from ..forward.common import ForwardCommon
from ..forward.context import ForwardContext, ForwardKernelTensors
from ..forward.gathered import NO_PAGE, GatheredRows, GatheredTile
from ..limits import ELEMENT_BYTES, WARP_SIZE
from ..plan.edges import RingState
from ..rows.lanes import BLOCK_BYTES, PIECE_BYTES, copy_row

BLOCK_LANES = BLOCK_BYTES // PIECE_BYTES
#: Rows of a warp's copy.
ROWS_AT_ONCE = WARP_SIZE // BLOCK_LANES


class CopiedRows(GatheredRows):
    """Keys in pages of any size, whose rows warps copy: NOTE [copied rows]."""

    def tensor(self, name: str, view: cute.Tensor, copy: tuple[Any, int, int]) -> cute.Tensor:
        return view

    def share(self) -> tuple[Any, int]:
        return self.kernel.gathering_warp(), len(self.kernel.warps.gather)


class HopperForward(ForwardCommon):
    """Base of the kernels: `warps.gather` are those that copy rows."""

    def prefetch_descriptors(self, tensors: ForwardKernelTensors) -> None:
        for tma in (tensors.q,) if self.gathers else (tensors.q, tensors.k, tensors.v):
            cpasync.prefetch_descriptor(tma.atom)

    def claim_if(self, scheduler: Any, is_time: Any) -> None:
        """`want_next_tile_if`, by one of the warps that load keys."""
        if self.gathers:
            is_time = is_time & (self.gathering_warp() == 0)
        want_next_tile_if(scheduler, is_time)

    def gathering_warp(self) -> Int32:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        return sum(number * Int32(warp == one) for number, one in enumerate(self.warps.gather))

    def gather_kv(
        self,
        context: ForwardContext,
        name: str,
        work: Any,
        tile: GatheredTile,
        ring: str,
        state: RingState,
    ) -> None:
        """Copy this warp's rows of a tile of K or V to a buffer of a ring, and let its lanes arrive
        when they are there."""
        source, buffer = getattr(context.tensors, name), context.smem[ring]
        head = work.head // context.heads_per_kv
        rows = cute.size(buffer, mode=[0])
        place = buffer[None, None, state.index].iterator
        copy_rows(source, place, tile, head, rows)
        context.barriers[f"{ring}_loaded"].arrive_copies(state)


def copy_rows(
    source: cute.Tensor, buffer: cute.Pointer, tile: GatheredTile, head: Int32, rows: int
) -> None:
    """Copy a warp's rows of a KV tile to a buffer with the layout of `operands`. source:
    (page_size, columns, heads, pages) of 16-bit elements. buffer: aligned to 1024 bytes. rows: of
    the whole tile."""
    blocks = cute.size(source, mode=[1]) * ELEMENT_BYTES // BLOCK_BYTES
    lane = cute.arch.lane_idx()
    row_of_lane, piece = lane // BLOCK_LANES, lane % BLOCK_LANES
    for number, (page, row) in enumerate(tile.pairs):
        present = cute.arch.vote_ballot_sync(page != NO_PAGE) >> row_of_lane
        address = source[row, None, head, cutlass.max(page, 0)].iterator.toint()
        first = tile.first_row + number * WARP_SIZE
        to = buffer.toint() + (first + row_of_lane) * BLOCK_BYTES
        for group in range(0, WARP_SIZE, ROWS_AT_ONCE):
            # Bits 4 to 6 of an address are exchanged by the row's: `operands.smem_layout`.
            swizzled = piece ^ (row_of_lane + group % BLOCK_LANES)
            copy_row(
                to + group * BLOCK_BYTES + swizzled * PIECE_BYTES,
                cute.arch.shuffle_sync(address, group + row_of_lane) + Int64(piece * PIECE_BYTES),
                (present >> group & 1) * PIECE_BYTES,
                blocks,
                rows * BLOCK_BYTES,
            )
