"""Tiles of the MMAs of a stored dS: dK or dQ, their rows and steps.

One tile is 256 rows of one result: keys of a part of a KV head's query heads, or queries of one
head; one step a tile of dS and 128 rows of Q or K.

NOTE [dS is read once].  Every element of dS belongs to a tile of dK and to one of dQ.  Both begin
at the diagonal, dK with rising queries, dQ with falling keys: t steps later keys b meet queries b +
t in either.  Tiles of the two kinds alternate in the order of the launch, so those of a head run
side by side, and the second reading finds in L2 what the first brought.  L2 holds what all tiles
read in some ten steps, so heads alternate only as far as they begin together
(`GemmOrder.parts_at_once`).

NOTE [tiles in a row].  Of packed sequences each would have tiles for the longest one.  Where that
is more, a kernel may number the tiles of one sequence after those of the other (`PackedTiles`), as
`schedulers.order`, NOTE [blocks in a row], does blocks.  A sequence's tiles are then as many as
there is room for its own blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...schedulers.carried import Carried
from ...schedulers.order import PackedBlocks, TileProblem, maximum, select
from ..mask.masking import MaskKind
from ..plan.edges import SharedByReference
from .block_mask import BlockList, least_section
from .common import BackwardContext as Context
from .common import heads_of_part, heads_per_part
from .ds_tiles import BLOCK_TILES, DS_BLOCK, DS_TILE, StoredDs, count_blocks


@dataclass(frozen=True)
class GemmOrder(SharedByReference):
    """The tiles of a part of a KV head's query heads. blocks_k, blocks_q: of 256 rows, of the
    longest sequence. heads: query heads of a part."""

    blocks_k: Any
    blocks_q: Any
    heads: Any
    mask: MaskKind

    @classmethod
    def of(cls, max_seqlen_k: Any, max_seqlen_q: Any, heads: Any, mask: MaskKind) -> GemmOrder:
        return cls(count_blocks(max_seqlen_k), count_blocks(max_seqlen_q), heads, mask)

    @property
    def num_tiles(self) -> Any:
        return self.blocks_k + self.heads * self.blocks_q

    @property
    def _both(self) -> Any:
        """Return the number of tiles of dK that alternate with as many of dQ."""
        of_queries = self.heads * self.blocks_q
        return select(self.blocks_k < of_queries, self.blocks_k, of_queries)

    def parts_at_once(self, clusters: Any) -> Any:
        """Parts whose tiles are interleaved, on so many CTA pairs: as many as are at work at once
        with all that are interleaved.  With more, tiles of a part would begin when others of it are
        done, and what both read of dS came from HBM twice.  A tile of dK may be as long as several
        of dQ; with fewer parts the last ones' would begin late.  With one query head per part all
        tiles are interleaved, and those of a part begin closest together by themselves.
        """
        of_part = 2 * self._both
        of_all = select(of_part < clusters, clusters, of_part)
        return select(self.heads == 1, of_part, of_all) // of_part

    def parts_at_last(self, clusters: Any) -> Any:
        """Parts that end together, at least: every CTA pair has one of the interleaved tiles, or
        the long ones of the last part would be waited for."""
        of_part = 2 * self._both
        return (clusters + of_part - 1) // of_part

    def tile(self, number: Any) -> tuple[Any, Any, Any]:
        """Return (whether it is of dK, block of its rows, if it is of dQ which query head of the
        part). Tiles of the two kinds alternate as far as there are both; of either the longest come
        first."""
        both = self._both
        takes_turns = number < 2 * both
        of_keys = select(takes_turns, number % 2 == 0, self.blocks_k > both)
        rank = select(takes_turns, number // 2, number - both)
        key_block, head, query_block = rank, rank // self.blocks_q, rank % self.blocks_q
        if self.mask.bounded_right:
            query_block = self.blocks_q - 1 - query_block
        elif self.mask.bounded_left:
            key_block = self.blocks_k - 1 - key_block
        if not isinstance(of_keys, bool):
            of_keys = Boolean(of_keys)
        return of_keys, select(of_keys, key_block, query_block), head


@dataclass(frozen=True)
class PackedTiles(PackedBlocks):
    """Tiles of packed sequences, of a part of a KV head's query heads, numbered one sequence after
    the other: NOTE [tiles in a row].

    offsets: where keys begin. offsets_q: (sequences + 1,) where queries begin. heads: query heads
    of a part.
    """

    offsets_q: Any = None
    heads: Any = 1

    CARRIED = ("offsets", "is_used", "offsets_q", "heads")

    def count(self, total_rows: Any, sequences: Any) -> Any:
        """Numbers in all. total_rows: (keys, queries) of all sequences."""
        keys, queries = (super(PackedTiles, self).count(rows, sequences) for rows in total_rows)
        return keys + self.heads * queries

    def begin(self, sequence: Any) -> Any:
        return super().begin(sequence) + self.heads * self._first_query_block(sequence)

    def _first_query_block(self, sequence: Any) -> Any:
        return self.offsets_q[sequence] // self.rows + sequence

    def blocks(self, sequence: Any) -> tuple[Any, Any]:
        """Return (blocks of keys, blocks of queries) of a sequence. Offsets that do not ascend give
        one of each at least."""
        firsts = super().begin, self._first_query_block
        return tuple(maximum(first(sequence + 1) - first(sequence), 1) for first in firsts)


@cute.jit
def _blocks_of(
    packed: PackedTiles, sequence: Int32, of_longest: tuple[Int32, Int32]
) -> tuple[Int32, Int32]:
    """Blocks of keys and of queries that a sequence has tiles for."""
    blocks_k, blocks_q = of_longest
    if packed.is_used != 0:
        blocks_k, blocks_q = packed.blocks(sequence)
    return blocks_k, blocks_q


@dataclass(frozen=True)
class ResultTile(SharedByReference):
    """Result that a tile of the launch computes. of_keys: of dK, else of dQ. block: of 256 rows.
    head: of the result: a part of a KV head, or a query head. first_head, num_heads: query heads
    whose dS is summed; none where the last part of a group is short."""

    of_keys: Boolean
    block: Int32
    head: Int32
    first_head: Int32
    num_heads: Int32


class Walk(Carried):
    """The step of a tile: (query head, place); lives across loops. Places rise from `start`, and
    after the last of [begin, end) go on at the first, until they are back at `start`, where the
    next head begins. A tile of dQ counts them down: `column`."""

    CARRIED = ("head", "place")

    def __init__(
        self,
        head: Int32,
        place: Int32,
        tile: ResultTile,
        limits: tuple[Int32, Int32, Int32],
        ds: StoredDs,
        listed: BlockList | None = None,
    ) -> None:
        """ds: of the sequence; of listed tiles it begins with those of the CTA's rows.  listed: the
        tiles at the places, where a block mask names them; `column` otherwise."""
        self.head, self.place = head, place
        self.tile, self.limits, self.ds, self.listed = tile, limits, ds, listed

    @property
    def column(self) -> Int32:
        if self.listed is not None:
            return self.listed.tile(self.place)
        begin, end, _ = self.limits
        return cutlass.select_(self.tile.of_keys, self.place, begin + end - 1 - self.place)

    def ds_number(self, cta_rank: Int32) -> Int32:
        """The number of a CTA's tile of dS of the step, in its query head."""
        if self.listed is not None:
            of_queries = self.listed.ds_column(self.place)
            return self.ds.first + cutlass.select_(self.tile.of_keys, self.place, of_queries)
        row_tile, column = self.tile.block * BLOCK_TILES + cta_rank, self.column
        kv_tile = cutlass.select_(self.tile.of_keys, row_tile, column)
        q_tile = cutlass.select_(self.tile.of_keys, column, row_tile)
        return self.ds.row(kv_tile) + q_tile

    def following(self) -> Walk:
        begin, end, start = self.limits
        place = self.place + 1
        place = cutlass.select_(place == end, begin, place)
        head = self.head + Int32(place == start)
        return Walk(head, place, self.tile, self.limits, self.ds, self.listed)


class GemmTiles:
    """Tiles of a kernel of both GEMMs, which owns them. A tile's head counts parts of KV heads, as
    in the kernel of dV; its block counts the tiles of dK and of dQ of that part, interleaved as far
    as there are both."""

    problem_class: Any

    def problem(self, scalars: Any, operands: tuple[cute.Tensor, ...], batch: Any) -> TileProblem:
        """The tiles: of both results, for each part of a KV head."""
        q, k = operands
        heads_kv = cute.size(k, mode=[2])
        order = self._order(scalars, cute.size(q, mode=[2]) // heads_kv)
        heads = heads_kv * scalars.head_parts
        section = cutlass.max(
            Int32(order.parts_at_once(scalars.clusters)),
            least_section(self.problem_class, scalars.clusters),
        )
        last = order.parts_at_last(scalars.clusters)
        return TileProblem(order.num_tiles, heads, batch, section, last_heads=last)

    def in_a_row(
        self,
        problem: TileProblem,
        scalars: Any,
        operands: tuple[cute.Tensor, ...],
        offsets: tuple[cute.Tensor, cute.Tensor],
    ) -> TileProblem:
        """Return the problem with NOTE [tiles in a row]. offsets: where queries and keys of packed
        sequences begin."""
        q, k = operands
        heads_kv = cute.size(k, mode=[2])
        heads = Int32(heads_per_part(scalars, cute.size(q, mode=[2]) // heads_kv))
        packed = PackedTiles(offsets[1], DS_BLOCK, offsets_q=offsets[0], heads=heads)
        return problem.in_a_row(packed, (cute.size(k, mode=[0]), cute.size(q, mode=[0])))

    def _order(self, scalars: Any, heads_per_kv: Any) -> GemmOrder:
        lengths = scalars.max_seqlen_k, scalars.max_seqlen_q
        heads = heads_per_part(scalars, heads_per_kv)
        return GemmOrder.of(*lengths, heads, self.problem_class.mask)

    def _order_of(self, context: Context, work: Any) -> GemmOrder:
        """Return the tiles of a part in the work tile's sequence."""
        order = self._order(context.scalars, context.heads_per_kv)
        packed: Any = context.order.packed
        if packed is None:
            return order
        of_longest = Int32(order.blocks_k), Int32(order.blocks_q)
        blocks_k, blocks_q = _blocks_of(packed, work.batch, of_longest)
        return replace(order, blocks_k=blocks_k, blocks_q=blocks_q)

    def tile(self, context: Context, work: Any) -> ResultTile:
        order = self._order_of(context, work)
        of_keys, block, nth = order.tile(work.block)
        first_head, num_heads = heads_of_part(context, work.head)
        return ResultTile(
            of_keys,
            block,
            cutlass.select_(of_keys, work.head, first_head + nth),
            cutlass.select_(of_keys, first_head, first_head + nth),
            cutlass.select_(of_keys, num_heads, Int32(nth < num_heads)),
        )

    def _limits(self, context: Context, work: Any, tile: ResultTile) -> tuple[Int32, Int32]:
        visibility, row = context.visibility(work, DS_TILE), tile.block * DS_BLOCK
        sides = (visibility.transposed(DS_TILE), visibility)
        count = (side.num_tiles(row, DS_BLOCK) for side in sides)
        last = (side.last_tile(row, DS_BLOCK) for side in sides)
        end = cutlass.select_(tile.of_keys, *last) + 1
        return end - cutlass.select_(tile.of_keys, *count), end

    def _listed(self, context: Context, work: Any, tile: ResultTile) -> BlockList:
        """The tiles of dS of a row, where a block mask names them."""
        of_queries = self._order(context.scalars, context.heads_per_kv).blocks_k + tile.block
        row = cutlass.select_(tile.of_keys, tile.block, of_queries)
        return BlockList.of(context.sequences.tensors, work.batch, row)

    def num_steps(self, context: Context, work: Any) -> Int32:
        """Pairs of a query head and a tile of dS in a row of them."""
        tile = self.tile(context, work)
        if cutlass.const_expr(self.problem_class.lists_steps):
            return self._listed(context, work, tile).read * tile.num_heads
        begin, end = self._limits(context, work, tile)
        return (end - begin) * tile.num_heads

    def first_position(self, context: Context, work: Any) -> Walk:
        """Start at the diagonal, NOTE [dS is read once]; of a list at its start."""
        tile, ds = self.tile(context, work), StoredDs.of(context, work)
        if cutlass.const_expr(self.problem_class.lists_steps):
            listed = self._listed(context, work, tile)
            limits = Int32(0), listed.read, Int32(0)
            # Read once a tile, not in every step.
            row = listed.ds_row(context.cta_rank)
            row = cutlass.select_(tile.of_keys, row, context.cta_rank)
            ds = replace(ds, first=ds.first + row)
            return Walk(tile.first_head, Int32(0), tile, limits, ds, listed)
        begin, end = self._limits(context, work, tile)
        start = begin
        if cutlass.const_expr(not self.problem_class.mask.bounded_right):
            diagonal = tile.block * BLOCK_TILES
            of_queries = begin + end - BLOCK_TILES - diagonal
            start = cutlass.select_(tile.of_keys, diagonal, of_queries)
            start = cutlass.max(cutlass.min(start, end - 1), begin)
        return Walk(tile.first_head, start, tile, (begin, end, start), ds)

    def next_position(self, position: Walk) -> Walk:
        return position.following()
