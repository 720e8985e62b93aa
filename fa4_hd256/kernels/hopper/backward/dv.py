"""The kernel of dV and dS: dV = P^T dO at head_dim 256, and dS^T for `products`.

One tile, of a cluster of two, is 256 keys of one KV head: 128 of each CTA, 64 of each of its two
warpgroups; one step multiplies it with 64 query rows of one of the query heads that share the KV
head.  Scores are transposed, S^T = K Q^T, so that P^T lies in the registers in which wgmma reads an
A.

Timeline of one CTA; 0' is the next tile's first step::

    load        Q(1) dO(1) Q(2) dO(2) ..                    | K' Q(0') V' dO(0')
    warpgroup   S(0)  | dP(0) S(1) dV(0) | dP(1) S(2) dV(1) ..        | dP(n) dV(n)
                P(0)          dS(0)> P(1)        dS(1)> P(2) ..       dS(n)> dV ->

where > is the write of dS to global memory, straight from registers.  A warpgroup issues three
products at once; it computes dS of the first while the second runs, P of the second while the third
does.  Nothing ties the warpgroups together but the buffers.

Both CTAs need the same rows of Q and dO: each loads half of their columns for both.  Q has one
buffer, so what L2 lacks of it would be waited for, behind the stores of dS on their way to memory:
with the loads of a step Q of the next is prefetched into L2 (docs/hopper.md has what that gives).

NOTE [arithmetic before the wait].  ptxas moves arithmetic behind the wait for a product that is
there to hide it, but not across the loop of an mbarrier wait.  So one for V, which has long been
there, stands between the two.

NOTE [P in 16 bits].  dS is made of the P that dV is made of, rounded: in float32 P would take 16
registers more than there are beside dV, S, dP and the P that is being multiplied.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ....schedulers import WorkTile
from ....softmax_emu.exp2 import exp2_hardware
from ....softmax_emu.recompute import scale_for_masking
from ...backward.common import BackwardContext, Step, heads_of_part
from ...backward.ds_tiles import (
    DS_TILE,
    RUN,
    RUN_STRIDE,
    tile_of,
    tiles_of_head,
    within_head,
)
from ...limits import HEAD_DIM
from ...ranges import traced
from ..instructions import (
    QUAD,
    ROWS,
    commit,
    fence,
    multiply,
    pack,
    row_of_fragment,
    transposed,
    wait,
)
from .common import ScoreGradient
from .config import CTAS, DvPlan
from .key_rows import KeyRows

__all__ = ["DvKernel"]

TILE_KEYS, STEP_QUERIES = DvPlan.tile_rows, DvPlan.step_columns
OWN_KEYS = TILE_KEYS // CTAS
RUNS = STEP_QUERIES // RUN
BLOCK_STEPS = TILE_KEYS // STEP_QUERIES


class DvKernel(KeyRows, ScoreGradient):
    """The kernel for one configuration; arguments of a call: `BackwardEntry.__call__`.

    results: (dv,).  ds: see `backward.ds_tiles`.  Tiles: `KeyTiles`.
    """

    boxes = {
        "q": (0, STEP_QUERIES, HEAD_DIM // 2),
        "k": (1, OWN_KEYS, HEAD_DIM),
        "v": (2, OWN_KEYS, HEAD_DIM),
        "dout": (3, STEP_QUERIES, HEAD_DIM // 2),
    }

    def smem(self, memory: Any) -> dict[str, cute.Tensor]:
        stages = {"lse": self.plan.q_stages, "delta": self.plan.dout_stages}
        return {
            "k": memory.operand("k", OWN_KEYS, HEAD_DIM, 1),
            "v": memory.operand("v", OWN_KEYS, HEAD_DIM, 1),
            "q": memory.operand("q", STEP_QUERIES, HEAD_DIM, self.plan.q_stages),
            "dout": memory.operand("dout", STEP_QUERIES, HEAD_DIM, self.plan.dout_stages),
            **{
                name: cute.make_tensor(
                    memory.region(name, Float32, 128), cute.make_layout((STEP_QUERIES, count))
                )
                for name, count in stages.items()
            },
        }

    # Steps come in whole blocks of dS: NOTE [blocks of dS] in `backward.ds_tiles`.

    def num_steps(self, context: BackwardContext, work: Any) -> Int32:
        """Steps of all query heads of the part in which some key of the tile is seen."""
        if cutlass.const_expr(self.problem_class.lists_steps):
            return super().num_steps(context, work)
        blocks = self._by_blocks(context, work).num_tiles(work.block * TILE_KEYS, TILE_KEYS)
        return blocks * BLOCK_STEPS * heads_of_part(context, work.head)[1]

    def first_position(self, context: BackwardContext, work: Any) -> Step:
        """The first step of a tile."""
        if cutlass.const_expr(self.problem_class.lists_steps):
            return super().first_position(context, work)
        tile = (work.block * TILE_KEYS, TILE_KEYS)
        blocks = self._by_blocks(context, work).tile_range(tile, tile)
        span = blocks.begin * BLOCK_STEPS, blocks.end * BLOCK_STEPS
        return Step(heads_of_part(context, work.head)[0], span[0], span)

    @staticmethod
    def _by_blocks(context: BackwardContext, work: Any) -> Any:
        return context.visibility(work, TILE_KEYS).transposed(TILE_KEYS)

    # --------------------------------------------------------------------------------- gradient

    def _operands(self, context: BackwardContext) -> dict[str, cute.Tensor]:
        """Operands in shared memory: "k", "v" of this warpgroup's keys; "dout_columns" as B of
        dV."""
        smem, own = context.smem, (ROWS, HEAD_DIM)
        place = (self.warpgroup(), 0)
        return {
            **{
                name: self.score.a_operand(cute.local_tile(smem[name][None, None, 0], own, place))
                for name in ("k", "v")
            },
            "q": self.score.b_operand(smem["q"]),
            "dout": self.score.b_operand(smem["dout"]),
            "dout_columns": self.sum.b_operand(transposed(smem["dout"])),
        }

    @cute.jit
    def _steps(
        self,
        context: BackwardContext,
        which: tuple[WorkTile, Any],
        tensors: tuple[Any, cute.Tensor],
        states: Any,
    ):
        """Compute dV of one tile, and its dS.  which: (tile, steps).  tensors: (operands, dV)."""
        (work, num_steps), (operands, dv) = which, tensors
        barriers, step = context.barriers, self.first_position(context, work)
        mask, row = self.mask(context, work), self.row_of_ds(context, work)
        # P times the slope of its score, which is P where there is none.
        p = factors = self.sum.a_fragment(STEP_QUERIES)
        if cutlass.const_expr(self.capped):
            factors = self.sum.a_fragment(STEP_QUERIES)
        s = self.score.accumulator()
        barriers["k_loaded"].wait(states["k_loaded"])
        self._issue_scores(context, operands, s, states)
        wait(0)
        states = self._probabilities(context, (s, factors), (work, mask, step), states)
        pack(s, p)
        barriers["v_loaded"].wait(states["v_loaded"])
        for _ in cutlass.range(1, num_steps, unroll=1):
            # Registers of their own for every step: an MMA takes what it overwrites as an operand,
            # too, which would keep them occupied in between.
            s, dp = self.score.accumulator(), self.score.accumulator()
            self._issue_gradient(context, operands, dp, states)
            if cutlass.const_expr(not self.capped):
                self._issue_scores(context, operands, s, states)
            self._issue_sum(operands, (dv, p), states)
            wait(1 if self.capped else 2)
            place = self._place_of_ds(context, step, row)
            self._store_ds(context, (dp, factors), states["dout_loaded"].index, place)
            step = self.next_position(step)
            barriers["v_loaded"].wait(states["v_loaded"])
            if cutlass.const_expr(self.capped):
                self._issue_scores(context, operands, s, states)
            wait(0 if self.capped else 1)
            states = self._probabilities(context, (s, factors), (work, mask, step), states)
            barriers["v_loaded"].wait(states["v_loaded"])
            wait(0)
            # The MMA has read P.
            pack(s, p)
            barriers["dout_free"].arrive(states["dout_loaded"])
            states.advance("dout_loaded")
        barriers["k_free"].arrive(states["k_loaded"])
        states.advance("k_loaded")
        dp = self.score.accumulator()
        self._issue_gradient(context, operands, dp, states)
        self._issue_sum(operands, (dv, p), states)
        wait(1)
        barriers["v_free"].arrive(states["v_loaded"])
        states.advance("v_loaded")
        place = self._place_of_ds(context, step, row)
        self._store_ds(context, (dp, factors), states["dout_loaded"].index, place)
        wait(0)
        barriers["dout_free"].arrive(states["dout_loaded"])
        states.advance("dout_loaded")
        return states

    def _issue_scores(
        self, context: BackwardContext, operands: dict, s: cute.Tensor, states: Any
    ) -> None:
        """S^T of a step."""
        state = states["q_loaded"]
        context.barriers["q_loaded"].wait(state)
        fence()
        q = operands["q"][None, None, None, state.index]
        multiply(self.score, s, operands["k"], q, False)
        commit()

    def _issue_gradient(
        self, context: BackwardContext, operands: dict, dp: cute.Tensor, states: Any
    ) -> None:
        """Issue dP^T of a step."""
        state = states["dout_loaded"]
        context.barriers["dout_loaded"].wait(state)
        fence()
        dout = operands["dout"][None, None, None, state.index]
        multiply(self.score, dp, operands["v"], dout, False)
        commit()

    def _issue_sum(
        self, operands: dict, registers: tuple[cute.Tensor, cute.Tensor], states: Any
    ) -> None:
        """Issue dV += P^T dO of a step.  registers: (dV, P)."""
        dv, p = registers
        columns = operands["dout_columns"][None, None, None, states["dout_loaded"].index]
        fence()
        multiply(self.sum, dv, p, columns, True)
        commit()

    @traced("P")
    @cute.jit
    def _probabilities(
        self,
        context: BackwardContext,
        results: tuple[cute.Tensor, cute.Tensor],
        where: tuple[WorkTile, tuple[Any, ...], Step],
        states: Any,
    ):
        """P of one step in place of its scores, which are done; gives Q and LSE back.

        results: (scores, with slopes of these P times them in 16 bits).  where: (tile, mask, step).
        """
        s, factors = results
        negative_lse = cute.make_rmem_tensor((2, RUNS), Float32)
        stage = states["q_loaded"].index
        cute.autovec_copy(self.passing_stats(context, "lse", stage), negative_lse)
        context.barriers["q_free"].arrive(states["q_loaded"])
        states.advance("q_loaded")
        work, mask, step = where
        slope_of = self.change_scores(context, s, work, step)
        self.apply_mask(s, mask, step)
        scale = scale_for_masking(context.scalars.scale_log2)
        for run in cutlass.range_constexpr(RUNS):
            sloped = cute.make_rmem_tensor(4, Float32)
            for i in cutlass.range_constexpr(4):
                score = s[4 * run + i]
                p = exp2_hardware(cute.math.fma(score, scale, negative_lse[i % 2, run]))
                if cutlass.const_expr(self.capped):
                    sloped[i] = p * slope_of(4 * run + i, score)
                s[4 * run + i] = p
            if cutlass.const_expr(self.capped):
                pack(sloped, _run_of(factors, run))
        return states

    def _place_of_ds(self, context: BackwardContext, step: Step, row: Int32) -> cute.Pointer:
        """Return the address of this thread's first element of dS of a step."""
        steps = DS_TILE // STEP_QUERIES
        key = self.warpgroup() * ROWS + row_of_fragment(0)
        ds = context.tensors.ds
        number = within_head(ds, row + step.index // steps, context.sequences.tensors)
        of_step = tile_of(ds, number + step.head * tiles_of_head(ds))
        own = of_step[key, step.index % steps * RUNS, None]
        return (own.iterator + cute.arch.lane_idx() % QUAD * 2).align(4)

    @traced("dS")
    @cute.jit
    def _store_ds(
        self,
        context: BackwardContext,
        values: tuple[cute.Tensor, cute.Tensor],
        stage: Any,
        place: cute.Pointer,
    ):
        """Store dS = factors (dP - delta) in 16 bits, to global memory: a quad has 16 bytes, the
        quads of a warp 128 consecutive ones.  values: (dP, factors)."""
        dp, factors = values
        delta = self.passing_stats(context, "delta", stage)
        for run in cutlass.range_constexpr(RUNS):
            own, ds = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(delta[None, run], own)
            # Words are stored: what an MMA reads as words must not be taken apart.
            words = cute.make_rmem_tensor(2, Uint32)
            words.store(cute.recast_tensor(_run_of(factors, run), Uint32).load())
            weights = cute.recast_tensor(words, self.dtype).load().to(Float32)
            for i in cutlass.range_constexpr(4):
                ds[i] = weights[i] * (dp[4 * run + i] + own[i % 2])
            rounded = cute.make_rmem_tensor((2, 2), self.dtype)
            pack(ds, rounded)
            words = cute.recast_tensor(rounded, Uint32)
            for row in cutlass.range_constexpr(2):
                # L2 gives it up first (st.cs, PTX ISA 9.7.9.1): all of dS is more than L2 holds,
                # and Q and dO are read again.
                target = cute.recast_ptr(place + (run * RUN_STRIDE + 8 * RUN * row), dtype=Uint32)
                cute.arch.store(target, words[0, row], cop="cs")

    @traced("drain dV")
    @cute.jit
    def _finish(self, context: BackwardContext, work: Any, dv: cute.Tensor):
        """The tile's dV to global memory."""
        rows, first = self.result_rows(context, work), self.first_row(context, work)
        place = context.tensors.results[0], rows, first, work.head
        self.store(dv, place)


def _run_of(fragment: cute.Tensor, run: int) -> cute.Tensor:
    """A thread's four elements of a run of eight columns: two columns of two rows."""
    return cute.make_tensor(fragment.iterator + 4 * run, cute.make_layout(4))
