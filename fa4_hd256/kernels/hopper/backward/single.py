"""One gradient by itself, with scores and dS of its own: dQ = dS K, dK = dS^T Q or dV = P^T dO.

For calls whose dS is not stored, or that request some gradients only.  One tile is 256 rows of the
result, 128 of each CTA, 64 of each of its two warpgroups; one step meets it with 64 rows of the
other side; each CTA loads half of their columns for both.  A of the MMAs, Q and dO or K and V,
stays (a, g); B, K and V or Q and dO, passes (x, y)::

    dQ   S = Q K^T     dP = dO V^T     sum += dS K       a, g = Q, dO   x, y = K, V
    dK   S^T = K Q^T   dP^T = V dO^T   sum += dS^T Q     a, g = K, V    x, y = Q, dO
    dV   S^T = K Q^T                   sum += P^T dO     a = K          x, y = Q, dO

Timeline of one CTA::

    load        x(1) y(1) x(2) y(2) ..
    warpgroup   S(0) dP(0) | S(1) dP(1) sum(0) | S(2) dP(2) sum(1) ..     | sum(n)
                     dS(0)                dS(1)                dS(2) ..            result ->

A warpgroup computes the dS of a step while the sum of the step before runs.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....schedulers import WorkTile
from ....softmax_emu.exp2 import exp2_hardware
from ....softmax_emu.recompute import scale_for_masking
from ...backward.common import BackwardContext
from ...backward.ds_tiles import RUN
from ...backward.query_tiles import QueryTiles
from ...limits import HEAD_DIM
from ...ranges import traced
from ...rows.sequences import TilePlace
from ..instructions import (
    QUAD,
    ROWS,
    commit,
    fence,
    fragment_columns,
    multiply,
    pack,
    row_of_fragment,
    rows_of,
    transposed,
    wait,
)
from .common import ScoreGradient
from .config import CTAS, SinglePlan
from .key_rows import KeyRows

__all__ = ["DkKernel", "DqKernel", "SingleDvKernel"]

TILE_ROWS, STEP_COLUMNS = SinglePlan.tile_rows, SinglePlan.step_columns
OWN_ROWS = TILE_ROWS // CTAS
RUNS = STEP_COLUMNS // RUN
OPERANDS = ("q", "k", "v", "dout")


class SingleKernel(ScoreGradient):
    """Base of the three; a kernel adds its tiles, `places`, `stats_of(context, work, stage)`, and
    `mask(context, work)` with `apply_mask`.

    stays, passes: names of a and g, and of x and y.  of_ds: the sum is of dS, else of P.
    is_scaled: the result is softmax_scale times the sum.
    """

    stays: tuple[str, ...]
    passes: tuple[str, str]
    holds = ("x_free", "y_free")
    of_ds = True
    is_scaled = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.boxes = {
            **{n: (OPERANDS.index(n), OWN_ROWS, HEAD_DIM) for n in self.stays},
            **{n: (OPERANDS.index(n), STEP_COLUMNS, HEAD_DIM // 2) for n in self.passes},
        }

    def smem(self, memory: Any) -> dict[str, cute.Tensor]:
        plan = self.plan
        found = {
            "a": memory.operand("a", OWN_ROWS, HEAD_DIM, 1),
            "g": memory.operand("g", OWN_ROWS, HEAD_DIM, 1),
            "x": memory.operand("x", STEP_COLUMNS, HEAD_DIM, plan.x_stages),
            "y": memory.operand("y", STEP_COLUMNS, HEAD_DIM, plan.y_stages),
        }
        for name, stages in (("lse", plan.x_stages), ("delta", plan.y_stages)):
            if name in plan.passing_stats:
                layout = cute.make_layout((STEP_COLUMNS, stages))
                found[name] = cute.make_tensor(memory.region(name, Float32, 128), layout)
        return found

    # --------------------------------------------------------------------------------- gradient

    def _operands(self, context: BackwardContext) -> dict[str, cute.Tensor]:
        """Operands in shared memory: "a", "g" of this warpgroup's rows; "columns" as B of the
        sum."""
        smem, own, place = context.smem, (ROWS, HEAD_DIM), (self.warpgroup(), 0)
        return {
            **{
                name: self.score.a_operand(cute.local_tile(smem[name][None, None, 0], own, place))
                for name in ("a", "g")
            },
            **{name: self.score.b_operand(smem[name]) for name in ("x", "y")},
            "columns": self.sum.b_operand(transposed(smem["x" if self.of_ds else "y"])),
        }

    @cute.jit
    def _steps(
        self,
        context: BackwardContext,
        which: tuple[WorkTile, Any],
        tensors: tuple[Any, cute.Tensor],
        states: Any,
    ):
        """The sum of one tile.  which: (tile, steps).  tensors: (operands, sum)."""
        (work, num_steps), (operands, sums) = which, tensors
        position, mask = self.first_position(context, work), self.mask(context, work)
        weights = self.sum.a_fragment(STEP_COLUMNS)
        context.barriers["a_loaded"].wait(states["a_loaded"])
        where = work, position, mask
        states = self._scores(context, where, (operands, None, weights), states)
        for _ in cutlass.range(1, num_steps, unroll=1):
            position = self.next_position(position)
            where = work, position, mask
            states = self._scores(context, where, (operands, sums, weights), states)
        context.barriers["a_free"].arrive(states["a_loaded"])
        states.advance("a_loaded")
        states = self._issue_sum(context, operands, (sums, weights), states)
        wait(0)
        return self._release_sum(context, states)

    @cute.jit
    def _scores(
        self,
        context: BackwardContext,
        where: tuple[WorkTile, Any, tuple[Any, ...]],
        tensors: tuple[Any, Any, Any],
        states: Any,
    ):
        """dS, or P, of a step, beside the sum of the step before.

        where: (tile, position, mask).  tensors: (operands, the sum or None before its first step,
        its A).
        """
        operands, sums, weights = tensors
        # Registers of their own for every step: an MMA takes what it overwrites as an operand.
        s, dp = self.score.accumulator(), None
        stages = states["x_loaded"].index, states["y_loaded"].index
        states = self._issue(context, ("x", operands["a"], operands["x"], s), states)
        if cutlass.const_expr(self.of_ds and not self.capped):
            dp = self.score.accumulator()
            states = self._issue(context, ("y", operands["g"], operands["y"], dp), states)
        if cutlass.const_expr(sums is not None):
            states = self._issue_sum(context, operands, (sums, weights), states)
        wait(0 if self.capped or sums is None else 1)
        self._probabilities(context, s, where, stages)
        if cutlass.const_expr(self.of_ds and self.capped):
            dp = self.score.accumulator()
            states = self._issue(context, ("y", operands["g"], operands["y"], dp), states)
            wait(0)
        if cutlass.const_expr(self.of_ds):
            _, negative_delta = self.stats_of(context, where[2], stages)
            for i in cutlass.range_constexpr(4 * RUNS):
                s[i] = s[i] * (dp[i] + negative_delta(i))
        # NOTE [arithmetic before the wait] in dv.py.
        context.barriers["a_loaded"].wait(states["a_loaded"])
        # Only the scores needed this; the rest is read by the sum.
        if cutlass.const_expr(self.of_ds):
            states = self._release(context, "y", states)
        else:
            states = self._release(context, "x", states)
        if cutlass.const_expr(sums is not None):
            wait(0)
            states = self._release_sum(context, states)
        # The sum of the step before has read its own.
        pack(s, weights)
        return states

    def _issue(
        self,
        context: BackwardContext,
        product: tuple[str, cute.Tensor, cute.Tensor, cute.Tensor],
        states: Any,
    ) -> Any:
        """S or dP.  product: (ring of B, A, B, result)."""
        ring, a, b, result = product
        state = states[f"{ring}_loaded"]
        context.barriers[f"{ring}_loaded"].wait(state)
        fence()
        multiply(self.score, result, a, b[None, None, None, state.index], False)
        commit()
        states.advance(f"{ring}_loaded")
        return states

    def _issue_sum(
        self,
        context: BackwardContext,
        operands: dict,
        registers: tuple[cute.Tensor, cute.Tensor],
        states: Any,
    ) -> Any:
        """The oldest step's part of the sum.  registers: (sum, its A)."""
        sums, weights = registers
        if self.of_ds:
            index = states["x_free"].index
        else:
            context.barriers["y_loaded"].wait(states["y_loaded"])
            index = states["y_loaded"].index
            states.advance("y_loaded")
        fence()
        multiply(self.sum, sums, weights, operands["columns"][None, None, None, index], True)
        commit()
        return states

    def _release_sum(self, context: BackwardContext, states: Any) -> Any:
        return self._release(context, "x" if self.of_ds else "y", states)

    @staticmethod
    def _release(context: BackwardContext, ring: str, states: Any) -> Any:
        """The oldest buffer of a ring that this warp holds."""
        context.barriers[f"{ring}_free"].arrive(states[f"{ring}_free"])
        states.advance(f"{ring}_free")
        return states

    @traced("P")
    @cute.jit
    def _probabilities(
        self,
        context: BackwardContext,
        s: cute.Tensor,
        where: tuple[WorkTile, Any, tuple[Any, ...]],
        stages: tuple[Any, ...],
    ):
        """P of one step in place of its scores; for dS times the slope of each."""
        work, position, mask = where
        slope_of = self.change_scores(context, s, work, position)
        scale = scale_for_masking(context.scalars.scale_log2)
        negative_lse, _ = self.stats_of(context, mask, stages)
        self.apply_mask(s, mask, position)
        for i in cutlass.range_constexpr(4 * RUNS):
            p = exp2_hardware(cute.math.fma(s[i], scale, negative_lse(i)))
            if cutlass.const_expr(self.capped and self.of_ds):
                p = p * slope_of(i, s[i])
            s[i] = p

    @traced("drain")
    @cute.jit
    def _finish(self, context: BackwardContext, work: Any, sums: cute.Tensor):
        """The tile's result to global memory."""
        if cutlass.const_expr(self.is_scaled):
            sums.store(sums.load() * context.scalars.softmax_scale)
        rows, first = self.result_rows(context, work), self.first_row(context, work)
        self.store(sums, (context.tensors.results[0], rows, first, work.head))


class KeyGradient(KeyRows, SingleKernel):
    """Kernel of dK or dV: 256 keys of a part of a KV head."""

    stays = ("k", "v")
    passes = ("q", "dout")

    def stats_of(
        self, context: BackwardContext, mask: tuple[Any, ...], stages: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """-LSE and -delta by element of a fragment, None where the kernel has no use of it; both
        belong to columns."""
        found = []
        for name, stage in zip(("lse", "delta"), stages):
            if name in self.plan.passing_stats:
                values = self.passing_stats(context, name, stage)
                found.append(lambda i, values=values: values[i % 2, i // 4])
            else:
                found.append(None)
        return tuple(found)


class DkKernel(KeyGradient):
    """Kernel of dK.  results: (dk,)."""


class SingleDvKernel(KeyGradient):
    """Kernel of dV.  results: (dv,)."""

    stays = ("k",)
    of_ds = False
    is_scaled = False


class DqKernel(QueryTiles, SingleKernel):
    """Kernel of dQ: 256 queries of a head, which meet the keys from the last one they see."""

    stays = ("q", "dout")
    passes = ("k", "v")

    def first_row(self, context: BackwardContext, work: Any) -> Int32:
        """The first row of this warpgroup."""
        rank, group = context.cta_rank, self.warpgroup()
        return work.block * TILE_ROWS + rank * OWN_ROWS + group * ROWS

    def places(self, context: BackwardContext, box: str, work: Any, position: Int32) -> TilePlace:
        """Return the place of a box of the tile or of a step; see `tma_tile`."""
        if box in self.stays:
            first = work.block * TILE_ROWS + context.cta_rank * OWN_ROWS
            return context.sequences.query(work.batch), first, 0, work.head
        row, head = position * STEP_COLUMNS, work.head // context.heads_per_kv
        return context.sequences.key(work.batch), row, context.cta_rank, head

    def mask(self, context: BackwardContext, work: Any) -> tuple[Any, ...]:
        """Return (which keys a query sees, first query of the warpgroup, steps that need no mask,
        -LSE and -delta of both rows of this thread) of a tile."""
        first, visibility = self.first_row(context, work), context.visibility(work, STEP_COLUMNS)
        steps = visibility.tile_range((work.block * TILE_ROWS, TILE_ROWS), (first, ROWS))
        unmasked = steps.unmasked_begin, steps.unmasked_end
        row = context.sequences.padded_query_offset(work.batch) + first
        stats = [
            [context.tensors.stats[which, work.head, row + row_of_fragment(i)] for i in range(2)]
            for which in range(2)
        ]
        return visibility, first, unmasked, stats

    def locator(self, context: BackwardContext, work: Any, position: Int32) -> Any:
        """Return the function from a score's number to its (query head, query, key)."""
        first, columns = self.first_row(context, work), fragment_columns(STEP_COLUMNS)
        key = position * STEP_COLUMNS + cute.arch.lane_idx() % QUAD * 2

        def locate(number: int) -> tuple[Int32, Int32, Int32]:
            query = first + row_of_fragment(number // 2 % 2)
            return work.head, query, key + columns[number // 4 * 2 + number % 2]

        return locate

    @cute.jit
    def apply_mask(self, s: cute.Tensor, mask: tuple[Any, ...], position: Int32):
        """Scores of keys that a query does not see := -inf."""
        visibility, first_query, unmasked, _ = mask
        if (position < unmasked[0]) | (position >= unmasked[1]):
            key = position * STEP_COLUMNS + cute.arch.lane_idx() % QUAD * 2
            for row in cutlass.range_constexpr(2):
                query = first_query + row_of_fragment(row)
                visibility.apply(rows_of(s)[row], query, key, fragment_columns(STEP_COLUMNS))

    def stats_of(
        self, context: BackwardContext, mask: tuple[Any, ...], stages: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """-LSE and -delta by element of a fragment; both belong to rows."""
        lse, delta = mask[3]
        return lambda i: lse[i // 2 % 2], lambda i: delta[i // 2 % 2]
