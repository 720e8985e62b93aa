"""The forward kernel: out = softmax(scale * Q K^T) V and LSE at head_dim 256, by CTA pairs.

One tile is 256 query rows, of one head or of all heads that share a KV head (NOTE [packed heads]);
one step multiplies it with 128 keys.  Each CTA of the pair owns 128 rows, with their S, P and O in
its tensor memory, and loads half of every K and V tile; one warp of the leader CTA issues all MMAs
for both.

Timeline of one CTA (the peer's is the same, but for the MMA warp, which only the leader has);
QK(i) makes S(i), PV(i) adds P(i) V(i) to O, last is the tile's last step, 0' the next tile's
first::

    load        K(1) V(0) K(2) V(1) ...   | Q'  K(0')  V(last)  K(1')  V(0') ...
    mma         QK(1) PV(0) QK(2) PV(1) ..| QK(0') PV(last) QK(1') PV(0') ...
    softmax        S(1)->P(1)  S(2)->P(2) | S(last)->P(last)  S(0')->P(0') ...
    correction     rescale O   rescale O  |           O -> SMEM
    epilogue                              |                SMEM -> global

QK(i+1) is issued before PV(i), and QK(0') before PV(last) unless the next tile has no steps: the
tensor core makes S(i+1) while the softmax works on S(i).

`python -m fa4_hd256 plan` prints roles, barriers, SMEM and TMEM; docs/kernels.md has the reasons.

NOTE [S and P share columns].  P(i) lies over S(i), so the next QK in that buffer, QK(i+2),
must not overtake PV(i), which reads it.  Both are issued by one thread in this order, and the
tensor core executes the MMAs of a CTA pair in issue order.

NOTE [stores hidden by exponentials]: `scores`; NOTE [O leaves through Q]: `output`; NOTE [packed
heads] and NOTE [split keys]: `kernels.forward.common`; NOTE [listed tiles]:
`kernels.mask.block_mask`.
"""

from __future__ import annotations

import functools
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import cpasync, tcgen05

from ....schedulers.protocol import WorkTile
from ....softmax_emu.online import OnlineSoftmax
from ...context import CLAIM_STEPS, KernelParts, schedule, want_next_tile_if
from ...forward.common import ForwardCommon
from ...forward.context import ForwardKernelTensors
from ...forward.keys import KvTile
from ...limits import ELEMENT_BYTES, FLOAT_BYTES, HEAD_DIM
from ...operands import SharedMemory, TmaTensor, load_tile
from ...plan.edges import RingState
from ...problem_class import OptionalTensors, ProblemClass
from ...ranges import traced
from ...rows.output_gate import multiply_by_gate, neighbours
from ..instructions import (
    Mma,
    MmaShape,
    TmemOperand,
    fence_after_thread_sync,
    fence_before_thread_sync,
    k_major_operand,
    mn_major_operand,
)
from ..pair_kernel import PairKernel, await_buffer
from ..tmem import multiply, tmem_buffer, tmem_store
from .config import ForwardConfig
from .context import BlackwellForwardContext as Context
from .context import (
    CorrectionRings,
    LoadRings,
    MmaRings,
    ScoreRow,
    SoftmaxRings,
    buffers_in,
    tensors_of,
)
from .output import load_columns, output_slices, rescale, store_rounded, store_zeros
from .scores import RangeMask, StepScores, hand_over


class ForwardKernel(ForwardCommon, PairKernel):
    """The forward kernel for one configuration. config: tile shapes, stages, warps, exp2 pattern.
    problem_class: what of a call is compiled in. parts: see `KernelParts`. Called under
    `cute.compile`; see `__call__` for the arguments at run time."""

    context_class = Context
    scores_class = StepScores
    #: P is 2^p_log2 times as large: `OnlineSoftmax.create`.
    p_log2 = 0.0

    def __init__(
        self, config: ForwardConfig, problem_class: ProblemClass, parts: KernelParts
    ) -> None:
        super().__init__(config, problem_class, parts)
        self.config = config
        # Queries of a tile and of a CTA's half of it.
        self.tile_queries = config.tile_q // problem_class.packed_heads
        self.block_queries = config.block_q // problem_class.packed_heads
        # Each CTA loads half of the keys of K's tile.
        self.load_keys = config.block_kv // 2
        self.p_dtype = cutlass.Float8E4M3FN if config.is_e4m3 else self.dtype
        negate, is_bf16 = problem_class.negative_scale, self.is_bf16
        shape = functools.partial(MmaShape, is_bf16=is_bf16, is_e4m3=config.is_e4m3)
        self.qk = Mma(
            shape(config.tile_q, config.block_kv, negate_a=negate),
            k_major_operand(config.block_q, config.columns),
            k_major_operand(self.load_keys, config.columns),
        )
        pv = shape(config.tile_q, HEAD_DIM, b_mn_major=True)
        p = TmemOperand.contiguous(config.block_kv * config.element_bytes // ELEMENT_BYTES)
        v = mn_major_operand(config.block_kv, config.mma_k)
        self.pv0, self.pv1 = (Mma(pv, p.slices(s), v.slices(s)) for s in config.p_slices.values())
        self.scores = self.scores_class(config, self.functions, self.lists_steps)

    def kernel_tensors(
        self, operands: tuple[cute.Tensor, ...], lse: cute.Tensor, optional: OptionalTensors
    ) -> ForwardKernelTensors:
        return tensors_of(self, operands, lse, optional)

    def gathering_operation(self) -> Any:
        return cpasync.CopyBulkTensor2DGather4G2SOp(tcgen05.CtaGroup.TWO)

    def descriptors(self, tensors: ForwardKernelTensors) -> tuple[TmaTensor, ...]:
        loads = tensors.q, tensors.k, tensors.v
        return loads if tensors.o is None else (*loads, tensors.o)

    def smem(self, memory: SharedMemory) -> dict[str, cute.Tensor]:
        return buffers_in(memory, self.config)

    @cute.jit
    def run_role(self, context: Context, warp: Int32):
        warps = self.config.warps
        if warp < warps.correction[0]:
            self.set_registers(warps.registers_softmax)
            self.softmax(context)
        elif warp < warps.mma:
            self.set_registers(warps.registers_correction)
            self.correction(context)
        else:
            self.set_registers(warps.registers_other)
            if warp == warps.mma:
                if context.cta_rank == 0:
                    self.mma(context)
            if warp == warps.load:
                self.load(context)
            if warp == warps.epilogue:
                self.epilogue(context)
            if warp == warps.scheduler:
                schedule(self.scheduler, context)

    def with_descales(self, context: Context, work: WorkTile) -> Context:
        """Return the context with the descales of a tile's scores, or where there are none itself:
        operands of 16 bits have none."""
        return context

    def first_row(self, context: Context, work: Any) -> Int32:
        return work.block * self.tile_queries + context.cta_rank * self.block_queries

    def query_and_head(self, context: Context, work: Any, row: Int32) -> tuple[Int32, Int32]:
        """Return (query, head) of a row of this CTA's half of a tile."""
        packed = self.problem_class.packed_heads
        return self.first_row(context, work) + row // packed, work.head * packed + row % packed

    def num_steps(self, context: Context, work: Any) -> Int32:
        if cutlass.const_expr(self.lists_steps):
            return self.step_list(context, work).count
        visibility = context.visibility(work, self.config.block_kv)
        return visibility.num_tiles(work.block * self.tile_queries, self.tile_queries)

    # ------------------------------------------------------------ load

    @cute.jit
    def load(self, context: Context):
        """Fetch this CTA's share of what the MMAs need, in the order in which they are issued. Q
        and K(0), then K(i + 1) before V(i); Q and K(0) of the next tile before the last V of this
        one."""
        rings = LoadRings.waiting(self.edges, kv="kv_free", q="q_free")
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        scheduler, work = self.skip_empty_tiles(context, scheduler, work, True)
        if work.is_valid:
            rings = self._load_q_and_first_k(context, work, rings)
        while work.is_valid:
            # A look-up of the sequence in each step would take longer than the step's MMAs.
            tile_context = context.of_tile(work)
            kv_tile = self._first_kv_tile(tile_context, work)
            num_steps = self.num_steps(tile_context, work)
            want_next_tile_if(scheduler, num_steps <= CLAIM_STEPS)
            for step in cutlass.range(1, num_steps, unroll=1):
                want_next_tile_if(scheduler, step + CLAIM_STEPS == num_steps)
                following_kv_tile = self.keys.next(kv_tile)
                rings = self._load_kv(tile_context, work, following_kv_tile, "k", rings)
                rings = self._load_kv(tile_context, work, kv_tile, "v", rings)
                kv_tile = following_kv_tile
            following = scheduler.advance_to_next_work()
            is_ahead = self.has_steps(context, following)
            if is_ahead:
                rings = self._load_q_and_first_k(context, following, rings)
            rings = self._load_kv(tile_context, work, kv_tile, "v", rings)
            work = following
            if not is_ahead:
                scheduler, work = self.skip_empty_tiles(context, scheduler, work, True)
                if work.is_valid:
                    rings = self._load_q_and_first_k(context, work, rings)
        context.barriers["kv_free"].wait_for_all(rings.kv)
        context.barriers["q_free"].wait_for_all(rings.q)

    def _load_q_and_first_k(self, context: Context, work: WorkTile, rings: LoadRings) -> LoadRings:
        kv_tile = self._first_kv_tile(context, work)
        rings = self._load_q(context, work, rings)
        return self._load_kv(context, work, kv_tile, "k", rings)

    def _first_kv_tile(self, context: Context, work: WorkTile) -> KvTile:
        visibility = context.visibility(work, self.config.block_kv)
        return self.keys.first(context, work, visibility, work.block * self.tile_queries)

    @traced("load")
    def _load_q(self, context: Context, work: WorkTile, rings: LoadRings):
        place = context.query(work), self.first_row(context, work), 0, work.head
        barrier, index = await_buffer(context, "q", rings.q)
        packed = self.problem_class.packed_heads
        load_tile(context.tensors.q, context.smem["q"], place, barrier, index, packed)
        rings.q.advance()
        return rings

    @traced("load")
    def _load_kv(
        self, context: Context, work: WorkTile, kv_tile: KvTile, name: str, rings: LoadRings
    ) -> LoadRings:
        """Load this CTA's half of K's keys, or of V's columns, into the ring that both share."""
        rank, row = context.cta_rank, self.keys.first_row(kv_tile)
        head = work.head // context.heads_per_kv
        keys = self.keys.rows(context, work, kv_tile)
        if name == "k":
            source, place = context.tensors.k, (keys, row + rank * self.load_keys, 0, head)
        else:
            source, place = context.tensors.v, (keys, row, rank, head)
        target = await_buffer(context, "kv", rings.kv)
        self.keys.load(source, context.smem[name], place, target)
        rings.kv.advance()
        return rings

    # ------------------------------------------------------------ mma

    @cute.jit
    def mma(self, context: Context):
        """Issue every MMA of the pair; one warp of the leader CTA."""
        rings = MmaRings.waiting(
            self.edges,
            kv="kv_loaded",
            q="q_loaded",
            s="s_done",
            p_first="p_first_done",
            p_last="p_last_done",
            o="o_free",
        )
        rings = self._issue_mmas(context, rings)
        context.barriers["o_free"].wait_for_all(rings.o)

    @cute.jit
    def _issue_mmas(self, context: Context, rings: MmaRings):
        """Issue QK(0), then QK(i + 1) before PV(i); QK(0) of the next tile before the last PV of
        this one.

        Only one tile ahead: the dynamic scheduler keeps two responses, and fetches tile t + 3 when
        every role has read tile t + 1.  The correction reads it after the last MMA of tile t, so
        tiles without steps are skipped after that MMA.
        """
        q_loaded = context.barriers["q_loaded"]
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        scheduler, work = self.skip_empty_tiles(context, scheduler, work, False)
        if work.is_valid:
            q_loaded.wait(rings.q)
            rings = self._qk(context, rings)
        while work.is_valid:
            num_steps = self.num_steps(context, work)
            for step in cutlass.range(1, num_steps, unroll=1):
                rings = self._qk(context, rings)
                rings = self._pv0(context, rings, step > 1)
                rings = self._pv1(context, rings)
            rings.q.advance()
            following = scheduler.advance_to_next_work()
            is_ahead = self.has_steps(context, following)
            if is_ahead:
                q_loaded.wait(rings.q)
                rings = self._qk(context, rings)
            rings = self._pv0(context, rings, num_steps > 1)
            rings = self._pv1(context, rings)
            work = following
            if not is_ahead:
                scheduler, work = self.skip_empty_tiles(context, scheduler, work, False)
                if work.is_valid:
                    q_loaded.wait(rings.q)
                    rings = self._qk(context, rings)
        return rings

    @traced("QK")
    def _qk(self, context: Context, rings: MmaRings) -> MmaRings:
        """S = Q K^T of a step, with the tile's Q, which has been waited for."""
        barriers, smem = context.barriers, context.smem
        barriers["kv_loaded"].wait(rings.kv)
        fence_after_thread_sync()
        q = smem["q"][None, None, rings.q.index].iterator
        k = smem["k"][None, None, rings.kv.index].iterator
        self.qk.issue(tmem_buffer(context.tmem, self.tmem_plan, "s", rings.s), q, k, False)
        barriers["kv_free"].commit(rings.kv)
        rings.kv.advance()
        barriers["s_done"].commit(rings.s)
        rings.s.advance()
        return rings

    @traced("PV0")
    def _pv0(self, context: Context, rings: MmaRings, adds: Boolean) -> MmaRings:
        """O = P V for the first 64 keys of a step; added to O in all steps but a tile's first."""
        barriers = context.barriers
        barriers["kv_loaded"].wait(rings.kv)
        barriers["o_free"].wait(rings.o)
        barriers["p_first_done"].wait(rings.p_first)
        fence_after_thread_sync()
        self.issue_pv(context, self.pv0, rings, rings.p_first, adds)
        rings.p_first.advance()
        return rings

    @traced("PV1")
    def _pv1(self, context: Context, rings: MmaRings) -> MmaRings:
        """O += P V for the other 64 keys of a step."""
        barriers = context.barriers
        barriers["p_last_done"].wait(rings.p_last)
        fence_after_thread_sync()
        self.issue_pv(context, self.pv1, rings, rings.p_last, True)
        barriers["kv_free"].commit(rings.kv)
        rings.kv.advance()
        barriers["o_done"].commit(rings.o)
        rings.o.advance()
        rings.p_last.advance()
        return rings

    def issue_pv(
        self, context: Context, mma: Mma, rings: MmaRings, p_ring: RingState, adds: Boolean | bool
    ) -> None:
        p = tmem_buffer(context.tmem, self.tmem_plan, "p", p_ring)
        v = context.smem["v"][None, None, rings.kv.index].iterator
        mma.issue(tmem_buffer(context.tmem, self.tmem_plan, "o", rings.o), p, v, adds)

    # ------------------------------------------------------------ softmax

    @cute.jit
    def softmax(self, context: Context):
        """S -> P for this CTA's 128 rows, one row per thread; LSE at the tile's end."""
        rings = self.scores.rings()
        softmax = self._softmax(context)
        row_in_block = self.scores.row()
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            query, head = self.query_and_head(context, work, row_in_block)
            row = ScoreRow(work, query, head)
            steps = self._listed_steps if self.lists_steps else self._range_of_steps
            tile_context = self.with_descales(context, work)
            if cutlass.const_expr(tile_context is not context):
                # Its scale is that of the tile.
                softmax = self._softmax(tile_context)
            num_steps, softmax, rings = steps(tile_context, row, softmax, rings)
            self.scores.join_sums(context, softmax, rings)
            inverse, lse = softmax.finish(self.sink_log2(context, work, head))
            if cutlass.const_expr(tile_context is not context):
                inverse = inverse * context.value_descale(work)
            if num_steps > 0:
                rings = self._send_scale(context, inverse, rings)
            if self.scores.sends(query < context.query(work).length):
                self.store_lse(context, work, (query, head), softmax, lse)
            work = scheduler.advance_to_next_work()
        context.barriers["scale_free"].wait_for_all(rings.scale)

    def _softmax(self, context: Context) -> OnlineSoftmax:
        config = self.config
        return OnlineSoftmax.create(
            context.scalars.scale_log2,
            config.ex2_pattern,
            config.rescale_threshold,
            self.p_dtype,
            tracks_largest=self.problem_class.max_logits,
            p_log2=self.p_log2,
        )

    @cute.jit
    def _range_of_steps(
        self, context: Context, row: ScoreRow, softmax: OnlineSoftmax, rings: SoftmaxRings
    ):
        config, by_place = self.config, self.functions.change.by_place
        visibility = context.visibility(row.work, config.block_kv)
        tile = (row.work.block * self.tile_queries, self.tile_queries)
        num_steps = visibility.num_tiles(*tile)
        part = (self.first_row(context, row.work), self.block_queries)
        tiles = visibility.tile_range(tile, part)
        softmax.reset()
        if num_steps > 0:
            # For the first factor; for those that follow, and 1/sum, in the step before.
            context.barriers["scale_free"].wait(rings.scale)
            key = (tiles.end - 1) * config.block_kv
            mask = RangeMask(context.nodes(row.work, row.query))
            for _ in cutlass.range(tiles.num_masked_first, unroll=1):
                softmax, rings = self._step(context, row, key, mask, softmax, rings)[:2]
                key -= config.block_kv
            for _ in cutlass.range(tiles.num_unmasked, unroll=1):
                softmax, rings = self._step(context, row, key, None, softmax, rings)[:2]
                if cutlass.const_expr(by_place):
                    key -= config.block_kv
            if cutlass.const_expr(self.problem_class.mask.hides_first):
                if cutlass.const_expr(not by_place):
                    key -= tiles.num_unmasked * config.block_kv
                for _ in cutlass.range(tiles.num_masked_last, unroll=1):
                    mask = RangeMask(None)
                    softmax, rings = self._step(context, row, key, mask, softmax, rings)[:2]
                    key -= config.block_kv
        return num_steps, softmax, rings

    @cute.jit
    def _listed_steps(
        self, context: Context, row: ScoreRow, softmax: OnlineSoftmax, rings: SoftmaxRings
    ):
        steps = self.step_list(context, row.work)
        num_steps = steps.count
        softmax.reset()
        if num_steps > 0:
            context.barriers["scale_free"].wait(rings.scale)
            bits = self.scores.bits(context, steps)
            for _ in cutlass.range(num_steps, unroll=1):
                key = Int32(0)
                if cutlass.const_expr(self.functions.asks_places):
                    key = bits.kv_tile * self.config.block_kv
                softmax, rings, bits = self._step(context, row, key, bits, softmax, rings)
        return num_steps, softmax, rings

    @traced("softmax")
    @cute.jit
    def _step(
        self,
        context: Context,
        row: ScoreRow,
        key: Int32,
        mask: Any,
        softmax: OnlineSoftmax,
        rings: SoftmaxRings,
    ):
        """Run one step: scores, maximum, exp2, P, row sum. mask: see `StepScores.load`."""
        barriers, size = context.barriers, self.config.fragment_columns
        barriers["s_done"].wait(rings.s)
        fence_after_thread_sync()
        s, address, key = self.scores.places(context, rings, key)
        scores = self.scores.load(context, s, row, key, mask)
        factor = self.scores.update_max(context, softmax, scores, rings)
        rings = self._send_scale(context, factor, rings)
        num_fragments = self.config.softmax_columns // size
        p_columns = size * self.config.element_bytes // FLOAT_BYTES
        fragments = cute.logical_divide(scores, cute.make_layout(size))
        for fragment in cutlass.range_constexpr(num_fragments):
            probabilities = cute.make_rmem_tensor(p_columns, Float32)
            softmax.exponentiate(fragments[None, fragment], probabilities, fragment, num_fragments)
            if cutlass.const_expr(fragment == 1 and self.lists_steps):
                # Loaded where registers of scores are free, and there by the end of the step: ptxas
                # copies what comes earlier, and waits for it to do so.
                mask = mask.next()
            if cutlass.const_expr(fragment == num_fragments // 2):
                # The buffer of what is sent next, a factor or 1/sum, must be free before the next
                # `_send_scale`.  The wait for it stands here to hold back the one for the stores:
                # NOTE [stores hidden by exponentials].
                barriers["scale_free"].wait(rings.scale)
                hand_over(barriers["p_first_done"], rings.s)
                # Or ptxas moves the arrival behind the stores that follow.
                cute.arch.sync_warp()
            tmem_store(probabilities, address + fragment * p_columns)
            if cutlass.const_expr(self.scores.sums_fragments):
                softmax.accumulate_sum(fragments[None, fragment])
        hand_over(barriers["p_last_done"], rings.s)
        if cutlass.const_expr(not self.scores.sums_fragments):
            # Off the critical path: the tensor core already works on P.
            softmax.accumulate_sum(scores)
        rings.s.advance()
        return softmax, rings, mask

    @cute.jit
    def _send_scale(self, context: Context, value: Float32, rings: SoftmaxRings):
        """Hand a value per row to the correction thread of the same row."""
        self.scores.write_scale(context, value, rings)
        context.barriers["scale_done"].arrive(rings.scale)
        rings.scale.advance()
        return rings

    # ------------------------------------------------------------ correction

    @cute.jit
    def correction(self, context: Context):
        """Rescale O when a row maximum grew; at the tile's end scale it by 1/sum and stage it. O
        may be touched from o_done of one step until o_free lets PV of the next begin."""
        barriers, edges = context.barriers, self.edges
        rings = CorrectionRings(
            scale=edges["scale_done"].waiter_state(),
            staged=edges["o_staged"].producer_state(),
            o=edges["o_done"].waiter_state(),
        )
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            num_steps = self.num_steps(context, work)
            if num_steps > 0:
                # The first step's factor has no O to apply to.
                _, rings = self._receive_scale(context, rings)
                for _ in cutlass.range(1, num_steps, unroll=1):
                    factor, rings = self._receive_scale(context, rings)
                    barriers["o_done"].wait(rings.o)
                    if cute.arch.vote_any_sync(factor < Float32(1.0)):
                        rescale(context.warp_lanes + self.tmem_plan["o"].start, factor)
                    barriers["o_free"].arrive(rings.o)
                    rings.o.advance()
                inverse, rings = self._receive_scale(context, rings)
                barriers["o_done"].wait(rings.o)
                rings = self._drain(context, work, inverse, rings)
                rings.o.advance()
            else:
                # No row sees a key.
                query, head = self.query_and_head(context, work, self._row_in_block())
                if query < context.query(work).length:
                    store_zeros(context.result_row(work, query, head))
            work = scheduler.advance_to_next_work()

    @cute.jit
    def _receive_scale(self, context: Context, rings: CorrectionRings):
        """Return the value that the softmax thread of the same row sent."""
        context.barriers["scale_done"].wait(rings.scale)
        value = context.smem["scale"][self._row_in_block(), rings.scale.index]
        context.barriers["scale_free"].arrive(rings.scale)
        rings.scale.advance()
        return value, rings

    def _row_in_block(self) -> Int32:
        return cute.arch.thread_idx()[0] % self.config.block_q

    @traced("drain O")
    @cute.jit
    def _drain(self, context: Context, work: WorkTile, inverse: Float32, rings: CorrectionRings):
        """O / sum to the tile's own Q buffer; o_free as soon as O has left tensor memory.

        With split keys in float32 to global memory, a row by its own thread: shared memory has no
        room for float32, and where keys are split few rows of tiles may exist.  The Q buffer is
        given back all the same.
        """
        config, barriers = self.config, context.barriers
        fence_after_thread_sync()
        row = self._row_in_block()
        if cutlass.const_expr(self.problem_class.split or context.out_gate is not None):
            query, head = self.query_and_head(context, work, row)
            is_row = query < context.query(work).length
        if cutlass.const_expr(self.problem_class.split):
            out = context.result_row(work, query, head)
            slices = cute.logical_divide(out, cute.make_layout(config.o_slice))
        else:
            buffer = context.smem["o"][None, None, rings.staged.index // config.o_slices]
            slices = cute.logical_divide(buffer, (None, cute.make_layout(config.o_slice)))
        for piece in cutlass.range_constexpr(config.o_slices):
            o = context.warp_lanes + (self.tmem_plan["o"].start + piece * config.o_slice)
            values = load_columns(o, config.o_slice)
            if cutlass.const_expr(piece == config.o_slices - 1):
                fence_before_thread_sync()
                barriers["o_free"].arrive(rings.o)
            multiply(values, inverse)
            if cutlass.const_expr(context.out_gate is not None):
                if is_row:
                    begin = piece * config.o_slice
                    gate = context.gate_row(work, query, head)
                    multiply_by_gate(values, gate, neighbours(begin, config.o_slice))
            if cutlass.const_expr(self.problem_class.split):
                if is_row:
                    cute.autovec_copy(values, slices[None, piece])
            else:
                store_rounded(values, slices[row, (None, piece)], config.o_columns)
                # The TMA store reads through the async proxy what was written here.
                cute.arch.fence_view_async_shared()
            barriers["o_staged"].arrive(rings.staged)
            rings.staged.advance()
        return rings

    # ------------------------------------------------------------ epilogue

    @cute.jit
    def epilogue(self, context: Context):
        """Store the staged O with TMA, slice by slice; then give the Q buffer back."""
        config, packed = self.config, self.problem_class.packed_heads
        o: Any = context.tensors.o  # None with split keys
        staged = self.edges["o_staged"].waiter_state()
        q = self.edges["q_free"].producer_state()
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            if self.num_steps(context, work) > 0:
                if cutlass.const_expr(self.problem_class.split):
                    # Stored by the correction; nothing is staged.
                    for _ in cutlass.range_constexpr(config.o_slices):
                        context.barriers["o_staged"].wait(staged)
                        staged.advance()
                else:
                    place = (context.query(work), self.first_row(context, work), None, work.head)
                    from_smem, to_global = output_slices(
                        o, context.smem["o"], q.index, place, config.o_slice, packed
                    )
                    for piece in cutlass.range_constexpr(config.o_slices):
                        context.barriers["o_staged"].wait(staged)
                        cute.copy(o.atom, from_smem[None, piece], to_global[None, piece])
                        cute.arch.cp_async_bulk_commit_group()
                        staged.advance()
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                context.barriers["q_free"].arrive(q)
                q.advance()
            work = scheduler.advance_to_next_work()
        # Shared memory must not go away, nor the grid be reported done, under a store in flight.
        cute.arch.cp_async_bulk_wait_group(0, read=False)
