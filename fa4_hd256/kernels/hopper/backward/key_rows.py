"""Keys as rows of a kernel's tiles: where a warpgroup's 64 of them lie, which queries they are seen
by, and LSE and delta of the queries that pass, which belong to columns here."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from ....schedulers.protocol import WorkTile
from ...backward.block_mask import WORD_PAIR, BlockList
from ...backward.common import BackwardContext as Context
from ...backward.common import Step
from ...backward.ds_tiles import RUN
from ...backward.key_tiles import KeyTiles
from ...functions.kernel_functions import KernelFunctions, Locate
from ...mask.block_mask import FULL
from ...mask.masking import Visibility, hide_unseen
from ...rows.sequences import Sequence, TilePlace
from ..instructions import QUAD, ROWS, fragment_columns, row_of_fragment, rows_of, this_warpgroup
from .config import DvPlan, SinglePlan

BEYOND = 1 << 30  # a query that no key sees

#: -LSE, or -delta, of an element of a fragment, by its number.
StatOf = Callable[[int], Float32]


class KeyMask(NamedTuple):
    """Facts that hide scores of a tile: `KeyRows.mask` makes them. visibility: which queries a key
    is seen by. first_key: of the warpgroup. unmasked: [begin, end) of the steps that need no mask.
    has_rest: some keys do not exist."""

    visibility: Visibility
    first_key: Int32
    unmasked: tuple[Int32, Int32]
    has_rest: Boolean


class ListedKeyMask(NamedTuple):
    listed: BlockList
    rank: Int32
    context: Context
    work: WorkTile


class KeyRows(KeyTiles):
    """Keys of a kernel's tiles. Tiles: `KeyTiles`. functions: its score_mod and mask_mod."""

    def __init__(self, plan: DvPlan | SinglePlan, functions: KernelFunctions) -> None:
        self.plan, self.problem_class = plan, functions.problem_class
        self.functions = functions

    def first_row(self, context: Context, work: WorkTile) -> Int32:
        plan = self.plan
        first = work.block * plan.tile_rows + context.cta_rank * plan.cta_rows
        return first + this_warpgroup() * ROWS

    def result_rows(self, context: Context, work: WorkTile) -> Sequence:
        return context.sequences.key(work.batch)

    def places(self, context: Context, box: str, work: WorkTile, step: Step) -> TilePlace:
        """Return the place of a box of keys or queries; see `tma_tile`."""
        if box in ("k", "v"):
            return self.place_of_keys(context, work)
        return self.place_of_queries(context, work, step)

    def place_of_keys(self, context: Context, work: WorkTile) -> TilePlace:
        first = work.block * self.plan.tile_rows + context.cta_rank * self.plan.cta_rows
        head = work.head // context.scalars.head_parts
        return context.sequences.key(work.batch), first, 0, head

    def place_of_queries(self, context: Context, work: WorkTile, step: Step) -> TilePlace:
        row = self.query_tile(context, work, step) * self.plan.step_columns
        return context.sequences.query(work.batch), row, context.cta_rank, step.head

    def mask(self, context: Context, work: WorkTile) -> KeyMask | ListedKeyMask:
        if cutlass.const_expr(self.problem_class.lists_steps):
            listed = self.block_list(context, work)
            return ListedKeyMask(listed, context.cta_rank, context, work)
        first, visibility = self.first_row(context, work), self.transposed(context, work)
        rows = self.plan.tile_rows
        steps = visibility.tile_range((work.block * rows, rows), (first, ROWS))
        unmasked = steps.unmasked_begin, steps.unmasked_end
        return KeyMask(visibility, first, unmasked, first + ROWS > visibility.seqlen_q)

    def locator(self, context: Context, work: WorkTile, step: Step) -> Locate:
        """Return the function from a score's number to its (query head, query, key)."""
        columns, first = self.plan.step_columns, self.first_row(context, work)
        query = self.query_tile(context, work, step) * columns + cute.arch.lane_idx() % QUAD * 2
        places = fragment_columns(columns)

        def locate(number: int) -> tuple[Int32, Int32, Int32]:
            column = places[number // 4 * 2 + number % 2]
            return step.head, query + column, first + row_of_fragment(number // 2 % 2)

        return locate

    def apply_mask(self, s: cute.Tensor, mask: KeyMask | ListedKeyMask, step: Step) -> None:
        """Scores of unseen queries := -inf; of keys past the end all: their dS has to be 0."""
        if isinstance(mask, KeyMask):
            self._apply_range(s, mask, step)
        elif self.functions.mask_function.exists:
            self._apply_function(s, mask, step)
        else:
            self._apply_bits(s, mask, step)

    @cute.jit
    def _apply_range(self, s: cute.Tensor, mask: KeyMask, step: Step):
        visibility, first_key, unmasked, has_rest = mask
        columns = self.plan.step_columns
        if (step.index < unmasked[0]) | (step.index >= unmasked[1]) | has_rest:
            queries = step.index * columns + cute.arch.lane_idx() % QUAD * 2
            for row in cutlass.range_constexpr(2):
                key = first_key + row_of_fragment(row)
                first = cutlass.select_(key < visibility.seqlen_q, queries, Int32(BEYOND))
                visibility.apply(rows_of(s)[row], key, first, fragment_columns(columns))

    @cute.jit
    def _apply_bits(self, s: cute.Tensor, mask: ListedKeyMask, step: Step):
        listed, rank, _, _ = mask
        parts = self.tile_steps
        keys = [this_warpgroup() * ROWS + row_of_fragment(row) for row in range(2)]
        words = step.index % parts * WORD_PAIR, cute.arch.lane_idx() % QUAD * 2
        place = step.head, step.index // parts
        is_partial, bits = listed.key_bits(place, rank, keys, words)
        if is_partial:
            self._hide(s, bits)

    @cute.jit
    def _apply_function(self, s: cute.Tensor, mask: ListedKeyMask, step: Step):
        listed, rank, context, work = mask
        number = listed.bit_tile((step.head, step.index // self.tile_steps), rank)
        if number != FULL:
            places = self.functions.mask_places(context, work, self.locator(context, work, step))
            self.functions.mask_function.hide(s, places, number)

    def _hide(self, s: cute.Tensor, bits: tuple[Uint32, ...]) -> None:
        """Scores of queries without a bit := -inf.  bits: two words of each of the two keys."""
        for number, row in enumerate(rows_of(s)):
            words = bits[WORD_PAIR * number : WORD_PAIR * (number + 1)]
            hide_unseen(row, words, fragment_columns(self.plan.step_columns))

    def passing_stats(self, context: Context, name: str, stage: Int32) -> cute.Tensor:
        """-LSE ("lse") or -delta of this thread's queries, in shared memory: (2, runs of eight)."""
        columns = self.plan.step_columns
        layout = cute.make_layout((2, QUAD, columns // RUN), stride=(1, 2, RUN))
        by_lane = cute.make_tensor(context.smem[name].iterator + stage * columns, layout)
        return by_lane[None, cute.arch.lane_idx() % QUAD, None]

    def stats_of(
        self, context: Context, mask: KeyMask | ListedKeyMask, stages: tuple[Int32, Int32]
    ) -> tuple[StatOf | None, ...]:
        """Return -LSE and -delta by element of a fragment, None where the kernel has no use of it;
        both belong to columns.  stages: buffers of x and y."""
        stats: list[StatOf | None] = []
        for name, stage in zip(("lse", "delta"), stages):
            if name in self.plan.passing_stats:
                stats.append(_by_column(self.passing_stats(context, name, stage)))
            else:
                stats.append(None)
        return tuple(stats)


def _by_column(values: cute.Tensor) -> StatOf:
    """values: (2, runs of eight)."""
    return lambda i: values[i % 2, i // 4]
