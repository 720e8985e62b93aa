"""Keys and values in pages of any size: rows gathered one by one.

NOTE [gathered rows].  TMA loads a box of rows that follow each other; a page of one row has none.
So the rows of a KV tile are copied by cp.async, 16 bytes per lane, by a few warps.  Eight lanes
copy the 128 bytes that a row has in a block of 64 columns, thus a warp four rows at once; each
piece goes where the 128-byte swizzle puts it, so that the MMAs read the layout that TMA writes
(`operands`).  cp.async writes through the generic proxy: who multiplies waits for the copies, and
fences for the async proxy.

Each lane finds the page of one row of its warp's, and hands the row's address over by a shuffle.
The pages of the next tile are looked up while this one is copied, so that nobody waits for a page's
number but at the first step of a query tile.  The size of a page is an argument: one kernel serves
all sizes.

A row that no query of the tile sees, before the first key or past the last one, is filled with
zeros: neither it nor its page's entry in the table is read.  So keys count from the first key of a
sequence, wherever in its pages that lies.  A number that is none of a page has zeros for rows, as
TMA has outside a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..limits import ELEMENT_BYTES, WARP_SIZE
from ..plan.edges import SharedByReference
from .pages import PlacedTile

__all__ = ["GatheredKeys", "GatheredTile", "KeyRange", "gather"]

PIECE_BYTES = 16  # of a lane's copy
BLOCK_BYTES = 128  # of a row in a block of columns
BLOCK_LANES = BLOCK_BYTES // PIECE_BYTES
#: Rows of a warp's copy.
ROWS_AT_ONCE = WARP_SIZE // BLOCK_LANES
#: Page of a row that is not read.
NO_PAGE = -1


@dataclass(frozen=True)
class KeyRange:
    """Keys [begin, end) of a sequence that some query of a tile sees.  first_row: the row of the
    sequence's pages that is key 0."""

    begin: Int32
    end: Int32
    first_row: Int32


class GatheredKeys(SharedByReference):
    """The keys of one batch entry, for the steps of one query tile, as one of several warps gathers
    them.

    table: (pages,) of the entry.  source: K or V, (page_size, columns, heads, pages).  keys: see
    `KeyRange`.  tile: rows of a KV tile.  share: (number of this warp, number of all).
    """

    def __init__(
        self,
        table: cute.Tensor,
        source: cute.Tensor,
        keys: KeyRange,
        tile: int,
        share: tuple[Int32, int],
    ) -> None:
        warp, warps = share
        self.rows = tile // warps
        assert self.rows * warps == tile and self.rows % WARP_SIZE == 0
        self.first_row = warp * self.rows
        self._table, self._keys, self._tile = table, keys, tile
        self._page_size, self._pages = (cute.size(source, mode=[mode]) for mode in (0, 3))

    def places(self, kv_tile: Int32) -> tuple[Int32, ...]:
        """Return (page, row in it) of each row of a KV tile that is this lane's."""
        keys, found = self._keys, []
        first = kv_tile * self._tile + self.first_row + cute.arch.lane_idx()
        for number in range(self.rows // WARP_SIZE):
            key = first + number * WARP_SIZE
            # The nearest key in the range, so that no other entry is read.
            nearest = cutlass.max(cutlass.max(cutlass.min(key, keys.end - 1), keys.begin), 0)
            row = nearest + keys.first_row
            column = row // self._page_size
            page = self._table[column]
            is_read = (key == nearest) & (page >= 0) & (page < self._pages)
            found += [
                cutlass.select_(is_read, page, Int32(NO_PAGE)),
                row - column * self._page_size,
            ]
        return tuple(found)

    def at(self, kv_tile: Int32) -> GatheredTile:
        return GatheredTile(self, kv_tile, self.places(kv_tile), self.places(kv_tile - 1))


class GatheredTile(PlacedTile):
    """The rows of a KV tile that one warp copies, some of each lane's finding."""

    @property
    def first_row(self) -> Int32:
        return self._keys.first_row

    @property
    def pairs(self) -> list[tuple[Int32, Int32]]:
        """Return (page, row in it) of each of this lane's rows."""
        return list(zip(self._places[::2], self._places[1::2], strict=True))


def gather(
    source: cute.Tensor, buffer: cute.Pointer, tile: GatheredTile, head: Int32, rows: int
) -> None:
    """Copy a warp's rows of a KV tile to a buffer with the layout of `operands`.

    source: (page_size, columns, heads, pages) of 16-bit elements.  buffer: aligned to 1024 bytes.
    rows: of the whole tile.
    """
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


def copy_row(to: Int32, origin: Int64, size: Int32, blocks: int, stride: int) -> None:
    """Copy 16 bytes of each block of 128 bytes of a row in global memory, by cp.async (PTX ISA
    9.7.9.25.3.1).

    to, origin: of the first, in shared and in global memory.  stride: between blocks in shared
    memory.  size: bytes that are read, 16, or 0 where zeros are written.
    """
    for block in range(blocks):
        cute.arch.inline_ptx(
            f"cp.async.cg.shared.global [{{$r0}}+{block * stride}], "
            f"[{{$r1}}+{block * BLOCK_BYTES}], {PIECE_BYTES}, {{$r2}};",
            read_only_args=[to, origin, size],
        )
