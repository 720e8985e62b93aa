"""Rows of a group of softmax warps: whose they are, what hides their scores, where O of them goes.

`config` NOTE [two groups] says why there may be two groups; each has rows of its own, all keys of a
step, and a warp's rows in tensor memory from `first_row` of its context on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....schedulers.protocol import WorkTile
from ...forward.decode_rows import TileRows
from ...functions.kernel_functions import KernelFunctions, ScorePlaces
from ...plan.edges import SharedByReference
from ...rows.output_gate import gated
from .context import BlackwellDecodeContext as Context


@dataclass(frozen=True)
class GroupRows(SharedByReference):
    """Rows of a tile of a group of softmax warps, one score per thread and step. count: rows."""

    tile: TileRows
    count: int
    functions: KernelFunctions

    @property
    def of_query(self) -> int:
        return min(self.tile.of_query, self.count)

    def queries(self, context: Context, work: WorkTile) -> tuple[Int32, int]:
        first = self.tile.first_query(work) + context.first_row // self.tile.of_query
        return first, self.count // self.of_query

    def first_head(self, context: Context) -> Any:
        return context.first_row if self.tile.of_query > self.count else 0

    def places(
        self, context: Context, work: WorkTile, key: Int32, keys_exist: bool
    ) -> ScorePlaces | None:
        """Return the places of this thread's scores, one of each row."""
        first_query, packed = self.queries(context, work)[0], self.tile.packed
        first_head, of_query = self.first_head(context), self.of_query
        smaller = min if isinstance(first_head, int) else cutlass.min

        def locate(row: int) -> tuple[Int32, Int32, Int32]:
            # Rows past the heads are padding.
            in_group = smaller(first_head + row % of_query, packed - 1)
            return work.head * packed + in_group, first_query + row // of_query, key

        return self.functions.score_places(context, work, locate, keys_exist)

    def nodes(self, context: Context, work: WorkTile, is_masked: bool) -> Any:
        if not (is_masked and context.mask.tree):
            return None
        first_query, queries = self.queries(context, work)
        return [context.nodes(work, first_query + query) for query in range(queries)]

    def mask(
        self, context: Context, scores: cute.Tensor, work: WorkTile, key: Int32, nodes: Any
    ) -> None:
        """Scores of rows that do not see this thread's key := -inf.  nodes: of `nodes`."""
        of_query, visibility = self.of_query, context.visibility(work, self.tile.block_kv)
        first_query, queries = self.queries(context, work)
        # One word, not bounds of each query, which are invariant: the compiler would keep them all.
        seen = visibility.rows_that_see(key, first_query)
        for query in range(queries):
            is_visible = (seen & (1 << query)) != 0
            if cutlass.const_expr(nodes is not None):
                is_visible = is_visible & visibility.sees_node(key, nodes[query])
            for number in range(query * of_query, (query + 1) * of_query):
                scores[number] = cutlass.select_(is_visible, scores[number], Float32(-math.inf))

    @cute.jit
    def store(self, context: Context, work: WorkTile, values: cute.Tensor, column: Int32):
        """A column of O of the group's rows to global memory, in the type of `out`."""
        first_query, queries = self.queries(context, work)
        packed, length = self.tile.packed, context.query(work).length
        first_head, of_query = self.first_head(context), self.of_query
        smaller = min if isinstance(first_head, int) else cutlass.min
        for query in cutlass.range_constexpr(queries):
            if first_query + query < length:
                for number in cutlass.range_constexpr(min(packed, of_query)):
                    in_group = first_head + number
                    head = work.head * packed + in_group
                    out = context.result_row(work, first_query + query, head)
                    value = values[query * of_query + number]
                    if cutlass.const_expr(context.out_gate is not None):
                        own = work.head * packed + smaller(in_group, packed - 1)
                        gate = context.gate_row(work, first_query + query, own)
                        value = gated(value, gate, column)
                    value = value.to(out.element_type)
                    if cutlass.const_expr(self.tile.of_query > packed > of_query):
                        # The last group's last rows are padding.
                        if in_group < packed:
                            out[column] = value
                    else:
                        out[column] = value
