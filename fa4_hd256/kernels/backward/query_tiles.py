"""Tiles of queries and the steps of keys that meet them: what kernels of dQ share.

A tile is `plan.tile_rows` queries of one head, a step `plan.step_columns` keys, from the last ones
that the tile sees to the first.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...schedulers.order import TileProblem, section_heads_for
from ..limits import HEAD_DIM
from .common import BackwardContext as Context


class QueryTiles:
    """Tiles of queries of a kernel, which owns them."""

    plan: Any
    problem_class: Any
    rows_of: str | None = "q"

    def problem(self, scalars: Any, operands: tuple[cute.Tensor, ...], batch: Any) -> TileProblem:
        """The tiles: some query rows of a head each."""
        q, k = operands
        heads, rows = cute.size(q, mode=[2]), self.plan.tile_rows
        longest = cutlass.min(cute.size(k, mode=[0]), scalars.max_seqlen_k)
        return TileProblem(
            (scalars.max_seqlen_q + rows - 1) // rows,
            heads,
            batch,
            section_heads_for(
                num_heads_per_kv=heads // cute.size(k, mode=[2]),
                num_pairs=heads * batch,
                kv_bytes_per_head=cutlass.min(longest, 1 << 20) * (4 * HEAD_DIM),
                l2_bytes=scalars.l2_bytes,
                unequal_lengths=self.problem_class.has_unequal_tiles,
            ),
            later_blocks_first=self.problem_class.bounded_right,
        )

    def num_steps(self, context: Context, work: Any) -> Int32:
        rows = self.plan.tile_rows
        visibility = context.visibility(work, self.plan.step_columns)
        return visibility.num_tiles(work.block * rows, rows)

    def first_position(self, context: Context, work: Any) -> Int32:
        """The step that is worked on first, the last one of those that are seen."""
        rows = self.plan.tile_rows
        visibility = context.visibility(work, self.plan.step_columns)
        return visibility.last_tile(work.block * rows, rows)

    def next_position(self, step: Int32) -> Int32:
        return step - 1

    def result_rows(self, context: Context, work: Any) -> Any:
        return context.sequences.query(work.batch)
