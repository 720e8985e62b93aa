"""The decode kernel for K and V in e4m3: `config` NOTE [e4m3].

A warp of its own, `quantise`, reads Q from global memory and writes both parts of it where the
tensor core reads them, a tile ahead, with a factor a row.  All else is the decode kernel's::

    quantise Q'                       | Q''
    load     K(1) V(0) K(2) V(1) ..   | K(0')  V(last) K(1')  V(0') ..
    mma      QK(1) PV(0) QK(2) PV(1)..| QK(0') PV(last)   QK(1') PV(0') ..

NOTE [scales].  A scale of K multiplies scores.  What a sequence's KV head has is taken into the
factors of the rows, at a tile's begin.  What a page has is a key's, hence a thread's: it multiplies
that thread's scores.  A scale of V multiplies the row of O; a page's would have to multiply P,
whose type has few exponents.  So its logarithm is added to the scores, in the exponent of 2, where
the running maximum takes care of any size, and the sums take what each key counts without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4_hd256.kernels.blackwell.instructions import MmaShape, OperandLayout
from fa4_hd256.kernels.blackwell.operands import E4M3_SLICE, k_major_operand, mn_major_operand
from fa4_hd256.kernels.blackwell.tmem import tmem_load
from fa4_hd256.kernels.edges import RingState, RingStates
from fa4_hd256.kernels.forward_common import ForwardTensors
from fa4_hd256.kernels.limits import HEAD_DIM, WARP_SIZE
from fa4_hd256.kernels.operands import SharedMemory, TmaTensor
from fa4_hd256.kernels.problem_class import OF_PAGES, ProblemClass
from fa4_hd256.kernels.ranges import traced
from fa4_hd256.kernels.views import columns_of, load_lane_columns
from softmax_emu.by_key import KeySoftmax

from .config import BLOCK_KV, HALF, DecodeConfig
from .kernel import CORE_BYTES, GROUP, GROUP_BYTES, Context, DecodeKernel
from .steps import HALVES
from .two_parts import LOW_PART, store_parts

__all__ = ["DecodeE4m3Kernel"]

FLOAT_BIAS, FLOAT_MANTISSA = 127, 23
#: A row's largest element comes to lie in [2^7, 2^8), of 448 at most.
TOP_EXPONENT = 7
#: Of a row's largest element, as float32 has it, at least: of smaller ones the factor would leave
#: the exponents of a float32.
LEAST_EXPONENT = 32
INFINITE_EXPONENT = 255
#: Rows that the warp works on at a time.
ROWS_AT_ONCE = 8
#: Columns of tensor memory that are loaded at a time.
COLUMNS = 32
#: V's scale of a page counts as this at least: its logarithm and its reciprocal are then finite.
LEAST_SCALE = 2.0**-64


@dataclass(frozen=True)
class E4m3Context(Context):
    """k_descale, v_descale: (entries, heads_kv) float32, or None."""

    k_descale: Any = None
    v_descale: Any = None


class ScaledSoftmax(KeySoftmax):
    """With the scales, NOTE [scales].  Register memory, which lives across loops:

    factors: (rows,) from S to scores.  v_scale: (1,) V's of the tile.  key: (1,) this thread's in
    the step after the next, of whose next one `coming` has the scales: (2,) K's and V's.

    Of a step alone, with scales of pages: log2_v of this thread's scale of V, weight its
    reciprocal.
    """

    factors: cute.Tensor
    v_scale: cute.Tensor
    key: cute.Tensor
    coming: cute.Tensor
    log2_v: Float32
    weight: Float32 | None = None


class DecodeE4m3Kernel(DecodeKernel):
    """See the module's docstring; the arguments are those of `DecodeKernel`."""

    kv_bytes = 1

    def __init__(
        self, config: DecodeConfig, problem_class: ProblemClass, scheduler: Any = None
    ) -> None:
        super().__init__(config, problem_class, scheduler)
        columns = config.columns
        scores = MmaShape(
            BLOCK_KV, columns, self.is_bf16, negate_a=problem_class.negative_scale, ctas=self.ctas,
            is_e4m3=True,
        )  # fmt: skip
        sums = MmaShape(
            HALF, columns, self.is_bf16, a_mn_major=True, b_mn_major=True, ctas=self.ctas,
            is_e4m3=True,
        )  # fmt: skip
        self.shapes = {"S": scores} | {f"O{half}": sums for half in HALVES}
        slices = tuple(k // GROUP * CORE_BYTES for k in range(0, BLOCK_KV, E4M3_SLICE))
        self.layouts = {
            # Bytes in twos: a row of 256 has as many as 128 of a 16-bit type.
            "Q": k_major_operand(columns, HEAD_DIM // 2),
            "K": k_major_operand(BLOCK_KV, HEAD_DIM // 2),
            "P": OperandLayout(CORE_BYTES, GROUP_BYTES, slices, is_swizzled=False),
        }
        for half in HALVES:
            self.layouts[f"V{half}"] = mn_major_operand(BLOCK_KV, E4M3_SLICE, half)

    @property
    def of_pages(self) -> bool:
        """Whether scales are those of pages."""
        return self.problem_class.descale == OF_PAGES

    def kernel_tensors(self, operands: tuple, lse: cute.Tensor, optional: Any) -> ForwardTensors:
        """As `DecodeKernel`, but that Q is no operand of TMA."""
        return super().kernel_tensors(operands, lse, optional)._replace(q=operands[0])

    def descriptors(self, tensors: ForwardTensors) -> tuple[TmaTensor, ...]:
        return tensors.k, tensors.v

    def smem(self, memory: SharedMemory) -> dict[str, cute.Tensor]:
        rows, stages = self.config.rows, self.config.q_stages
        factors = memory.region("factors", Float32, 16)
        return super().smem(memory) | {
            "q": memory.operand("q", self.config.columns, HEAD_DIM // 2, stages),
            "factors": cute.make_tensor(factors, cute.make_layout((rows, stages))),
        }

    def set_up(
        self, allocator: Any, tensors: ForwardTensors, sizes: tuple, scalars: Any, order: Any
    ) -> Context:
        common = super().set_up(allocator, tensors, sizes, scalars, order)
        k_descale, v_descale = self.descales(tensors.optional)
        return E4m3Context(**vars(common), k_descale=k_descale, v_descale=v_descale)

    @cute.jit
    def run_role(self, context: Any, warp: Int32):
        """The role of this warp."""
        super().run_role(context, warp)
        if warp == self.config.warps.quantise:
            self.quantise(context)

    # ------------------------------------------------------------ Q

    @cute.jit
    def quantise(self, context: Any):
        """Each tile's Q in two parts of e4m3, and the factors of its rows; one warp."""
        states = self.edges.waiter_states("q_free", "factors_free")
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            if self.num_steps(context, work) > 0:
                states = self._quantise_tile(context, work, states)
            work = scheduler.advance_to_next_work()
        for _ in range(self.config.q_stages):
            context.barriers["q_free"].wait(states["q_free"])
            states.advance("q_free")

    @traced("quantise Q")
    @cute.jit
    def _quantise_tile(self, context: Any, work: Any, states: RingStates):
        barriers = context.barriers
        for name in ("q_free", "factors_free"):
            barriers[name].wait(states[name])
        for group in cutlass.range(self.config.rows // ROWS_AT_ONCE, unroll=1):
            first = group * ROWS_AT_ONCE
            rows = [self._load_row(context, work, first + i) for i in range(ROWS_AT_ONCE)]
            for i, values in enumerate(rows):
                self._quantise_row(context, first + i, values, states["q_free"].index)
        # The tensor core reads through the async proxy what was written here.
        cute.arch.fence_view_async_shared()
        for full, free in (("q_loaded", "q_free"), ("factors_ready", "factors_free")):
            barriers[full].arrive(states[free])
            states.advance(free)
        return states

    @cute.jit
    def _load_row(self, context: Any, work: Any, row: Int32):
        """This lane's elements of a row of Q in float32; 0 of one that there is not."""
        packed, queries = self.problem_class.packed_heads, context.query(work)
        query, in_group = self.queries(work)[0] + row // self.of_query, row % self.of_query
        values = cute.make_rmem_tensor(HEAD_DIM // WARP_SIZE, self.dtype)
        values.fill(0.0)
        if (query < queries.length) & (in_group < packed):
            head = work.head * packed + in_group
            source = context.tensors.q[queries.offset + query, None, head, queries.batch]
            values.store(load_lane_columns(source, cute.arch.lane_idx()).load())
        return values

    def _quantise_row(self, context: Any, row: Any, values: cute.Tensor, stage: Int32) -> None:
        """A row to shared memory, with its factor."""
        elements = values.load().to(Float32)
        elements = [elements[i] for i in range(HEAD_DIM // WARP_SIZE)]
        largest = Int32(0)
        for element in elements:
            # As bits, which order numbers by size, and infinity and NaN above all.
            largest = cutlass.max(largest, _bits(element) & 0x7FFFFFFF)
        largest = cute.arch.warp_redux_sync(largest, "max")
        exponent = cutlass.max(largest >> FLOAT_MANTISSA, LEAST_EXPONENT)
        scale = _float((2 * FLOAT_BIAS + TOP_EXPONENT - exponent) << FLOAT_MANTISSA)
        factor = _float((exponent - TOP_EXPONENT) << FLOAT_MANTISSA)
        # Codes have no infinity: what a row with one comes to is NaN.
        factor = cutlass.select_(exponent == INFINITE_EXPONENT, Float32(math.nan), factor)
        codes, lane = context.smem["q"], cute.arch.lane_idx()
        columns = HEAD_DIM // WARP_SIZE // 2
        targets = tuple(
            columns_of(codes[part * self.config.rows + row, None, stage], lane * columns, columns)
            for part in range(2)
        )
        store_parts([element * scale for element in elements], targets)
        # All lanes write the same.
        context.smem["factors"][row, stage] = factor

    # ------------------------------------------------------------ softmax

    def _create(self, context: Any) -> KeySoftmax:
        config, rows = self.config, self.config.rows
        # With scales of pages scores are exponents of 2 before the softmax has them.
        scale = Float32(1.0) if self.of_pages else context.scalars.scale_log2
        softmax = ScaledSoftmax.create(
            scale, config.ex2_pattern, config.rescale_threshold, self.dtype, rows, config.headroom
        )
        softmax.factors = cute.make_rmem_tensor(rows, Float32)
        if self.of_pages:
            softmax.key = cute.make_rmem_tensor(1, Int32)
            softmax.coming = cute.make_rmem_tensor(2, Float32)
        elif self.problem_class.descale:
            softmax.v_scale = cute.make_rmem_tensor(1, Float32)
            # A tile without steps, whose O is 0, reads it, too.
            softmax.v_scale.fill(1.0)
        return softmax

    def _tile_state(self) -> RingState:
        return self.edges["factors_ready"].waiter_state()

    @cute.jit
    def _begin_tile(self, context: Any, softmax: Any, work: Any, key: Int32, state: Any):
        """The factors of the rows, and the scales of the tile, or of the first step's keys."""
        barriers, factors = context.barriers, softmax.factors
        barriers["factors_ready"].wait(state)
        cute.autovec_copy(context.smem["factors"][None, state.index], factors)
        barriers["factors_free"].arrive(state)
        state.advance()
        if cutlass.const_expr(self.of_pages):
            softmax.key[0] = key
            self._next_scales(context, softmax, work)
        elif cutlass.const_expr(context.k_descale is not None):
            head, batch = work.head // context.heads_per_kv, context.batch(work)
            softmax.v_scale[0] = _scale_of(context.v_descale, batch, head)
            self._multiply_all(factors, _scale_of(context.k_descale, batch, head))
        return state

    @staticmethod
    def _multiply_all(values: cute.Tensor, factor: Float32) -> None:
        for row in range(0, cute.size(values), 2):
            values[row], values[row + 1] = cute.arch.mul_packed_f32x2(
                (values[row], values[row + 1]), (factor, factor)
            )

    def _next_scales(self, context: Any, softmax: Any, work: Any) -> None:
        """The scales of this thread's key in the next step, asked for a step ahead."""
        visibility = context.visibility(work, BLOCK_KV)
        size, key = self.problem_class.page_size, softmax.key[0]
        # Pages without a key that some query sees may be anybody's: their entries are not read.
        first = visibility.first(self.queries(work)[0]) // size
        last = (visibility.seqlen_k - 1) // size
        place = cutlass.max(cutlass.min(cutlass.max(key // size, first), last), 0)
        page = context.sequences.tensors.page_table[context.batch(work), place]
        head = work.head // context.heads_per_kv
        softmax.coming[0] = _scale_of(context.k_descale, page, head)
        softmax.coming[1] = _scale_of(context.v_descale, page, head)
        softmax.key[0] = key - BLOCK_KV

    def _load_scores(self, context: Any, softmax: Any, buffer: Int32, work: Any) -> cute.Tensor:
        """Both parts of S, added and brought back: rows by their factors, which K's scale of the
        tile is among, a key by its page's scale."""
        scores = self._load_sum(self._scores(context, buffer))
        self._multiply(scores, softmax.factors)
        if self.of_pages:
            k_scale, v_scale = softmax.coming[0], softmax.coming[1]
            v_scale = cute.arch.fmax(v_scale, Float32(LEAST_SCALE))
            softmax.log2_v = cute.math.log2(v_scale, approx=True, ftz=True)
            softmax.weight = cute.arch.rcp_approx(v_scale)
            self._next_scales(context, softmax, work)
            self._multiply_all(scores, k_scale)
        return scores

    def _load_sum(self, address: Any) -> cute.Tensor:
        """Both parts of a lane's rows, added: those of lo lie behind those of hi."""
        rows = self.config.rows
        sums, columns = cute.make_rmem_tensor(rows, Float32), min(rows, COLUMNS)
        for first in range(0, rows, columns):
            parts = [cute.make_rmem_tensor(columns, Float32) for _ in range(2)]
            for number, part in enumerate(parts):
                tmem_load(address + number * rows + first, part, columns)
            cute.arch.fence_view_async_tmem_load()
            self._add_parts(parts, sums, first)
        return sums

    @staticmethod
    def _add_parts(parts: list[cute.Tensor], sums: cute.Tensor, first: int) -> None:
        """hi + lo / 16, two at a time, to `sums` from `first` on."""
        high, low = parts
        counts = Float32(LOW_PART)
        for row in range(0, cute.size(high), 2):
            sums[first + row], sums[first + row + 1] = cute.arch.fma_packed_f32x2(
                (low[row], low[row + 1]), (counts, counts), (high[row], high[row + 1])
            )

    def _weigh(self, context: Any, softmax: Any, scores: cute.Tensor) -> None:
        if not self.of_pages:
            return
        scale, logarithm = context.scalars.scale_log2, softmax.log2_v
        for row in range(0, self.config.rows, 2):
            scores[row], scores[row + 1] = cute.arch.fma_packed_f32x2(
                (scores[row], scores[row + 1]), (scale, scale), (logarithm, logarithm)
            )

    def _store_probabilities(self, context: Any, softmax: Any, scores: cute.Tensor) -> None:
        rows = self.config.rows
        softmax.exponentiate(scores, None, softmax.weight)
        own = context.smem["p"][None, cute.arch.thread_idx()[0], 0]
        targets = tuple(columns_of(own, part * (rows // 2), rows // 2) for part in range(2))
        store_parts([scores[row] for row in range(rows)], targets)

    def _load_half(self, context: Any, half: int) -> cute.Tensor:
        return self._load_sum(self._of_half(context, half))

    def _inverse(self, softmax: Any, inverse: Float32) -> Float32:
        if self.of_pages or not self.problem_class.descale:
            return inverse
        return inverse * softmax.v_scale[0]


def _bits(value: Float32) -> Int32:
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )


def _float(bits: Int32) -> Float32:
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits]
    )


def _scale_of(scales: cute.Tensor, entry: Int32, head: Int32) -> Float32:
    """Of an entry and a KV head; where all have the same, that."""
    entries, heads = (cute.size(scales, mode=[mode]) for mode in range(2))
    return scales[cutlass.min(entry, entries - 1), cutlass.min(head, heads - 1)]
