"""Masks of a tile: the KV tile range that its query rows see, and the mask on a score tile.

NOTE [trees].  With a tree mask (speculative decoding) the queries of a sequence are the nodes of a
tree, and its last keys are those of the nodes.  Each query has a word: bit j says whether it sees
the j-th of these keys.  Trees of up to 32 nodes have words of 32 bits, larger ones of 64.  A query
sees all keys before the tree that window and lengths allow.  Every step that has a key of the tree
is a masked one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

WORD_BITS = 32
ALL_BITS = (1 << WORD_BITS) - 1


@dataclass(frozen=True)
class MaskKind:
    """Facts of the mask that are compiled in: whether visibility is bounded on either side.

    A causal mask is a bound of 0 on the right.  tree: whether rows have words, NOTE [trees].
    hides_rows: whether a negative bound hides rows at the end of each sequence, `windows`.
    padded_pages: rows of a page where sequences begin inside one, NOTE [left padding] of
    `forward.pages`; else 0.
    """

    bounded_left: bool = False
    bounded_right: bool = False
    tree: bool = False
    hides_rows: bool = False
    padded_pages: int = 0

    @property
    def hides_first(self) -> bool:
        """Return True if rows may not see the first keys of a KV tile."""
        return self.bounded_left or self.padded_pages > 0


class KvSplit(NamedTuple):
    """KV split of a query tile that is worked on, Int32 and Boolean. number: of the split. count:
    of equal splits, None for splits of `keys` keys each, rounded up to KV tiles; of these the last
    one has all that is left."""

    number: Any
    count: Any = None
    keys: Any = None
    is_last: Any = None


@dataclass(frozen=True)
class TileRange:
    """The KV tiles of a query tile, [begin, end), and those of them that need no mask."""

    begin: Int32
    end: Int32
    unmasked_begin: Int32
    unmasked_end: Int32

    @property
    def num_masked_first(self) -> Int32:
        """Tiles at the end of the range, worked on first: the diagonal, the sequence's end."""
        return self.end - self.unmasked_end

    @property
    def num_unmasked(self) -> Int32:
        return self.unmasked_end - self.unmasked_begin

    @property
    def num_masked_last(self) -> Int32:
        """Tiles at the start of the range: the left edge of a window, the sequence's first key."""
        return self.unmasked_begin - self.begin


@dataclass(frozen=True)
class Visibility:
    """The visible keys of one (batch, head): row r sees keys [first(r), limit(r)).

    seqlen_q, seqlen_k: Int32 lengths.  The mask is aligned to the bottom right corner: row r is
    level with key d = r + seqlen_k - seqlen_q and sees keys d - window_left .. d + window_right as
    far as they exist.  The windows are Int32, 0 or more; those of an unbounded side unused.
    block_kv: keys of one KV tile.  part: of a query tile with KV splits; the KV tiles are then
    those of this split, the visible keys stay all of them.  hidden: keys before the first one of
    the sequence, which seqlen_k counts; None for 0.
    """

    seqlen_q: Int32
    seqlen_k: Int32
    kind: MaskKind
    window_left: Int32
    window_right: Int32
    block_kv: int
    part: KvSplit | None = None
    hidden: Any = None

    def transposed(self, block_q: int) -> Visibility:
        """Return the queries that see each key: the same mask with rows and columns exchanged.
        Query r sees key j iff j - window_right <= r + seqlen_k - seqlen_q <= j + window_left, so
        the sides change places. block_q: queries of one tile of columns."""
        kind = MaskKind(self.kind.bounded_right, self.kind.bounded_left)
        return Visibility(
            self.seqlen_k, self.seqlen_q, kind, self.window_right, self.window_left, block_q
        )

    def _clip(self, key: Int32) -> Int32:
        return cutlass.max(cutlass.min(key, self.seqlen_k), 0)

    def first(self, row: Int32) -> Int32:
        """The first key that `row` sees, if it sees any."""
        if cutlass.const_expr(not self.kind.bounded_left):
            return Int32(0) if self.hidden is None else self.hidden
        first = self._clip(row + self.seqlen_k - self.seqlen_q - self.window_left)
        return first if self.hidden is None else cutlass.max(first, self.hidden)

    def limit(self, row: Int32) -> Int32:
        """One past the last key that `row` sees."""
        if cutlass.const_expr(not self.kind.bounded_right):
            return self.seqlen_k
        return self._clip(row + 1 + self.seqlen_k - self.seqlen_q + self.window_right)

    def rows_that_see(self, key: Int32, first_row: Int32) -> Uint32:
        """Return a word: bit i says whether row `first_row` + i, if any, sees a key."""
        exists = key < self.seqlen_k
        if cutlass.const_expr(self.hidden is not None):
            exists = exists & (key >= self.hidden)
        if cutlass.const_expr(not (self.kind.bounded_left or self.kind.bounded_right)):
            return cutlass.select_(exists, Uint32(ALL_BITS), Uint32(0))
        level, first, limit = key - (self.seqlen_k - self.seqlen_q) - first_row, 0, WORD_BITS
        if cutlass.const_expr(self.kind.bounded_right):
            first = level - self.window_right
        if cutlass.const_expr(self.kind.bounded_left):
            limit = level + 1 + self.window_left
        limit = cutlass.select_(exists, Int32(limit), Int32(0))
        return _bits(first, limit, self.kind.bounded_right)

    @property
    def _first_node(self) -> Int32:
        """The key of a tree's first node, which may lie before the first key there is."""
        return self.seqlen_k - self.seqlen_q

    def sees_node(self, key: Int32, nodes: Any) -> Boolean:
        """Return True if a row's word, `nodes`, lets it see a key; True for one before the tree."""
        return (_from_node(nodes, self._first_node - key) & 1) != 0

    def _last_row(self, first_row: Int32, num_rows: int) -> Int32:
        return cutlass.min(first_row + num_rows, self.seqlen_q) - 1

    def num_tiles(self, first_row: Int32, num_rows: int) -> Int32:
        """KV tiles that some existing row of [first_row, first_row + num_rows) may see."""
        begin, end = self._bounds(first_row, num_rows)
        tiles = cutlass.max(end - begin, 0)
        return cutlass.select_(first_row < self.seqlen_q, tiles, Int32(0))

    def last_tile(self, first_row: Int32, num_rows: int) -> Int32:
        return self._bounds(first_row, num_rows)[1] - 1

    def _bounds(self, first_row: Int32, num_rows: int) -> tuple[Int32, Int32]:
        """[begin, end) of the KV tiles of those rows; there are none if begin >= end."""
        end = self._end(first_row, num_rows)
        begin = self.first(first_row) // self.block_kv
        if cutlass.const_expr(self.part is not None):
            begin, end = self._bounds_of_part(begin, end)
        return begin, end

    def _bounds_of_part(self, begin: Int32, end: Int32) -> tuple[Int32, Int32]:
        assert self.part is not None
        number, count, keys, is_last = self.part
        tiles = cutlass.max(end - begin, 0)
        if cutlass.const_expr(count is not None):
            begin, end = (begin + tiles * n // count for n in (number, number + 1))
            return begin, end
        of_part = (keys + self.block_kv - 1) // self.block_kv
        before = cutlass.min(number * of_part, tiles)
        ends = cutlass.select_(is_last, tiles, cutlass.min(before + of_part, tiles))
        return begin + before, begin + ends

    def _end(self, first_row: Int32, num_rows: int) -> Int32:
        last_row = self._last_row(first_row, num_rows)
        return (self.limit(last_row) + self.block_kv - 1) // self.block_kv

    def tile_range(self, tile: tuple[Int32, int], rows: tuple[Int32, int]) -> TileRange:
        """Return the KV tiles of a query tile, with masks as some of its rows need them. tile,
        rows: (first row, number of rows) of the tile and of those of its rows."""
        begin, end = self._bounds(*tile)
        begin = cutlass.min(begin, end)
        seen_by_all = self.limit(rows[0])
        if cutlass.const_expr(self.kind.tree):
            seen_by_all = cutlass.min(seen_by_all, self._clip(self._first_node))
        unmasked_end = cutlass.max(cutlass.min(seen_by_all // self.block_kv, end), begin)
        last_row = rows[0] + rows[1] - 1
        unmasked_begin = (self.first(last_row) + self.block_kv - 1) // self.block_kv
        # Every tile needs a mask where the two masks meet: none is left between them.
        unmasked_begin = cutlass.min(cutlass.max(unmasked_begin, begin), unmasked_end)
        return TileRange(begin, end, unmasked_begin, unmasked_end)

    def apply(
        self,
        scores: cute.Tensor,
        row: Int32,
        first_key: Int32,
        columns: tuple[int, ...] | None = None,
        nodes: Any = None,
    ) -> None:
        """Set the scores of invisible keys to -inf.

        scores: register tensor of Float32 of one row; first_key: that of the first.  columns: how
        far each one's key is from the first, in rising order; None where they are consecutive.
        nodes: the row's word, Int32 or Int64, NOTE [trees]; None where it has none, or the step no
        key of the tree.

        A word of bits says which of 32 keys are visible. ptxas moves such bits to predicates eight
        at a time, so that a key costs little more than its selection, whatever bounds it.
        """
        limit, first = self.limit(row) - first_key, self.first(row) - first_key
        columns = tuple(range(cute.size(scores))) if columns is None else columns
        for begin in range(0, columns[-1] + 1, WORD_BITS):
            visible = _bits(first - begin, limit - begin, self.kind.hides_first)
            if cutlass.const_expr(nodes is not None):
                visible = visible & _from_node(nodes, self._first_node - first_key - begin)
            for number, column in enumerate(columns):
                if begin <= column < begin + WORD_BITS:
                    score = scores[number]
                    is_visible = (visible & (1 << (column - begin))) != 0
                    scores[number] = cutlass.select_(is_visible, score, Float32(-math.inf))


def _bits(first: Int32, limit: Int32, hides_first: bool) -> Uint32:
    """Set bits first .. limit - 1 of a word: bmsk (PTX ISA 9.7.1), clamped to 32."""
    start = cutlass.max(first, 0) if hides_first else Int32(0)
    width = cutlass.max(limit - start, 0)
    return cute.arch.inline_ptx(
        "bmsk.clamp.b32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint32],
        read_only_args=[Int32(start), Int32(width)],
    )


def _from_node(nodes: Any, first: Int32) -> Uint32:
    """Return a word whose bit first + j is bit j of `nodes`, and whose bits below `first` are set.
    nodes: Int32 or Int64. first may be negative. PTX ISA 9.7.8, shr, shf.r.clamp and shf.l.clamp:
    amounts are unsigned and clamped to 32."""
    skipped = cutlass.max(-first, 0)
    if cutlass.const_expr(nodes.width == WORD_BITS):
        rest = "shr.b32 rest, {$r0}, {$r1};\n"
        amounts = [skipped]
    else:
        # The first amount brings the high half down, the second one bits of it alone.
        rest = (
            ".reg .b32 low, high;\n"
            "mov.b64 {low, high}, {$r0};\n"
            "shf.r.clamp.b32 rest, low, high, {$r1};\n"
            "shr.b32 rest, rest, {$r3};\n"
        )
        amounts = [skipped, cutlass.max(skipped - WORD_BITS, 0)]
    return cute.arch.inline_ptx(
        "{.reg .b32 rest;\n" + rest + "shf.l.clamp.b32 {$w0}, 0xFFFFFFFF, rest, {$r2};}",
        write_only_types=[Uint32],
        read_only_args=[nodes, amounts[0], cutlass.max(first, 0), *amounts[1:]],
    )


def hide_unseen(scores: cute.Tensor, words: Sequence[Any], columns: Sequence[int]) -> None:
    """Scores without a bit := -inf.  columns: of each score its bit, counted over the words."""
    for place, column in enumerate(columns):
        word = Uint32(words[column // WORD_BITS])
        is_visible = (word & (1 << column % WORD_BITS)) != 0
        score = scores[place]
        scores[place] = cutlass.select_(is_visible, score, Float32(-math.inf))
