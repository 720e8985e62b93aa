"""The decode kernel for K and V that are not of the call's type: what e4m3 and NVFP4 share.

One warp loads Q's rows, and four bring them to the type of the MMAs where they lie, with a scale
per row (`kernels.forward.e4m3` NOTE [Q in place]), a tile ahead where there is a buffer.  All else
is the decode kernel's, with scales (NOTE [scales] there).
"""

from __future__ import annotations

from typing import Any, cast

import cutlass.cute as cute
from cutlass import Float32, Int32

from ....schedulers.protocol import WorkTile
from ...forward.e4m3 import KeyScales, ScaledRows, ScaledSoftmax
from ...operands import SharedMemory
from ...plan.edges import RingState, RingStates
from ...problem_class import ProblemClass
from ...ranges import traced
from ..tmem import multiply, multiply_rows
from .config import DecodeConfig
from .context import (
    BlackwellDecodeContext,
    BlackwellE4m3DecodeContext,
    DecodeLoadRings,
)
from .kernel import DecodeKernel, KvTile


class ScaledDecodeKernel(DecodeKernel):
    """See the module's docstring; the arguments are those of `DecodeKernel`.

    A kernel has `convert(context)`, the role of the last warpgroup; `_store_row`, as
    `ScaledRows.store`; and `_load_sum(address)`, which loads this lane's rows of S or O.
    top_exponent: of `ScaledRows`.
    """

    halves_apart = False
    context_class = BlackwellE4m3DecodeContext
    top_exponent: int
    convert: Any
    _store_row: Any
    _load_sum: Any

    def __init__(self, config: DecodeConfig, problem_class: ProblemClass, scheduler: Any) -> None:
        super().__init__(config, problem_class, scheduler)
        self.scales = KeyScales(problem_class, self.rows, multiply)
        self.scaled_rows = ScaledRows(
            self.dtype,
            self.rows,
            config.warps.converting,
            top_exponent=self.top_exponent,
            rows_at_once=8 if config.softmax_groups == 1 else 4,  # as registers allow
            loaded="rows_loaded",
            memory="q_rows",
            store=self._store_row,
            is_packed=True,
        )

    def smem(self, memory: SharedMemory) -> dict[str, cute.Tensor]:
        rows, stages = self.config.rows, self.config.q_stages
        factors = memory.region("factors", Float32, 16)
        views = super().smem(memory)
        return views | {
            "q_rows": views["q"],
            "factors": cute.make_tensor(factors, cute.make_layout((rows, stages))),
        }

    @cute.jit
    def run_other_role(self, context: BlackwellE4m3DecodeContext, warp: Int32):
        """Run the role of a warp: that of `DecodeKernel`, or loading Q, or converting."""
        warps = self.config.warps
        if warp < warps.queries:
            # The DSL takes `super()` for that of the class of self.
            DecodeKernel.run_other_role(self, context, warp)
        elif warp == warps.queries:
            self.set_registers(warps.registers_other)
            self.scaled_rows.load(context, self.scheduler)
        else:
            self.set_registers(warps.registers_converting)
            self.convert(context)

    # ------------------------------------------------------------ load

    def _load_q(
        self, context: BlackwellDecodeContext, work: WorkTile, rings: DecodeLoadRings
    ) -> DecodeLoadRings:
        """Load nothing: Q has a warp of its own."""
        return rings

    def _load_tile(
        self,
        context: BlackwellDecodeContext,
        work: WorkTile,
        kv_tile: KvTile,
        name: str,
        rings: DecodeLoadRings,
    ) -> DecodeLoadRings:
        """Load all columns of K or V into one buffer."""
        rings.kv = self._load_columns(context, work, kv_tile, (name, 0), rings.kv)
        return rings

    # ------------------------------------------------------------ Q

    @traced("quantise Q")
    @cute.jit
    def _bring_q(self, context: BlackwellE4m3DecodeContext, states: RingStates):
        """Bring this warp's rows of a tile to the operand's type."""
        barriers, waited = context.barriers, ("rows_loaded", "factors_free")
        for edge in waited:
            barriers[edge].wait(states[edge])
        self.scaled_rows.scale(context, states["rows_loaded"].index)
        for edge, of in zip(("q_loaded", "factors_ready"), waited, strict=True):
            barriers[edge].arrive(states[of])
            states.advance(of)
        return states

    # ------------------------------------------------------------ softmax

    def _create(self, context: BlackwellDecodeContext) -> ScaledSoftmax:
        config, rows = self.config, self.group.count
        created = ScaledSoftmax.create(
            self.scales.softmax_scale(context),
            config.ex2_pattern,
            config.rescale_threshold,
            self.operand_dtype,
            rows,
            config.headroom,
        )
        softmax = cast(ScaledSoftmax, created)
        self.scales.allocate(softmax)
        # Scale of the rows, from S to scores.
        softmax.k_scale = cute.make_rmem_tensor(rows, Float32)
        return softmax

    def _tile_state(self) -> RingState:
        return self.edges["factors_ready"].waiter_state()

    @cute.jit
    def _begin_tile(
        self, context: BlackwellDecodeContext, softmax: Any, work: Any, key: Int32, state: Any
    ):
        """The scales of the rows, and those of the tile, or of the first step's keys."""
        barriers, factors = context.barriers, softmax.k_scale
        barriers["factors_ready"].wait(state)
        cute.autovec_copy(context.smem["factors"][None, state.index], factors)
        barriers["factors_free"].arrive(state)
        state.advance()
        self.scales.enter(context, softmax, work, key)
        return state

    def _load_scores(
        self, context: BlackwellDecodeContext, softmax: Any, buffer: Int32, work: Any
    ) -> cute.Tensor:
        """S, brought back: rows by their scales, which K's scale of the tile is among, a key by its
        page's scale."""
        scores = self._load_sum(self._scores(context, buffer))
        multiply_rows(scores, softmax.k_scale)
        if self.scales.of_pages:
            (k_scale,) = self.scales.take(context, softmax, work)
            multiply(scores, k_scale)
        return scores

    def _weigh(self, context: BlackwellDecodeContext, softmax: Any, scores: cute.Tensor) -> None:
        if not self.scales.of_pages:
            return
        scale, (logarithm,) = context.scalars.scale_log2, softmax.log2_v
        for row in range(0, self.group.count, 2):
            scores[row], scores[row + 1] = cute.arch.fma_packed_f32x2(
                (scores[row], scores[row + 1]), (scale, scale), (logarithm, logarithm)
            )

    def _scaled_inverse(self, softmax: Any, inverse: Float32) -> Float32:
        return self.scales.scaled_inverse(softmax, inverse)

    def _load_half(self, context: BlackwellDecodeContext, half: int) -> cute.Tensor:
        return self._load_sum(self._of_half(context, half))
