"""Keys and values in pages: where the rows of a KV tile lie, and their loads.

NOTE [pages].  A page has `page_size` rows of every KV head, one sequence's, and a row of
`page_table` numbers the pages of a sequence.  A load of a tile is one of boxes, whose rows divide
those of a page and of the load: a box begins at a multiple of its rows, so it lies in one page, and
is clipped there like a tile of a sequence (`sequences.clipped_view`, NOTE [empty tiles]).

Each lane of the load warp knows the place of one box of a tile, and hands it over by a shuffle.
The places of the next tile are found while this one is loaded, so that nobody waits for a page's
number but at the first step of a query tile.

A box past the end of the sequence takes from its last page what any tile past its end does, a row
in use and zeros; one before the first key that the query tile sees takes the first rows of the page
of that key.  Either is masked.  So no other entries of the table are read than those of pages with
a key that some query sees, and no other pages are.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .edges import SharedByReference
from .operands import TmaTensor, load_box
from .sequences import Sequence, clip, clipped_box

__all__ = ["PagedKeys", "PagedTile", "box_rows", "load_pages"]

#: Bits of a box's clipped rows beside its end, more than any box has.
ROW_BITS = 8


def box_rows(page_size: int, rows: int) -> int:
    """Rows of a box of a load of `rows`."""
    return math.gcd(page_size, rows)


class PagedKeys(SharedByReference):
    """The keys of one batch entry, for the steps of one query tile.

    table: (pages,) of the entry.  length: rows in use.  first_key: the first one that is seen.
    page_size: rows of a page; box: of a box; tile: of a KV tile.
    """

    def __init__(
        self, table: cute.Tensor, length: Int32, first_key: Int32, sizes: tuple[int, int, int]
    ) -> None:
        """sizes: page_size, box, tile."""
        self.page_size, self.box, self.tile = sizes
        self._table, self._length = table, length
        self._first_page = first_key // self.page_size
        self._last_page = (length - 1) // self.page_size

    def places(self, kv_tile: Int32) -> tuple[Int32, Int32]:
        """(page, end and rows left out in one word) of the box of a KV tile that is this lane's;
        lanes past the boxes repeat them."""
        box = cute.arch.lane_idx() % (self.tile // self.box)
        row = kv_tile * self.tile + box * self.box
        page = cutlass.max(row // self.page_size, self._first_page)
        page = cutlass.max(cutlass.min(page, self._last_page), 0)
        before = page * self.page_size
        rows = Sequence(Int32(0), self._length - before, self._table[page])
        end, start = clip(rows, cutlass.max(row - before, 0), self.box, least=1)
        return rows.batch, end << ROW_BITS | start

    def at(self, kv_tile: Int32) -> PagedTile:
        """A KV tile to begin with."""
        return PagedTile(self, kv_tile, self.places(kv_tile), self.places(kv_tile - 1))


class PagedTile:
    """A KV tile with the places of its boxes and of the next one's, by lane; lives across loops.

    KV tiles are worked on in falling order.
    """

    def __init__(
        self, keys: PagedKeys, number: Int32, places: tuple, following: tuple
    ) -> None:
        self._keys, self._number, self._places, self._following = keys, number, places, following

    @property
    def box_rows(self) -> int:
        return self._keys.box

    def next(self) -> PagedTile:
        """The tile of the next step."""
        keys, number = self._keys, self._number - 1
        return PagedTile(keys, number, self._following, keys.places(number - 1))

    def box(self, row: Any) -> tuple[Int32, Int32, Int32]:
        """(page, end, rows left out) of the box at a row of the tile, the same in all lanes."""
        page, word = (
            cute.arch.shuffle_sync(value, row // self.box_rows) for value in self._places
        )
        return page, word >> ROW_BITS, word & ((1 << ROW_BITS) - 1)

    def __extract_mlir_values__(self) -> list:
        values = self._number, *self._places, *self._following
        return [ir for value in values for ir in cutlass.extract_mlir_values(value)]

    def __new_from_mlir_values__(self, values: list) -> PagedTile:
        number, *places = (cutlass.new_from_mlir_values(Int32(0), [ir]) for ir in values)
        return PagedTile(self._keys, number, tuple(places[:2]), tuple(places[2:]))


def load_pages(
    source: TmaTensor, smem: cute.Tensor, place: tuple, target: tuple, multicast: Any = None
) -> None:
    """Load a tile of paged rows by boxes.  place: (`PagedTile`, first row in it, column block,
    head); target: (barrier, stage)."""
    (tile, first_row, column_block, head), (barrier, stage) = place, target
    box, columns = tile.box_rows, cute.size(smem, mode=[1])
    for row in range(0, cute.size(smem, mode=[0]), box):
        page, end, start = tile.box(first_row + row)
        rows = cute.local_tile(smem, (box, columns, cute.size(smem, mode=[2])), (row // box, 0, 0))
        wanted = clipped_box(source.tensor, (box, columns), (start, column_block, end, head, page))
        load_box(source, rows, wanted, barrier, stage, multicast=multicast)
