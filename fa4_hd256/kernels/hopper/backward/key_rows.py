"""Kernels whose rows are keys: where a warpgroup's 64 of them lie, which queries they are seen by,
and LSE and delta of the queries that pass, which belong to columns here."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from ...backward.block_mask import WORD_PAIR, BlockList
from ...backward.common import BackwardContext
from ...backward.ds_tiles import RUN
from ...backward.key_tiles import KeyTiles
from ...mask.block_mask import FULL
from ...mask.masking import hide_unseen
from ...rows.sequences import TilePlace
from ..instructions import (
    QUAD,
    ROWS,
    fragment_columns,
    row_of_fragment,
    rows_of,
)

__all__ = ["KeyRows"]

BEYOND = 1 << 30  # a query that no key sees


class KeyRows(KeyTiles):
    """Mixed into a kernel, before its base.  Tiles: `KeyTiles`."""

    def first_row(self, context: BackwardContext, work: Any) -> Int32:
        """The first key of this warpgroup."""
        plan = self.plan
        first = work.block * plan.tile_rows + context.cta_rank * plan.own_rows
        return first + self.warpgroup() * ROWS

    def result_rows(self, context: BackwardContext, work: Any) -> Any:
        return context.sequences.key(work.batch)

    def places(self, context: BackwardContext, box: str, work: Any, step: Any) -> TilePlace:
        """Return the place of a box of keys or queries; see `tma_tile`."""
        if box in ("k", "v"):
            return self.place_of_keys(context, work)
        return self.place_of_queries(context, work, step)

    def place_of_keys(self, context: BackwardContext, work: Any) -> TilePlace:
        """Return the place of a CTA's keys of K or V; see `tma_tile`."""
        first = work.block * self.plan.tile_rows + context.cta_rank * self.plan.own_rows
        head = work.head // context.scalars.head_parts
        return context.sequences.key(work.batch), first, 0, head

    def place_of_queries(self, context: BackwardContext, work: Any, step: Any) -> TilePlace:
        """Return the place of a CTA's half of the columns of Q or dO of a step; see `tma_tile`."""
        row = self.query_tile(context, work, step) * self.plan.step_columns
        return context.sequences.query(work.batch), row, context.cta_rank, step.head

    def mask(self, context: BackwardContext, work: Any) -> tuple[Any, ...]:
        """Return (which queries a key is seen by, first key of the warpgroup, steps that need no
        mask, whether some keys do not exist) of a tile; with a block mask (its list, rank of the
        CTA, what `locator` takes before the step)."""
        if cutlass.const_expr(self.problem_class.lists_steps):
            return self.block_list(context, work), context.cta_rank, (context, work)
        first, visibility = self.first_row(context, work), self.transposed(context, work)
        rows = self.plan.tile_rows
        steps = visibility.tile_range((work.block * rows, rows), (first, ROWS))
        unmasked = steps.unmasked_begin, steps.unmasked_end
        return visibility, first, unmasked, first + ROWS > visibility.seqlen_q

    def locator(self, context: BackwardContext, work: Any, step: Any) -> Any:
        """Return the function from a score's number to its (query head, query, key)."""
        columns, first = self.plan.step_columns, self.first_row(context, work)
        query = self.query_tile(context, work, step) * columns + cute.arch.lane_idx() % QUAD * 2
        places = fragment_columns(columns)

        def locate(number: int) -> tuple[Int32, Int32, Int32]:
            column = places[number // 4 * 2 + number % 2]
            return step.head, query + column, first + row_of_fragment(number // 2 % 2)

        return locate

    @cute.jit
    def apply_mask(self, s: cute.Tensor, mask: tuple[Any, ...], step: Any):
        """Scores of queries that a key does not see := -inf; of keys beyond the sequence's end all,
        for their dS has to be 0."""
        if cutlass.const_expr(self.mask_function.exists):
            self._apply_function(s, mask, step)
        elif cutlass.const_expr(self.problem_class.lists_steps):
            self._apply_bits(s, mask, step)
        else:
            visibility, first_key, unmasked, has_rest = mask
            columns = self.plan.step_columns
            if (step.index < unmasked[0]) | (step.index >= unmasked[1]) | has_rest:
                queries = step.index * columns + cute.arch.lane_idx() % QUAD * 2
                for row in cutlass.range_constexpr(2):
                    key = first_key + row_of_fragment(row)
                    first = cutlass.select_(key < visibility.seqlen_q, queries, Int32(BEYOND))
                    visibility.apply(rows_of(s)[row], key, first, fragment_columns(columns))

    @cute.jit
    def _apply_bits(self, s: cute.Tensor, mask: tuple[BlockList, Int32, Any], step: Any):
        """Mask a step that a block mask names, by its bits."""
        listed, rank, _ = mask
        parts = self.tile_steps
        keys = [self.warpgroup() * ROWS + row_of_fragment(row) for row in range(2)]
        words = step.index % parts * WORD_PAIR, cute.arch.lane_idx() % QUAD * 2
        place = step.head, step.index // parts
        is_partial, bits = listed.key_bits(place, rank, keys, words)
        if is_partial:
            self._hide(s, bits)

    @cute.jit
    def _apply_function(self, s: cute.Tensor, mask: tuple[BlockList, Int32, Any], step: Any):
        """Mask a step by the function that says what is seen."""
        listed, rank, where = mask
        number = listed.bit_tile((step.head, step.index // self.tile_steps), rank)
        if number != FULL:
            context, work = where
            places = self.mask_places(context, work, self.locator(context, work, step))
            self.mask_function.hide(s, places, number)

    def _hide(self, s: cute.Tensor, bits: tuple[Uint32, ...]) -> None:
        """Scores of queries without a bit := -inf.  bits: two words of each of the two keys."""
        for number, row in enumerate(rows_of(s)):
            words = bits[WORD_PAIR * number : WORD_PAIR * (number + 1)]
            hide_unseen(row, words, fragment_columns(self.plan.step_columns))

    def passing_stats(self, context: BackwardContext, name: str, stage: Any) -> cute.Tensor:
        """-LSE ("lse") or -delta of this thread's queries, in shared memory: (2, runs of eight)."""
        columns = self.plan.step_columns
        layout = cute.make_layout((2, QUAD, columns // RUN), stride=(1, 2, RUN))
        by_lane = cute.make_tensor(context.smem[name].iterator + stage * columns, layout)
        return by_lane[None, cute.arch.lane_idx() % QUAD, None]
