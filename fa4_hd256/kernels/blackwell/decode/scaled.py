"""The decode kernel for K and V that are not of the call's type: what e4m3 and NVFP4 share.

One warp loads Q's rows, and four bring them to the type of the MMAs where they lie, with a scale
per row (`kernels.forward.e4m3` NOTE [Q in place]), a tile ahead where there is a buffer.  All else
is the decode kernel's, with scales (NOTE [scales] there).

The functions are methods of `e4m3.DecodeE4m3Kernel` and `nvfp4.DecodeNvfp4Kernel`, whose classes
name them.  Each of these has `convert(context)`, the role of the last warpgroup, and
`_load_sum(address)`, which loads this lane's rows of S or O.
"""

from __future__ import annotations

from typing import Any, cast

import cutlass.cute as cute
from cutlass import Float32, Int32

from ....schedulers.protocol import WorkTile
from ...forward.e4m3 import KeyScales, ScaledRows, ScaledSoftmax
from ...operands import SharedMemory
from ...plan.edges import RingRecord, RingState
from ...ranges import traced
from ..tmem import multiply, multiply_rows
from .context import BlackwellDecodeContext as Context
from .context import BlackwellE4m3DecodeContext, DecodeLoadRings
from .kernel import DecodeKernel, KvTile


def prepare(kernel: Any, top_exponent: int) -> None:
    """Set what brings rows of Q to their ranges, and back.  top_exponent: of `ScaledRows`."""
    config = kernel.config
    kernel.scales = KeyScales(kernel.problem_class, kernel.rows)
    kernel.scaled_rows = ScaledRows(
        kernel.dtype,
        kernel.rows,
        config.warps.converting,
        top_exponent=top_exponent,
        rows_at_once=8 if config.softmax_groups == 1 else 4,  # as registers allow
        loaded="rows_loaded",
        memory="q_rows",
        store=kernel._store_row,
        is_packed=True,
    )


def smem(self: Any, memory: SharedMemory) -> dict[str, cute.Tensor]:
    rows, stages = self.config.rows, self.config.q_stages
    factors = memory.region("factors", Float32, 16)
    views = DecodeKernel.smem(self, memory)
    return views | {
        "q_rows": views["q"],
        "factors": cute.make_tensor(factors, cute.make_layout((rows, stages))),
    }


@cute.jit
def run_other_role(self: Any, context: BlackwellE4m3DecodeContext, warp: Int32):
    """Run the role of a warp: that of `DecodeKernel`, or loading Q, or converting."""
    warps = self.config.warps
    if warp < warps.queries:
        DecodeKernel.run_other_role(self, context, warp)
    elif warp == warps.queries:
        self.set_registers(warps.registers_other)
        self.scaled_rows.load(context, self.scheduler)
    else:
        self.set_registers(warps.registers_quantise or warps.registers_convert)
        self.convert(context)


# ------------------------------------------------------------ load


def load_q(self: Any, context: Context, work: WorkTile, rings: DecodeLoadRings) -> DecodeLoadRings:
    """Load nothing: Q has a warp of its own."""
    return rings


def load_tile(
    self: Any, context: Context, work: WorkTile, kv_tile: KvTile, name: str, rings: DecodeLoadRings
) -> DecodeLoadRings:
    """Load all columns of K or V into one buffer."""
    rings.kv = self._load_columns(context, work, kv_tile, (name, 0), rings.kv)
    return rings


# ------------------------------------------------------------ Q


@traced("quantise Q")
@cute.jit
def bring_q(self: Any, context: BlackwellE4m3DecodeContext, states: RingRecord):
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


def create(self: Any, context: Context) -> ScaledSoftmax:
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
    return softmax


def tile_state(self: Any) -> RingState:
    return self.edges["factors_ready"].waiter_state()


@cute.jit
def begin_tile(self: Any, context: Context, softmax: Any, place: tuple[Any, Int32], state: Any):
    context.barriers["factors_ready"].wait(state)
    softmax.stage[0] = state.index
    softmax.k_scale[0] = Float32(1.0)
    self.scales.enter(context, softmax, *place)


def end_tile(self: Any, context: Context, state: RingState) -> RingState:
    context.barriers["factors_free"].arrive(state)
    state.advance()
    return state


def load_scores(self: Any, context: Context, softmax: Any, buffer: Int32, work: Any) -> cute.Tensor:
    """S, brought back: rows by their scales, with the tile's K scale; a key by its page's."""
    scores = self._load_sum(self._scores(context, buffer))
    factors = self._read(context.smem["factors"], softmax.stage[0])
    if self.scales.of_tiles:
        multiply(factors, softmax.k_scale[0])
    multiply_rows(scores, factors)
    if self.scales.of_pages:
        (k_scale,) = self.scales.take(context, softmax, work)
        multiply(scores, k_scale)
    return scores


def weigh(self: Any, context: Context, softmax: Any, scores: cute.Tensor) -> None:
    if not self.scales.of_pages:
        return
    scale, (logarithm,) = context.scalars.scale_log2, softmax.log2_v
    for row in range(0, self.group.count, 2):
        scores[row], scores[row + 1] = cute.arch.fma_packed_f32x2(
            (scores[row], scores[row + 1]), (scale, scale), (logarithm, logarithm)
        )


def scaled_inverse(self: Any, softmax: Any, inverse: Float32) -> Float32:
    return self.scales.scaled_inverse(softmax, inverse)


def load_half(self: Any, context: Context, half: int) -> cute.Tensor:
    return self._load_sum(self._of_half(context, half))
