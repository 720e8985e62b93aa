"""Keys and values in pages of a multiple of 16 rows: where the rows of a KV tile lie, and their
loads.  Rows of pages of other sizes are gathered (`gathered`).

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

NOTE [left padding].  With cache_leftpad the first key of a sequence may be any row of its pages.
KV tiles then count keys from the start of the page of the first key, so that boxes stay within
pages; the mask hides the rows before the first key.  These rows may hold anything, NaN included,
and P = 0 does not hide a NaN in V.  So a box that begins before the first key is clipped on that
side: its coordinate is negative, and TMA fills the rows below 0 with zeros.  Such a load has a
descriptor of its own (`sequences.clipped_at_start`).  A box wholly before the first key takes that
key into its last row, NOTE [empty tiles].

TMA cannot clip one box on both sides.  That would take a sequence within one page, whose keys are
therefore counted from its first key on: its boxes begin anywhere, and what of them lies past the
page lies past the last key.  In all other cases the first page is in use up to its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..operands import LoadTarget, TmaTensor, load_box
from ..plan.edges import SharedByReference
from ..rows.sequences import FirstPage, Sequence, SequenceTensors, TilePlace, clip, clipped_box
from .context import ForwardContext as Context
from .keys import KeySource

#: Bits of a box's clipped rows beside its end, more than any box has.
ROW_BITS = 8
#: Rows of a box at most, so that those clipped on either side fit into these bits.
MOST_ROWS = 1 << (ROW_BITS - 1)


#: Place of a box: (start, column block, end, head, page), as of `clipped_box`.
BoxPlace = tuple[Any, Any, Any, Int32, Int32]


class PagedKeys(SharedByReference):
    """The keys of one batch entry, for the steps of one query tile.

    table: (pages,) of the entry.  length: rows in use.  first_key: the first one that is seen.
    page_size: rows of a page; box: of a box; tile: of a KV tile.  first_page: where keys are
    counted from; None for the first row of the first page.
    """

    def __init__(
        self,
        table: cute.Tensor,
        length: Int32,
        first_key: Int32,
        sizes: tuple[int, int, int],
        first_page: FirstPage | None = None,
    ) -> None:
        """sizes: page_size, box, tile."""
        self.page_size, self.box, self.tile = sizes
        self.begins_within = first_page is not None
        if first_page is not None:
            assert self.box <= MOST_ROWS
            length, first_key = length + first_page.row, first_key + first_page.row
        self._table, self._length, self._begin = table, length, first_page
        self._first_page = first_key // self.page_size
        self._last_page = (length - 1) // self.page_size

    def places(self, kv_tile: Int32) -> tuple[Int32, Int32]:
        """Return (page, end and rows left out in one word) of the box of a KV tile that is this
        lane's; lanes past the boxes repeat them."""
        box = cute.arch.lane_idx() % (self.tile // self.box)
        row = kv_tile * self.tile + box * self.box
        if self._begin is not None:
            row = row + self._begin.row
        page = cutlass.max(row // self.page_size, self._first_page)
        page = cutlass.max(cutlass.min(page, self._last_page), 0)
        before = page * self.page_size
        rows = Sequence(Int32(0), self._length - before, self._table[page])
        first_row = cutlass.max(row - before, 0)
        end, start = clip(rows, first_row, self.box, least=1)
        if self._begin is not None:
            # Of the box those before the first key: NOTE [left padding].
            first_key = self._begin.row + self._begin.hidden - before
            hidden = cutlass.min(first_key - first_row, self.box - 1)
            end = cutlass.select_(hidden > 0, first_key, end)
            start = cutlass.select_(hidden > 0, -hidden, start) + self.box
        return rows.batch, end << ROW_BITS | start

    def at(self, kv_tile: Int32) -> PagedTile:
        return PagedTile(self, kv_tile, self.places(kv_tile), self.places(kv_tile - 1))


class PlacedTile:
    """A KV tile with places of its rows and of the next one's, by lane; lives across loops. KV
    tiles are worked on in falling order. keys: `keys.places(number)` returns the places of a tile,
    a tuple of Int32."""

    def __init__(
        self, keys: Any, number: Int32, places: tuple[Int32, ...], following: tuple[Int32, ...]
    ) -> None:
        self._keys, self._number, self._places, self._following = keys, number, places, following

    def next(self) -> PlacedTile:
        keys, number = self._keys, self._number - 1
        return type(self)(keys, number, self._following, keys.places(number - 1))

    def __extract_mlir_values__(self) -> list:
        values = self._number, *self._places, *self._following
        return [ir for value in values for ir in cutlass.extract_mlir_values(value)]

    def __new_from_mlir_values__(self, values: list) -> PlacedTile:
        number, *places = (cutlass.new_from_mlir_values(Int32(0), [ir]) for ir in values)
        count = len(self._places)
        return type(self)(self._keys, number, tuple(places[:count]), tuple(places[count:]))


class PagedTile(PlacedTile):
    """A KV tile of boxes, each the place of a lane."""

    @property
    def box_rows(self) -> int:
        return self._keys.box

    def box(self, row: Any) -> tuple[Int32, Int32, Int32]:
        """Return (page, end, rows left out) of the box at a row of the tile, the same in all lanes.
        Where rows at the start of the box are left out, the last one is negative, and the page's
        row of the first key is in the place of the end."""
        page, word = (cute.arch.shuffle_sync(value, row // self.box_rows) for value in self._places)
        end, start = word >> ROW_BITS, word & ((1 << ROW_BITS) - 1)
        return page, end, start - self.box_rows if self._keys.begins_within else start


def load_pages(
    source: TmaTensor,
    smem: cute.Tensor,
    place: TilePlace,
    target: LoadTarget,
    multicast: Any = None,
) -> None:
    """Load a tile of paged rows by boxes: the `KeySource.load` of a `PagedTile`."""
    tile, first_row, column_block, head = place
    box, columns = tile.box_rows, cute.size(smem, mode=[1])
    for row in range(0, cute.size(smem, mode=[0]), box):
        page, end, start = tile.box(first_row + row)
        rows = cute.local_tile(smem, (box, columns, cute.size(smem, mode=[2])), (row // box, 0, 0))
        place_of_box = start, column_block, end, head, page
        if source.from_start is None:
            _load_box(source, rows, place_of_box, target, multicast)
        else:
            _load_padded_box(source, rows, place_of_box, target, multicast)


@cute.jit
def _load_padded_box(
    source: TmaTensor, smem: cute.Tensor, place: BoxPlace, target: LoadTarget, multicast: Any
) -> None:
    """Load a box that may begin before the first key, NOTE [left padding]."""
    if place[0] < 0:
        _load_box(source.from_start, smem, place, target, multicast)
    else:
        _load_box(source, smem, place, target, multicast)


def _load_box(
    source: TmaTensor, smem: cute.Tensor, place: BoxPlace, target: LoadTarget, multicast: Any
) -> None:
    shape = cute.size(smem, mode=[0]), cute.size(smem, mode=[1])
    wanted = clipped_box(source.tensor, shape, place)
    load_box(source, smem, wanted, *target, multicast=multicast)


class KeysInPages(KeySource):
    """Keys in pages of a size that is compiled in; a KV tile is a `PagedTile`."""

    load: Callable[..., None] = staticmethod(load_pages)

    @property
    def page_size(self) -> int:
        size: int = self.kernel.problem_class.page_size
        return size

    def count(self, sequences: SequenceTensors, rows: Any) -> Any:
        return rows * cute.size(sequences.page_table, mode=[1])

    def box_rows(self, rows: int) -> int:
        return math.gcd(self.page_size, self.kernel.load_keys)

    def first(self, context: Context, work: Any, visibility: Any, first_query: Any) -> PlacedTile:
        last, batch = super().first(context, work, visibility, first_query), context.batch(work)
        return self.of_entry(context, work, batch, visibility, first_query).at(last)

    def of_entry(
        self, context: Context, work: Any, batch: Int32, visibility: Any, first_query: Any
    ) -> Any:
        table = context.sequences.tensors.page_table[batch, None]
        sizes = self.page_size, self.box_rows(self.block_kv), self.block_kv
        first_key, first_page = visibility.first(first_query), context.first_page(batch)
        return PagedKeys(table, visibility.seqlen_k, first_key, sizes, first_page)

    def next(self, kv_tile: PlacedTile) -> PlacedTile:
        return kv_tile.next()

    def first_row(self, kv_tile: PlacedTile) -> int:
        return 0

    def rows(self, context: Context, work: Any, kv_tile: PlacedTile) -> PlacedTile:
        return kv_tile
