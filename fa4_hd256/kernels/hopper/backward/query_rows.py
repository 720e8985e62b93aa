"""Queries as rows of a kernel's tiles: where a warpgroup's 64 of them lie, which keys they see, and
their LSE and delta, which belong to rows here."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....schedulers.protocol import WorkTile
from ...backward.common import BackwardContext as Context
from ...backward.query_tiles import QueryTiles
from ...functions.kernel_functions import KernelFunctions, Locate
from ...mask.masking import Visibility
from ...rows.sequences import TilePlace
from ..instructions import QUAD, ROWS, fragment_columns, row_of_fragment, rows_of, this_warpgroup
from .config import SinglePlan
from .key_rows import StatOf


class QueryMask(NamedTuple):
    """Facts that hide scores of a tile. visibility: which keys a query sees. first_query: of the
    warpgroup. unmasked: [begin, end) of the steps that need no mask. stats: -LSE, and -delta, of
    both rows of this thread."""

    visibility: Visibility
    first_query: Int32
    unmasked: tuple[Int32, Int32]
    stats: list[list[Float32]]


class QueryRows(QueryTiles):
    """Queries of the tiles of a kernel, which owns it.  Tiles: `QueryTiles`."""

    def __init__(self, plan: SinglePlan, functions: KernelFunctions) -> None:
        self.plan, self.problem_class = plan, functions.problem_class

    def first_row(self, context: Context, work: WorkTile) -> Int32:
        rank, group = context.cta_rank, this_warpgroup()
        return work.block * self.plan.tile_rows + rank * self.plan.cta_rows + group * ROWS

    def places(self, context: Context, box: str, work: WorkTile, position: Int32) -> TilePlace:
        """Return the place of a box of the tile or of a step; see `tma_tile`."""
        if box in ("q", "dout"):
            first = work.block * self.plan.tile_rows + context.cta_rank * self.plan.cta_rows
            return context.sequences.query(work.batch), first, 0, work.head
        row, head = position * self.plan.step_columns, work.head // context.heads_per_kv
        return context.sequences.key(work.batch), row, context.cta_rank, head

    def mask(self, context: Context, work: WorkTile) -> QueryMask:
        rows, first = self.plan.tile_rows, self.first_row(context, work)
        visibility = context.visibility(work, self.plan.step_columns)
        steps = visibility.tile_range((work.block * rows, rows), (first, ROWS))
        unmasked = steps.unmasked_begin, steps.unmasked_end
        row = context.sequences.padded_query_offset(work.batch) + first
        stats = [
            [context.tensors.stats[which, work.head, row + row_of_fragment(i)] for i in range(2)]
            for which in range(2)
        ]
        return QueryMask(visibility, first, unmasked, stats)

    def locator(self, context: Context, work: WorkTile, position: Int32) -> Locate:
        """Return the function from a score's number to its (query head, query, key)."""
        first, columns = self.first_row(context, work), fragment_columns(self.plan.step_columns)
        key = position * self.plan.step_columns + cute.arch.lane_idx() % QUAD * 2

        def locate(number: int) -> tuple[Int32, Int32, Int32]:
            query = first + row_of_fragment(number // 2 % 2)
            return work.head, query, key + columns[number // 4 * 2 + number % 2]

        return locate

    @cute.jit
    def apply_mask(self, s: cute.Tensor, mask: QueryMask, position: Int32):
        """Scores of keys that a query does not see := -inf."""
        visibility, first_query, unmasked, _ = mask
        columns = self.plan.step_columns
        if (position < unmasked[0]) | (position >= unmasked[1]):
            key = position * columns + cute.arch.lane_idx() % QUAD * 2
            for row in cutlass.range_constexpr(2):
                query = first_query + row_of_fragment(row)
                visibility.apply(rows_of(s)[row], query, key, fragment_columns(columns))

    def stats_of(
        self, context: Context, mask: QueryMask, stages: tuple[Int32, Int32]
    ) -> tuple[StatOf, StatOf]:
        lse, delta = mask.stats
        return lambda i: lse[i // 2 % 2], lambda i: delta[i // 2 % 2]
