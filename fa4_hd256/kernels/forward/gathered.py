"""Keys and values in pages of any size: rows gathered one by one.

NOTE [gathered rows].  TMA loads a box of rows that follow each other; a page of one row has none.
So the rows of a KV tile are gathered, and lie in shared memory as TMA's boxes do (`operands`).  On
Blackwell TMA takes four rows by their numbers; on Hopper a few warps copy them
(`hopper.forward_common`).

Each lane finds the pages of some rows, and hands over where these lie by a shuffle.  The pages of
the next tile are looked up while this one is loaded, so that nobody waits for a page's number but
at the first step of a query tile.  The size of a page is an argument: one kernel serves all sizes.

A row that no query of the tile sees, before the first key or past the last one, is filled with
zeros: neither it nor its page's entry in the table is read.  So keys count from the first key of a
sequence, wherever in its pages that lies.  A number that is none of a page has zeros for rows, as
TMA has outside a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ..limits import ELEMENT_BYTES, TMA_ALIGNMENT, WARP_SIZE
from ..operands import BLOCK_COLUMNS, LoadTarget
from ..plan.edges import SharedByReference
from ..rows.sequences import TilePlace
from .context import ForwardContext
from .pages import KeysInPages, PlacedTile

#: Page of a row that is not read, and its number.
NO_PAGE = -1
#: Rows that TMA gathers at once.
TMA_ROWS = 4


@dataclass(frozen=True)
class KeyRange:
    """Keys [begin, end) that a tile's queries see.  first_row: of the pages, that is key 0."""

    begin: Int32
    end: Int32
    first_row: Int32


class GatheredKeys(SharedByReference):
    """The keys of one batch entry, for the steps of one query tile, as one of some warps gathers
    them. table: (pages,) of the entry. sizes: of `page_sizes`. keys: see `KeyRange`. tile: rows of
    a KV tile. share: (number of this warp, number of all)."""

    def __init__(
        self,
        table: cute.Tensor,
        sizes: tuple[Int32, Int32],
        keys: KeyRange,
        tile: int,
        share: tuple[Int32 | int, int],
    ) -> None:
        warp, warps = share
        self.rows = tile // warps
        assert self.rows * warps == tile and self.rows % WARP_SIZE == 0
        self.first_row = warp * self.rows
        self._table, self._keys, self._tile = table, keys, tile
        self._page_size, self._pages = sizes

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
    """The rows of a KV tile that one warp gathers; each lane has found some."""

    @property
    def first_row(self) -> Int32 | int:
        return self._keys.first_row

    @property
    def pairs(self) -> list[tuple[Int32, Int32]]:
        return list(zip(self._places[::2], self._places[1::2], strict=True))


class GatherTensor(NamedTuple):
    """K or V as TMA gathers rows of it: a copy atom and the coordinates of (rows, columns), where
    the rows are as far apart as every stride allows. strides: rows of that tensor between heads,
    between rows of a page, and between pages. page_size, pages: of K or V."""

    atom: Any
    tensor: Any
    strides: tuple[Int32, Int32, Int32]
    page_size: Int32
    pages: Int32


def page_sizes(source: GatherTensor | cute.Tensor) -> tuple[Int32, Int32]:
    if isinstance(source, GatherTensor):
        return source.page_size, source.pages
    return cute.size(source, mode=[0]), cute.size(source, mode=[3])


@cute.jit
def _common_divisor(first: Int64, second: Int64) -> Int64:
    while second != 0:
        first, second = second, first % second
    return first


def gather_tensor(operation: Any, view: cute.Tensor) -> GatherTensor:
    """Make it of (page_size, columns, heads, pages), on the host.  operation: of the loads."""
    page_size, columns, heads, pages = view.shape
    row, _, head, page = (Int64(stride) for stride in view.stride)
    apart = cute.assume(
        _common_divisor(_common_divisor(row, head), page), divby=TMA_ALIGNMENT // ELEMENT_BYTES
    )
    strides = head // apart, row // apart, page // apart
    last = sum((size - 1) * stride for size, stride in zip((heads, page_size, pages), strides))
    shape = Int32(last + 1), columns
    flat = cute.make_tensor(view.iterator, cute.make_layout(shape, stride=(apart, 1)))
    # Only the layout of the numbers counts.
    numbers = cute.make_tensor(
        cute.recast_ptr(view.iterator, dtype=Int32), cute.make_layout(shape, stride=(1, 0))
    )
    of_box = cute.make_layout((TMA_ROWS, BLOCK_COLUMNS), stride=(BLOCK_COLUMNS, 1))
    layout = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, of_box)
    info = cpasync.make_tiled_tma_atom(
        operation, flat, layout, (TMA_ROWS, BLOCK_COLUMNS), gmem_coord_tensor=numbers
    )
    of_rows = tuple(Int32(stride) for stride in strides)
    return GatherTensor(info[0], info[1], of_rows, Int32(page_size), Int32(pages))


def load_rows(
    source: GatherTensor, smem: cute.Tensor, place: TilePlace, target: LoadTarget
) -> None:
    """Load rows by TMA, four at a time (.tile::gather4, PTX ISA 9.7.9.27.1.2)."""
    tile, first_row, column_block, head = place
    rows = cute.size(smem, mode=[0])
    for run, own in enumerate(_row_numbers(source, tile, first_row, rows, head)):
        _load_run(source, smem, own, (run, column_block), target)


@cute.jit
def _load_run(
    source: GatherTensor,
    smem: cute.Tensor,
    own: Int32,
    place: tuple[int, Int32 | int],
    target: LoadTarget,
) -> None:
    """Load as many rows as a warp has lanes.  own: the number of this lane's row.  place: number of
    the run in the tile, column block.

    A loop, since a load role loads tiles in a dozen places, and each would have all gathers.  Four
    boxes an iteration: with one the addresses take longer than the gathers.
    """
    run, column_block = place
    barrier, stage = target
    columns, stages = (cute.size(smem, mode=[mode]) for mode in (1, 2))
    blocks = columns // BLOCK_COLUMNS
    boxes = cute.zipped_divide(source.tensor, (TMA_ROWS, BLOCK_COLUMNS))
    for box in cutlass.range(WARP_SIZE // TMA_ROWS, unroll=4):
        numbers = cute.make_rmem_tensor(TMA_ROWS, Int32)
        for i in cutlass.range_constexpr(TMA_ROWS):
            numbers[i] = cute.arch.shuffle_sync(own, box * TMA_ROWS + i)
        wanted = cute.make_tensor(
            numbers.iterator,
            cute.make_layout(((TMA_ROWS, BLOCK_COLUMNS), (1, 1)), stride=((1, 0), (0, 0))),
        )
        row = run * (WARP_SIZE // TMA_ROWS) + box
        for block in cutlass.range_constexpr(blocks):
            to = cute.local_tile(smem, (TMA_ROWS, BLOCK_COLUMNS, stages), (row, block, 0))
            to_smem, coordinates, of_rows = cpasync.tma_partition(
                source.atom, 0, cute.make_layout(1), cute.group_modes(to, 0, 2), [boxes, wanted]
            )
            column = column_block * blocks + block
            cute.copy(
                source.atom,
                [coordinates[None, (0, column)], of_rows[None, (0, 0)]],
                to_smem[None, stage],
                tma_bar_ptr=barrier,
            )


def _row_numbers(
    source: GatherTensor, tile: GatheredTile, first_row: Any, rows: int, head: Int32
) -> list[Int32]:
    of_head, of_row, of_page = source.strides
    numbers = [
        cutlass.select_(
            page == NO_PAGE, Int32(NO_PAGE), page * of_page + row * of_row + head * of_head
        )
        for page, row in tile.pairs
    ]
    runs = rows // WARP_SIZE
    wanted = numbers[:runs]
    if not isinstance(first_row, int):
        for start in range(runs, len(numbers), runs):
            is_here = first_row == start * WARP_SIZE
            wanted = [
                cutlass.select_(is_here, numbers[start + run], wanted[run]) for run in range(runs)
            ]
    return wanted


class GatheredRows(KeysInPages):
    """Keys in pages of any size, whose rows TMA gathers; a KV tile is a `GatheredTile`."""

    load = staticmethod(load_rows)

    def tensor(self, name: str, view: cute.Tensor, copy: tuple[Any, int, int]) -> Any:
        return gather_tensor(self.kernel.gathering_operation(), view)

    def share(self) -> tuple[Any, int]:
        return 0, 1

    def of_entry(
        self, context: ForwardContext, work: Any, batch: Int32, visibility: Any, first_query: Any
    ) -> GatheredKeys:
        table = context.sequences.tensors.page_table[batch, None]
        keys = KeyRange(
            visibility.first(first_query), visibility.seqlen_k, context.key(work).offset
        )
        sizes = page_sizes(context.tensors.k)
        return GatheredKeys(table, sizes, keys, self.block_kv, self.share())
