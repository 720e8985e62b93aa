"""The kernel of dV and dS in mxfp8: `backward.dv` with block-scaled MMAs.

S^T = K Q^T and dP^T = V dO^T reduce over the head's columns, dV = P^T dO over queries.  So dO comes
twice, with blocks along either side.  Each passes in one piece of 16 KiB, with its scales.  P is
rounded times 2^8, with one constant scale.  dS is made of P in float32, and leaves in e4m3 with
scales of square blocks (`ds`), codes through shared memory.

NOTE [scales over S and dP].  dV, S and dP take 512 columns of tensor memory, all there are.  Scales
lie over what is in registers already, copied there by tcgen05.cp before each MMA: those of S(i + 1)
over dP(i), those of dP(i) over S(i), those of dV(i) over dP(i) behind P(i).  So S(i + 1) waits for
dP(i) in registers (dp_free), dP(i) for S(i) in registers (s_free).  Both waits are short: while S(i
+ 1) is computed, dS(i) is rounded, and while dP(i) is, the exponentials of S(i) take longer.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from .....schedulers.protocol import WorkTile
from ....backward.common import Step
from ....block_scales import ATOMS
from ....context import KernelParts
from ....operands import SharedMemory, TmaTensor
from ....plan.budgets import WARPS_PER_WARPGROUP
from ....plan.edges import RingRecord, RingState
from ....problem_class import GradientClass
from ....ranges import traced
from ....rows.sequences import columns_of
from ...instructions import (
    Mma,
    MmaShape,
    TmemOperand,
    fence_after_thread_sync,
    fence_before_thread_sync,
    k_major_operand,
    mn_major_operand,
)
from ...scale_tiles import scale_buffers
from ...scaled_mma import ScaledMma, copy_scales
from ...tmem import tmem_buffer, tmem_store
from ...tmem_halves import half_row, tmem_load_halves, tmem_store_halves
from ..common import BlackwellBackward, RowsOfStep, hide, score_gradients, warpgroup
from ..config import GradientConfig
from ..dv import TILE_KEYS, DvKernel, DvLoadRings, DvMmaRings, DvTiles
from ..quads import STEP_QUERIES, WARPGROUP_QUERIES, QuadMask, QuadRegisters, StepDs, TileStep
from ..row_result import CTA_ROWS, WARPGROUP_COLUMNS, RowResult, first_row
from .ds import (
    CODE_WORDS,
    KEYS,
    P_LOG2,
    QUERIES,
    WORDS,
    Mxfp8DsStore,
    add_each,
    half_row_mask,
    quantize_ds,
    round_p,
    rounds,
)
from .scaled import ROW_ELEMENTS, load_scales_of, operand_views, scale_tensors
from .scaled import Mxfp8BackwardContext as Context

#: Four scales of 2^-P_LOG2, E8M0.
P_SCALES = (127 - P_LOG2) * 0x01010101
#: Rows of one instruction's K.
SLICE_ROWS = 32


class DvMxfp8Kernel(BlackwellBackward):
    """See the module's docstring; the arguments are those of `DvKernel`, with the operands of
    `scaled`.  What rounds nothing is that kernel's own."""

    context_class = Context
    rows_of = None
    tiles: DvTiles
    load_rings, mma_rings = DvLoadRings, DvMmaRings
    kept, passing = ("k", "v"), "ring"
    first_step: Any = DvKernel.first_step
    _queries: Any = DvKernel._queries
    _result: Any = DvKernel._result
    _load_row_stats: Any = DvKernel._load_row_stats
    later_columns = WARPGROUP_COLUMNS // 2
    register_sizes = WARPGROUP_QUERIES, WORDS, Mxfp8DsStore.registers
    mma_waits = {
        "k": "k_loaded",
        "v": "v_loaded",
        "ring": "ring_loaded",
        "s": "s_free",
        "dp": "dp_free",
        "p": "p_done",
        "dv": "dv_free",
    }
    mma_ends = "dp", "dv"
    boxes = {
        "q": (0, WARPGROUP_QUERIES, ROW_ELEMENTS),
        "k": (1, CTA_ROWS, ROW_ELEMENTS),
        "v": (2, CTA_ROWS, ROW_ELEMENTS),
        "dout": (3, WARPGROUP_QUERIES, ROW_ELEMENTS),
        "dout_t": (6, STEP_QUERIES, ROW_ELEMENTS // 2),
    }

    def __init__(
        self, config: GradientConfig, gradient_class: GradientClass, parts: KernelParts
    ) -> None:
        super().__init__(config, gradient_class, parts)
        self.tiles = DvTiles(self.plan, self.problem_class)
        self.result = RowResult("dV", self.tmem_plan, is_scaled=False)
        self.ds_store = Mxfp8DsStore(self.dtype, not self.problem_class.ragged)
        keys = k_major_operand(CTA_ROWS, ROW_ELEMENTS)
        queries = k_major_operand(WARPGROUP_QUERIES, ROW_ELEMENTS)
        half = TmemOperand.contiguous(WARPGROUP_QUERIES // 2).step_columns
        p = TmemOperand((*half, *(WARPGROUP_QUERIES + column for column in half)))
        negate = self.problem_class.negative_scale
        s = MmaShape(TILE_KEYS, STEP_QUERIES, False, negate_a=negate, is_e4m3=True)
        dp = MmaShape(TILE_KEYS, STEP_QUERIES, False, is_e4m3=True)
        dv = MmaShape(TILE_KEYS, 2 * ROW_ELEMENTS, False, b_mn_major=True, is_e4m3=True)
        self.scaled_s = ScaledMma.of(Mma(s, keys, queries))
        self.scaled_dp = ScaledMma.of(Mma(dp, keys, queries))
        self.scaled_dv = ScaledMma.of(Mma(dv, p, mn_major_operand(STEP_QUERIES, SLICE_ROWS)))

    def operand_views(self, operands: tuple[cute.Tensor, ...]) -> tuple[cute.Tensor, ...]:
        return operand_views(operands)

    def tma_tensors(self, operands: tuple[cute.Tensor, ...], ds: Any) -> tuple[TmaTensor, ...]:
        return *super().tma_tensors(operands, ds), *scale_tensors(self.boxes, operands)

    def smem(self, memory: SharedMemory) -> dict[str, cute.Tensor]:
        stages = self.plan.ring_stages
        stats = cute.make_layout((STEP_QUERIES, self.plan.stats_stages))
        warpgroups = len(self.warps.gradient) // WARPS_PER_WARPGROUP
        staged = cute.make_layout((CODE_WORDS // 2, warpgroups))
        return {
            "k": memory.operand("k", CTA_ROWS, ROW_ELEMENTS, 1),
            "v": memory.operand("v", CTA_ROWS, ROW_ELEMENTS, 1),
            "ring": memory.operand("ring", WARPGROUP_QUERIES, ROW_ELEMENTS, stages),
            "columns": memory.operand("ring", STEP_QUERIES, ROW_ELEMENTS // 2, stages),
            "k_scales": scale_buffers(memory, "k_scales", 1),
            "v_scales": scale_buffers(memory, "v_scales", 1),
            "ring_scales": scale_buffers(memory, "ring_scales", stages),
            "lse": cute.make_tensor(memory.region("lse", Float32, 128), stats),
            "delta": cute.make_tensor(memory.region("delta", Float32, 128), stats),
            "staged": cute.make_tensor(memory.region("staged", Int32, 128), staged),
        }

    # ------------------------------------------------------------ load

    def load_kept(
        self, context: Context, work: WorkTile, name: str, rings: DvLoadRings
    ) -> DvLoadRings:
        """Load this CTA's 128 keys of K or V, and their scales to the same barrier."""
        ring = rings[name]
        state, keys, row = ring.copy(), context.sequences.key(work.batch), first_row(context, work)
        head = work.head // context.scalars.head_parts
        self.load_box(context, name, (keys, row, 0, head), (name, ring))
        self._load_scales(context, name, (keys, row, head), work, (name, state))
        return rings

    def load_s(
        self, context: Context, work: WorkTile, step: Step, rings: DvLoadRings
    ) -> DvLoadRings:
        """Load this CTA's 64 rows of Q, then LSE and delta of all rows of the step."""
        self._load_piece(context, "q", work, step, rings)
        return self._load_row_stats(context, work, step, rings)

    def load_dp(
        self, context: Context, work: WorkTile, step: Step, rings: DvLoadRings
    ) -> DvLoadRings:
        return self._load_piece(context, "dout", work, step, rings)

    def load_sum(
        self, context: Context, work: WorkTile, step: Step, rings: DvLoadRings
    ) -> DvLoadRings:
        return self._load_piece(context, "dout_t", work, step, rings)

    def _load_piece(
        self, context: Context, box: str, work: WorkTile, step: Step, rings: DvLoadRings
    ) -> DvLoadRings:
        """Load this CTA's share of a step's rows, and the scales of all of them."""
        rows: RowsOfStep = self._queries(context, work, step)
        state, first, column, memory = rings.ring.copy(), rows.first, 0, "ring"
        if box == "dout_t":
            column, memory = context.cta_rank, "columns"
        else:
            first += context.cta_rank * WARPGROUP_QUERIES
        place = rows.sequence, first, column, rows.head
        self.load_box(context, box, place, ("ring", rings.ring), memory)
        whole = rows.sequence, rows.first, rows.head
        self._load_scales(context, box, whole, work, ("ring", state))
        return rings

    def _load_scales(
        self, context: Context, box: str, place: Any, work: WorkTile, buffers: tuple[str, RingState]
    ) -> None:
        name, state = buffers
        target = context.barriers[f"{name}_loaded"].pointer(state), state.index
        scales = context.smem[f"{name}_scales"], target
        load_scales_of(context, self.boxes, box, place, work, scales)

    # ------------------------------------------------------------ mma

    @traced("S")
    @cute.jit
    def _s(self, context: Context, is_last: Boolean, rings: DvMmaRings):
        """S^T = K Q^T of a step, its scales over dP of the step before."""
        barriers = context.barriers
        barriers["dp_free"].wait(rings.dp)
        result = tmem_buffer(context.tmem, self.tmem_plan, "s", rings.s)
        self._issue(context, self.scaled_s, ("k", "q"), result, rings.ring)
        barriers["s_done"].commit(rings.s)
        if is_last:
            barriers["k_free"].commit(rings.k)
        return rings

    @traced("dP")
    @cute.jit
    def _dp(self, context: Context, is_last: Boolean, rings: DvMmaRings):
        """dP^T = V dO^T of a step, its scales over S of the step."""
        barriers = context.barriers
        barriers["s_free"].wait(rings.s)
        rings.s.advance()
        result = tmem_buffer(context.tmem, self.tmem_plan, "dp", rings.dp)
        self._issue(context, self.scaled_dp, ("v", "dout"), result, rings.ring)
        barriers["dp_done"].commit(rings.dp)
        rings.dp.advance()
        if is_last:
            barriers["v_free"].commit(rings.v)
        return rings

    def _issue(
        self,
        context: Context,
        mma: ScaledMma,
        names: tuple[str, str],
        result: Int32,
        ring: RingState,
    ) -> None:
        """Issue an MMA of what stays and of the ring's next buffer.  names: of these."""
        kept, passing = names
        context.barriers["ring_loaded"].wait(ring)
        fence_after_thread_sync()
        scales = (
            self._copied(context, kept, f"{kept}_scales", 0),
            self._copied(context, passing, "ring_scales", ring.index),
        )
        a = context.smem[kept][None, None, 0].iterator
        b = context.smem["ring"][None, None, ring.index].iterator
        mma.issue_scaled(result, a, b, False, scales)
        context.barriers["ring_free"].commit(ring)
        ring.advance()

    def _copied(self, context: Context, name: str, buffers: str, index: Int32 | int) -> Int32:
        target = context.tmem.toint() + self.tmem_plan[f"{name}_scales"].start
        copy_scales(target, context.smem[buffers][None, None, index].iterator, ATOMS)
        return target

    @traced("dV")
    @cute.jit
    def issue_sum(self, context: Context, number: Int32, is_last: bool, rings: DvMmaRings):
        """dV += P^T dO of a step; see the base."""
        barriers = context.barriers
        is_first, adds = number == 1, number > 1
        if is_first:
            barriers["dv_free"].wait(rings.dv)
            rings.dv.advance()
        barriers["ring_loaded"].wait(rings.ring)
        barriers["p_done"].wait(rings.p)
        fence_after_thread_sync()
        of_dout = self._copied(context, "dout_t", "ring_scales", rings.ring.index)
        of_p = context.tmem.toint() + self.tmem_plan["p_scales"].start
        p = tmem_buffer(context.tmem, self.tmem_plan, "dp", rings.p)
        dout = context.smem["columns"][None, None, rings.ring.index].iterator
        dv = tmem_buffer(context.tmem, self.tmem_plan, "dv", rings.dv)
        self.scaled_dv.issue_scaled(dv, p, dout, adds, (of_p, of_dout))
        barriers["ring_free"].commit(rings.ring)
        rings.ring.advance()
        rings.p.advance()
        if cutlass.const_expr(is_last):
            barriers["dv_done"].commit(rings.dv)
        return rings

    # ------------------------------------------------------------ gradient

    @cute.jit
    def gradient(self, context: Context):
        """See the base; shared memory must not go away under copies in flight."""
        DvKernel.gradient(self, context)
        cute.arch.cp_async_bulk_wait_group(0, read=False)

    def _thread_stats(self, context: Context, name: str, buffer: Int32) -> cute.Tensor:
        """-LSE or -delta of this thread's 32 queries."""
        first = warpgroup() * WARPGROUP_QUERIES + half_row()[1] * QUERIES
        source = context.smem[name].iterator + (buffer * STEP_QUERIES + first)
        values = cute.make_rmem_tensor(QUERIES, Float32)
        cute.autovec_copy(cute.make_tensor(source.align(16), values.layout), values)
        return values

    @traced("P")
    @cute.jit
    def _probabilities(
        self,
        context: Context,
        registers: QuadRegisters,
        mask: QuadMask,
        before: StepDs | None,
        states: RingRecord,
        place: TileStep,
    ):
        """P of one step times 2^P_LOG2, in float32 and in e4m3.  before: dS of the step before,
        which leaves meanwhile."""
        for key in cutlass.range_constexpr(KEYS):
            self.ds_store.store(before, key)
        states = self.take_scores(context, registers.factors, tmem_load_halves, states)
        context.barriers["stats_loaded"].wait(states["stats_loaded"])
        exponents = self._thread_stats(context, "lse", states["stats_loaded"].index)
        add_each(exponents, float(P_LOG2))
        self._hide_unseen(context, mask, place, registers.factors)
        for key in cutlass.range_constexpr(KEYS):
            part = columns_of(registers.factors, key * QUERIES, QUERIES)
            self.exponentiate(context, part, exponents, key * QUERIES, WARPGROUP_QUERIES)
            round_p(part, registers.p, key)
        return states

    @cute.jit
    def _hide_unseen(
        self,
        context: Context,
        mask: QuadMask,
        place: TileStep,
        scores: cute.Tensor,
    ):
        """Hide scores in none or one round of a loop: ptxas predicates a branch, and so issues its
        instructions in all steps."""
        for _ in cutlass.range(rounds(mask.applies), unroll=1):
            hide(half_row_mask(first_row(context, place.work), mask), scores)

    @traced("dS")
    @cute.jit
    def _publish(
        self, context: Context, registers: QuadRegisters, undrained: WorkTile, states: RingRecord
    ):
        """P and its scales to tensor memory, over dP, then dS = P (dP - delta) in e4m3. undrained:
        see the base."""
        factors, p, ds = registers
        barriers = context.barriers
        barriers["dp_done"].wait(states["dp_done"])
        fence_after_thread_sync()
        address = self.warp_columns(context, "dp", WARPGROUP_QUERIES)
        dp = cute.make_rmem_tensor(WARPGROUP_QUERIES, Float32)
        tmem_load_halves(address, dp)
        cute.arch.fence_view_async_tmem_load()
        fence_before_thread_sync()
        barriers["dp_free"].arrive(states["dp_done"], is_converged=True)
        # Or ptxas moves the arrival behind the stores.
        cute.arch.sync_warp()
        tmem_store_halves(p, address)
        self._store_p_scales(address)
        cute.arch.fence_view_async_tmem_store()
        fence_before_thread_sync()
        barriers["p_done"].arrive(states["dp_done"], is_converged=True)
        states.advance("dp_done")
        if undrained.is_valid:
            part = self.later_columns, WARPGROUP_COLUMNS
            result = self._result(context, undrained)
            states = self.result.drain(context, result, states, part)
        delta = self._thread_stats(context, "delta", states["stats_loaded"].index)
        for key in cutlass.range_constexpr(KEYS):
            part = columns_of(dp, key * QUERIES, QUERIES)
            score_gradients(part, columns_of(factors, key * QUERIES, QUERIES), delta)
        context.barriers["stats_free"].arrive(states["stats_loaded"])
        states.advance("stats_loaded")
        quantize_ds(dp, ds)
        return states

    def _store_p_scales(self, address: Any) -> None:
        region = self.tmem_plan["p_scales"]
        words = cute.make_rmem_tensor(region.columns, Int32)
        words.fill(P_SCALES)
        behind = region.start - self.tmem_plan["dp"].start
        tmem_store(cute.recast_tensor(words, Float32), address + behind)
