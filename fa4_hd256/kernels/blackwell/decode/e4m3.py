"""The decode kernel for K and V in e4m3: `config` NOTE [e4m3].

Four warps write both parts of Q's rows where they lie (`scaled`)::

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
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from ...context import KernelParts
from ...e4m3_codes import WORD_CODES, codes_of
from ...limits import HEAD_DIM, WARP_SIZE
from ...operands import ATOM_ROWS, SharedMemory
from ...plan.edges import RingRecord
from ...problem_class import ProblemClass
from ...rows.sequences import columns_of
from ..instructions import E4M3_SLICE, Mma, MmaShape, k_major_operand, mn_major_operand
from ..tmem import tmem_load
from . import scaled
from .config import BLOCK_KV, HALF, HALVES, DecodeConfig
from .context import BlackwellDecodeContext
from .context import BlackwellE4m3DecodeContext as Context
from .kernel import DecodeKernel, p_layout

#: Columns of tensor memory that are loaded at a time.
COLUMNS = 16
#: Weight of lo.
LOW_PART = 2.0**-4


class DecodeE4m3Kernel(DecodeKernel):
    """See the module's docstring; the arguments are those of `DecodeKernel`."""

    kv_bytes = 1
    halves_apart = False
    context_class = Context
    run_other_role = scaled.run_other_role
    _load_q = scaled.load_q
    _load_tile = scaled.load_tile
    _bring_q = scaled.bring_q
    _create = scaled.create
    _tile_state = scaled.tile_state
    _begin_tile = scaled.begin_tile
    _end_tile = scaled.end_tile
    _load_scores = scaled.load_scores
    _load_half = scaled.load_half
    _weigh = scaled.weigh
    _scaled_inverse = scaled.scaled_inverse

    def __init__(
        self, config: DecodeConfig, problem_class: ProblemClass, parts: KernelParts
    ) -> None:
        super().__init__(config, problem_class, parts)
        scaled.prepare(self, top_exponent=7)  # of 448 at most

    def make_mmas(self) -> None:
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
        q = memory.operand("q", self.config.columns, HEAD_DIM // 2, self.config.q_stages)
        return scaled.smem(self, memory) | {"q": q}

    @cute.jit
    def convert(self, context: Context):
        states = RingRecord.waiting(self.edges, "rows_loaded", "factors_free")
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            if self.num_steps(context, work) > 0:
                states = self._bring_q(context, states)
            work = scheduler.advance_to_next_work()

    def _store_row(
        self, context: Context, row: tuple[Any, Any], elements: list[Float32], stage: Int32
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
    """Both parts of some values, a multiple of 4, to memory.  targets: of hi and of lo, 16-bit."""
    words = [cute.make_rmem_tensor(len(values) // WORD_CODES, Int32) for _ in targets]
    for number in range(0, len(values), WORD_CODES):
        for part, codes in zip(words, _split(values[number : number + WORD_CODES]), strict=True):
            part[number // WORD_CODES] = codes
    for part, target in zip(words, targets, strict=True):
        cute.autovec_copy(cute.recast_tensor(part, target.element_type), target)
