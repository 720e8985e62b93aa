"""The decode kernel for K and V in e4m3: `config` NOTE [e4m3].

One warp loads Q's rows, and four write both parts of them where they lie, with a scale per row
(`kernels.forward.e4m3_queries` NOTE [Q in place]), a tile ahead where there is a buffer.  All else
is the decode kernel's, with scales (`kernels.forward.e4m3_scales`)::

    queries, quantise  Q'                       | Q''
    load               K(1) V(0) K(2) V(1) ..   | K(0')  V(last) K(1')  V(0') ..
    mma                QK(1) PV(0) QK(2) PV(1)..| QK(0') PV(last)   QK(1') PV(0') ..

A row as it was loaded is four rows of 128 bytes in as many blocks of the swizzled operand.  The
first and the third are the row of hi in the operand of parts, the others the row of lo.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from ....softmax_emu.by_key import KeySoftmax
from ...forward.context import ForwardKernelTensors
from ...forward.e4m3_queries import ScaledRows
from ...forward.e4m3_scales import KeyScales, ScaledSoftmax
from ...limits import HEAD_DIM, WARP_SIZE
from ...operands import ATOM_ROWS, SharedMemory
from ...plan.edges import RingState, RingStates
from ...problem_class import ProblemClass
from ...ranges import traced
from ...rows.views import columns_of
from ..instructions import MmaShape, OperandLayout
from ..operands import E4M3_SLICE, k_major_operand, mn_major_operand
from ..tmem import tmem_load
from .config import BLOCK_KV, HALF, DecodeConfig
from .context import BlackwellE4m3DecodeContext
from .kernel import CORE_BYTES, GROUP, GROUP_BYTES, DecodeKernel
from .steps import HALVES
from .two_parts import LOW_PART, store_parts

__all__ = ["DecodeE4m3Kernel"]

#: Columns of tensor memory that are loaded at a time.
COLUMNS = 32


class DecodeE4m3Kernel(ScaledRows, KeyScales, DecodeKernel):
    """See the module's docstring; the arguments are those of `DecodeKernel`."""

    kv_bytes = 1
    top_exponent = 7  # of 448 at most
    rows_memory, rows_edge = "q_rows", "rows_loaded"

    def __init__(
        self, config: DecodeConfig, problem_class: ProblemClass, scheduler: Any = None
    ) -> None:
        super().__init__(config, problem_class, scheduler)
        columns = config.columns
        scores = MmaShape(
            BLOCK_KV,
            columns,
            self.is_bf16,
            negate_a=problem_class.negative_scale,
            ctas=self.ctas,
            is_e4m3=True,
        )
        sums = MmaShape(
            HALF,
            columns,
            self.is_bf16,
            a_mn_major=True,
            b_mn_major=True,
            ctas=self.ctas,
            is_e4m3=True,
        )
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

    def smem(self, memory: SharedMemory) -> dict[str, cute.Tensor]:
        rows, stages = self.config.rows, self.config.q_stages
        factors = memory.region("factors", Float32, 16)
        views = super().smem(memory)
        return views | {
            "q": memory.operand("q", self.config.columns, HEAD_DIM // 2, stages),
            "q_rows": views["q"],
            "factors": cute.make_tensor(factors, cute.make_layout((rows, stages))),
        }

    def set_up(
        self,
        allocator: Any,
        tensors: ForwardKernelTensors,
        sizes: tuple[Int32, ...],
        scalars: Any,
        order: Any,
    ) -> BlackwellE4m3DecodeContext:
        common = super().set_up(allocator, tensors, sizes, scalars, order)
        k_descale, v_descale = self.descales(tensors.optional)
        return BlackwellE4m3DecodeContext(**vars(common), k_descale=k_descale, v_descale=v_descale)

    @cute.jit
    def run_other_role(self, context: BlackwellE4m3DecodeContext, warp: Int32):
        """Run the role of a warp: that of `DecodeKernel`, or loading Q, or bringing it to e4m3."""
        warps = self.config.warps
        if warp < warps.queries:
            super().run_other_role(context, warp)
        elif warp == warps.queries:
            self.set_registers(warps.registers_other)
            self.load_queries(context)
        else:
            self.set_registers(warps.registers_quantise)
            self.quantise(context)

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
        self._bring_rows(context, states["rows_loaded"].index)
        for edge, of in zip(("q_loaded", "factors_ready"), waited, strict=True):
            barriers[edge].arrive(states[of])
            states.advance(of)
        return states

    @property
    def row_warps(self) -> tuple[int, ...]:
        return self.config.warps.quantise

    @property
    def rows_at_once(self) -> int:
        """Return the rows that the registers of these warps allow at once."""
        return 8 if self.config.softmax_groups == 1 else 4

    def _multiplied(self, elements: list[Float32], scale: Float32) -> list[Float32]:
        """Two at a time, which takes fewer registers, too."""
        products: list[Float32] = []
        for i in range(0, len(elements), 2):
            products += cute.arch.mul_packed_f32x2(tuple(elements[i : i + 2]), (scale, scale))
        return products

    def _store_row(
        self,
        context: BlackwellE4m3DecodeContext,
        row: tuple[Any, Any],
        elements: list[Float32],
        stage: Int32,
    ) -> None:
        """Both parts of a row."""
        codes, lane = context.smem["q"], cute.arch.lane_idx()
        columns = HEAD_DIM // WARP_SIZE // 2
        place, atom = row
        atoms = self.config.rows // ATOM_ROWS
        targets = tuple(
            columns_of(codes[(place, part * atoms + atom), None, stage], lane * columns, columns)
            for part in range(2)
        )
        store_parts(elements, targets)

    # ------------------------------------------------------------ softmax

    def _create(self, context: BlackwellE4m3DecodeContext) -> KeySoftmax:
        config, rows = self.config, self.softmax_rows
        softmax = ScaledSoftmax.create(
            self.softmax_scale(context),
            config.ex2_pattern,
            config.rescale_threshold,
            self.dtype,
            rows,
            config.headroom,
        )
        self._make_room(softmax)
        # Scale of the rows, from S to scores.
        softmax.k_scale = cute.make_rmem_tensor(rows, Float32)
        return softmax

    def _tile_state(self) -> RingState:
        return self.edges["factors_ready"].waiter_state()

    @cute.jit
    def _begin_tile(
        self, context: BlackwellE4m3DecodeContext, softmax: Any, work: Any, key: Int32, state: Any
    ):
        """The scales of the rows, and those of the tile, or of the first step's keys."""
        barriers, factors = context.barriers, softmax.k_scale
        barriers["factors_ready"].wait(state)
        cute.autovec_copy(context.smem["factors"][None, state.index], factors)
        barriers["factors_free"].arrive(state)
        state.advance()
        self._enter_scales(context, softmax, work, key)
        return state

    @staticmethod
    def _multiply_all(values: cute.Tensor, factor: Float32) -> None:
        for row in range(0, cute.size(values), 2):
            values[row], values[row + 1] = cute.arch.mul_packed_f32x2(
                (values[row], values[row + 1]), (factor, factor)
            )

    def _load_scores(
        self, context: BlackwellE4m3DecodeContext, softmax: Any, buffer: Int32, work: Any
    ) -> cute.Tensor:
        """Both parts of S, added and brought back: rows by their scales, which K's scale of the
        tile is among, a key by its page's scale."""
        scores = self._load_sum(self._scores(context, buffer))
        self._multiply(scores, softmax.k_scale)
        if self.of_pages:
            (k_scale,) = self._take_scales(context, softmax, work)
            self._multiply_all(scores, k_scale)
        return scores

    def _load_sum(self, address: Any) -> cute.Tensor:
        """Both parts of a lane's rows, added: those of lo lie behind those of hi."""
        rows = self.softmax_rows
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

    def _weigh(
        self, context: BlackwellE4m3DecodeContext, softmax: Any, scores: cute.Tensor
    ) -> None:
        if not self.of_pages:
            return
        scale, (logarithm,) = context.scalars.scale_log2, softmax.log2_v
        for row in range(0, self.softmax_rows, 2):
            scores[row], scores[row + 1] = cute.arch.fma_packed_f32x2(
                (scores[row], scores[row + 1]), (scale, scale), (logarithm, logarithm)
            )

    def _store_probabilities(
        self, context: BlackwellE4m3DecodeContext, softmax: Any, scores: cute.Tensor
    ) -> None:
        rows = self.softmax_rows
        softmax.exponentiate(scores, None, softmax.weights[0])
        own = context.smem["p"][None, self._own_key(), 0]
        # Bytes in twos.
        starts = (part * self.config.rows + context.first_row for part in range(2))
        targets = tuple(columns_of(own, start // 2, rows // 2) for start in starts)
        store_parts([scores[row] for row in range(rows)], targets)

    def _load_half(self, context: BlackwellE4m3DecodeContext, half: int) -> cute.Tensor:
        return self._load_sum(self._of_half(context, half))
