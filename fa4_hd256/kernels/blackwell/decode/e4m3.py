"""The decode kernel for K and V in e4m3: `config` NOTE [e4m3].

One warp loads Q's rows, and four write both parts of them where they lie, with a scale per row
(`kernels.forward.e4m3` NOTE [Q in place]), a tile ahead where there is a buffer.  All else
is the decode kernel's, with scales (NOTE [scales] there)::

    queries, quantise  Q'                       | Q''
    load               K(1) V(0) K(2) V(1) ..   | K(0')  V(last) K(1')  V(0') ..
    mma                QK(1) PV(0) QK(2) PV(1)..| QK(0') PV(last)   QK(1') PV(0') ..

A row as it was loaded is four rows of 128 bytes in as many blocks of the swizzled operand.  The
first and the third are the row of hi in the operand of parts, the others the row of lo.

NOTE [two parts].  A float32 comes as two e4m3, x = hi + lo / 16.  An e4m3 has four bits of
significand, so that the two of them have as many as a bf16: hi is x rounded to nearest, and lo what
is left of it, times 16, rounded.  From 2^-6 up hi is a normal number; below, where both are
multiples of 2^-9, the error is 2^-14 at most.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import cutlass.cute as cute
from cutlass import Float32, Int32

from ....schedulers.protocol import WorkTile
from ...e4m3_codes import WORD_CODES, codes_of
from ...forward.e4m3 import KeyScales, ScaledRows, ScaledSoftmax
from ...limits import HEAD_DIM, WARP_SIZE
from ...operands import ATOM_ROWS, SharedMemory
from ...plan.edges import RingState, RingStates
from ...problem_class import ProblemClass
from ...ranges import traced
from ...rows.sequences import columns_of
from ..instructions import (
    E4M3_SLICE,
    Mma,
    MmaShape,
    k_major_operand,
    mn_major_operand,
)
from ..tmem import multiply, multiply_rows, tmem_load
from .config import BLOCK_KV, HALF, HALVES, DecodeConfig
from .context import (
    BlackwellDecodeContext,
    BlackwellE4m3DecodeContext,
    DecodeLoadRings,
)
from .kernel import DecodeKernel, KvTile, p_layout

#: Columns of tensor memory that are loaded at a time.
COLUMNS = 32
#: Weight of lo.
LOW_PART = 2.0**-4


class DecodeE4m3Kernel(DecodeKernel):
    """See the module's docstring; the arguments are those of `DecodeKernel`."""

    kv_bytes = 1
    halves_apart = False
    context_class = BlackwellE4m3DecodeContext

    def __init__(self, config: DecodeConfig, problem_class: ProblemClass, scheduler: Any) -> None:
        super().__init__(config, problem_class, scheduler)
        self.scales = KeyScales(problem_class, self.rows, multiply)
        self.scaled_rows = ScaledRows(
            self.dtype,
            self.rows,
            config.warps.quantise or (),
            top_exponent=7,  # of 448 at most
            rows_at_once=8 if config.softmax_groups == 1 else 4,  # as registers allow
            loaded="rows_loaded",
            memory="q_rows",
            store=self._store_row,
            is_packed=True,
        )

    def make_mmas(self) -> None:
        """Set the MMA of K, and those of both halves of V's columns, from one buffer."""
        columns, ctas = self.config.columns, self.ctas
        negate = self.problem_class.negative_scale
        # Bytes in twos: a row of 256 has as many as 128 of a 16-bit type.
        k, q = k_major_operand(BLOCK_KV, HEAD_DIM // 2), k_major_operand(columns, HEAD_DIM // 2)
        shape = MmaShape(BLOCK_KV, columns, False, negate_a=negate, ctas=ctas, is_e4m3=True)
        self.qk = [Mma(shape, k, q)]
        shape = replace(shape, m=HALF, a_mn_major=True, b_mn_major=True, negate_a=False)
        self.pv = [
            Mma(shape, mn_major_operand(BLOCK_KV, E4M3_SLICE, half), p_layout(E4M3_SLICE))
            for half in HALVES
        ]

    def smem(self, memory: SharedMemory) -> dict[str, cute.Tensor]:
        rows, stages = self.config.rows, self.config.q_stages
        factors = memory.region("factors", Float32, 16)
        views = super().smem(memory)
        return views | {
            "q": memory.operand("q", self.config.columns, HEAD_DIM // 2, stages),
            "q_rows": views["q"],
            "factors": cute.make_tensor(factors, cute.make_layout((rows, stages))),
        }

    @cute.jit
    def run_other_role(self, context: BlackwellE4m3DecodeContext, warp: Int32):
        """Run the role of a warp: that of `DecodeKernel`, or loading Q, or bringing it to e4m3."""
        warps = self.config.warps
        if warp < warps.queries:
            super().run_other_role(context, warp)
        elif warp == warps.queries:
            self.set_registers(warps.registers_other)
            self.scaled_rows.load(context, self.scheduler)
        else:
            self.set_registers(warps.registers_quantise)
            self.quantise(context)

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

    @cute.jit
    def quantise(self, context: BlackwellE4m3DecodeContext):
        """Bring each tile's Q to e4m3, with the scales of its rows."""
        states = self.edges.waiter_states("rows_loaded", "factors_free")
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            if self.num_steps(context, work) > 0:
                states = self._quantise_tile(context, states)
            work = scheduler.advance_to_next_work()

    @traced("quantise Q")
    @cute.jit
    def _quantise_tile(self, context: BlackwellE4m3DecodeContext, states: RingStates):
        barriers, waited = context.barriers, ("rows_loaded", "factors_free")
        for edge in waited:
            barriers[edge].wait(states[edge])
        self.scaled_rows.scale(context, states["rows_loaded"].index)
        for edge, of in zip(("q_loaded", "factors_ready"), waited, strict=True):
            barriers[edge].arrive(states[of])
            states.advance(of)
        return states

    def _store_row(
        self,
        context: BlackwellE4m3DecodeContext,
        row: tuple[Any, Any],
        elements: list[Float32],
        stage: Int32,
    ) -> None:
        codes, lane = context.smem["q"], cute.arch.lane_idx()
        columns = HEAD_DIM // WARP_SIZE // 2
        place, atom = row
        atoms = self.config.rows // ATOM_ROWS
        targets = tuple(
            columns_of(codes[(place, part * atoms + atom), None, stage], lane * columns, columns)
            for part in range(2)
        )
        _store_parts(elements, targets)

    # ------------------------------------------------------------ softmax

    def _create(self, context: BlackwellDecodeContext) -> ScaledSoftmax:
        config, rows = self.config, self.group.count
        created = ScaledSoftmax.create(
            self.scales.softmax_scale(context),
            config.ex2_pattern,
            config.rescale_threshold,
            self.dtype,
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
        """Both parts of S, added and brought back: rows by their scales, which K's scale of the
        tile is among, a key by its page's scale."""
        scores = self._load_sum(self._scores(context, buffer))
        multiply_rows(scores, softmax.k_scale)
        if self.scales.of_pages:
            (k_scale,) = self.scales.take(context, softmax, work)
            multiply(scores, k_scale)
        return scores

    def _load_sum(self, address: Any) -> cute.Tensor:
        """Both parts of a lane's rows, added: those of lo lie behind those of hi."""
        rows = self.group.count
        sums, columns = cute.make_rmem_tensor(rows, Float32), min(rows, COLUMNS)
        for first in range(0, rows, columns):
            parts = [cute.make_rmem_tensor(columns, Float32) for _ in range(2)]
            for number, part in enumerate(parts):
                tmem_load(address + number * self.config.rows + first, part, columns)
            cute.arch.fence_view_async_tmem_load()
            self._add_parts(parts, sums, first)
        return sums

    @staticmethod
    def _add_parts(parts: list[cute.Tensor], sums: cute.Tensor, first: int) -> None:
        """Write hi + lo / 16, two at a time, to `sums` from `first` on."""
        high, low = parts
        counts = Float32(LOW_PART)
        for row in range(0, cute.size(high), 2):
            sums[first + row], sums[first + row + 1] = cute.arch.fma_packed_f32x2(
                (low[row], low[row + 1]), (counts, counts), (high[row], high[row + 1])
            )

    def _weigh(self, context: BlackwellDecodeContext, softmax: Any, scores: cute.Tensor) -> None:
        if not self.scales.of_pages:
            return
        scale, (logarithm,) = context.scalars.scale_log2, softmax.log2_v
        for row in range(0, self.group.count, 2):
            scores[row], scores[row + 1] = cute.arch.fma_packed_f32x2(
                (scores[row], scores[row + 1]), (scale, scale), (logarithm, logarithm)
            )

    def _store_probabilities(
        self, context: BlackwellDecodeContext, softmax: Any, scores: cute.Tensor
    ) -> None:
        rows = self.group.count
        softmax.exponentiate(scores, None, softmax.weights[0])
        column = context.smem["p"][None, self._number_in_group(), 0]
        # Bytes in twos.
        starts = (part * self.config.rows + context.first_row for part in range(2))
        targets = tuple(columns_of(column, start // 2, rows // 2) for start in starts)
        _store_parts([scores[row] for row in range(rows)], targets)

    def _scaled_inverse(self, softmax: Any, inverse: Float32) -> Float32:
        return self.scales.scaled_inverse(softmax, inverse)

    def _load_half(self, context: BlackwellDecodeContext, half: int) -> cute.Tensor:
        return self._load_sum(self._of_half(context, half))


def _split(values: list[Float32]) -> tuple[Int32, Int32]:
    """Return (hi, lo) of four values, each as `codes_of`; cvt.rn.f16x2.e4m3x2 (PTX ISA 9.7.9.22)
    says what hi is."""
    codes = codes_of(values)
    rounded = cute.arch.inline_ptx(
        "{.reg .b16 low, high, a, b, c, d;\n"
        ".reg .b32 first, second;\n"
        "mov.b32 {low, high}, {$r0};\n"
        "cvt.rn.f16x2.e4m3x2 first, low;\n"
        "cvt.rn.f16x2.e4m3x2 second, high;\n"
        "mov.b32 {a, b}, first;\n"
        "mov.b32 {c, d}, second;\n"
        "cvt.f32.f16 {$w0}, a;\n"
        "cvt.f32.f16 {$w1}, b;\n"
        "cvt.f32.f16 {$w2}, c;\n"
        "cvt.f32.f16 {$w3}, d;}",
        write_only_types=[Float32] * WORD_CODES,
        read_only_args=[codes],
    )
    left: list[Float32] = []
    for first in range(0, WORD_CODES, 2):
        pair, of_high = values[first : first + 2], rounded[first : first + 2]
        less = cute.arch.sub_packed_f32x2(tuple(pair), tuple(of_high))
        left += cute.arch.mul_packed_f32x2(less, (Float32(1 / LOW_PART),) * 2)
    return codes, codes_of(left)


def _store_parts(values: list[Float32], targets: tuple[cute.Tensor, cute.Tensor]) -> None:
    """Both parts of some values to memory.  targets: of hi and of lo, a 16-bit type, half as many
    elements as values, whose number is a multiple of 4."""
    words = [cute.make_rmem_tensor(len(values) // WORD_CODES, Int32) for _ in targets]
    for number in range(0, len(values), WORD_CODES):
        for part, codes in zip(words, _split(values[number : number + WORD_CODES]), strict=True):
            part[number // WORD_CODES] = codes
    for part, target in zip(words, targets, strict=True):
        cute.autovec_copy(cute.recast_tensor(part, target.element_type), target)
