"""The decode kernel: the forward of a few query rows against many keys, by one CTA per tile.

One tile is 16, 32 or 64 query rows, those of all heads that share a KV head, of a few queries; one
step multiplies 128 keys with it, S^T = K Q^T and O^T += V^T P^T.  Why so: `config` NOTE [keys as
M].

Timeline of a CTA; QK(i) makes S(i) from two halves of K, PV(i) adds to both halves of O, last is
the tile's last step, 0' the next tile's first::

    load     K(1) V(0) K(2) V(1) ..   | Q' K(0')  V(last) K(1')  V(0') ..
    mma      QK(1) PV(0) QK(2) PV(1)..| QK(0') PV(last)   QK(1') PV(0') ..
    softmax     S(1)->P(1)  S(2)->P(2)|          O -> global, S(0')->P(0') ..

The tables of roles, barriers, SMEM and TMEM: `python -m fa4_hd256 plan`; docs/forward.md.

NOTE [the same warps for all].  A row's maximum and sum go over all keys of a step, so over all
threads that have the row; each knows its offset.  So the same warps rescale O, whose lanes are
columns of the head, and store it: o_done says that they may, and P that they have.  With 64 rows
there are two such groups of warps: `config` NOTE [two groups].

NOTE [O leaves from registers].  A lane has one of the head's columns, a warp 32 of them in a row:
stores of a row by a warp are whole sectors without an exchange.

NOTE [packed heads] and NOTE [split keys]: `kernels.forward.common`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ....schedulers import TileOrder, WorkTile
from ....softmax_emu.by_key import KeySoftmax, first_row_of_lane, reduce_over_lanes
from ...forward.common import ForwardCommon
from ...forward.context import ForwardKernelTensors
from ...forward.decode_softmax import BARRIER, DecodeSoftmax, any_of_softmax, synchronise
from ...limits import HEAD_DIM, WARP_SIZE
from ...operands import SharedMemory, TmaTensor, load_tile
from ...plan.edges import RingState
from ...plan.steps import CLAIM_STEPS
from ...problem_class import ProblemClass, query_rows
from ...ranges import traced
from ...rows.pages import PagedTile
from ...rows.views import columns_of
from ...scalars import CallScalars
from ...scheduler_role import schedule, want_next_tile_if
from ..context import claim_buffer
from ..instructions import (
    Mma,
    MmaShape,
    OperandLayout,
    fence_after_thread_sync,
    fence_before_thread_sync,
)
from ..operands import k_major_operand, mn_major_operand
from ..pair_kernel import PairKernel
from ..tmem import multiply_rows, tmem_buffer, tmem_load, tmem_store
from .config import BLOCK_KV, HALF, DecodeConfig
from .context import (
    BlackwellDecodeContext,
    DecodeLoadRings,
    DecodeMmaRings,
    DecodeSoftmaxRings,
)
from .steps import HALVES, MMA_K

__all__ = ["DecodeKernel", "p_layout", "smem_buffer"]

# P^T lies by core matrices of 8 keys x 8 rows, 16 bytes per key: those of neighbouring keys first.
GROUP = 8
CORE_BYTES = 128
GROUP_BYTES = BLOCK_KV // GROUP * CORE_BYTES

#: A KV tile: its number, or where its rows lie.
KvTile: TypeAlias = "Int32 | PagedTile"


def p_layout(keys: int) -> OperandLayout:
    """Return the layout of P^T.  keys: of one instruction."""
    slices = tuple(key // GROUP * CORE_BYTES for key in range(0, BLOCK_KV, keys))
    return OperandLayout(CORE_BYTES, GROUP_BYTES, slices, is_swizzled=False)


class DecodeKernel(ForwardCommon, PairKernel, DecodeSoftmax):
    """The decode kernel for one configuration.

    config: rows, stages, warps, exp2 pattern.  problem_class: what of a call is compiled in.
    scheduler: a class of the `schedulers` protocol for clusters of one CTA; None for that of the
    problem class.  Arguments at run time: `ForwardCommon.__call__`.
    """

    ctas = 1

    def __init__(
        self, config: DecodeConfig, problem_class: ProblemClass, scheduler: Any = None
    ) -> None:
        super().__init__(config, problem_class, scheduler)
        self.config = config
        # Rows of a query, those of padding among them, and queries of a tile.
        self.of_query = query_rows(problem_class.packed_heads, config.rows)
        self.tile_queries = config.rows // self.of_query
        self.load_keys = BLOCK_KV
        self.make_mmas()

    def make_mmas(self) -> None:
        """Set the MMAs of both halves of K's columns, whose results add up, and of V's."""
        rows, is_bf16, ctas = self.config.rows, self.is_bf16, self.ctas
        negate = self.problem_class.negative_scale
        qk = MmaShape(BLOCK_KV, rows, is_bf16, negate_a=negate, ctas=ctas)
        pv = MmaShape(HALF, rows, is_bf16, a_mn_major=True, b_mn_major=True, ctas=ctas)
        q, k, v = k_major_operand(rows), k_major_operand(BLOCK_KV, HALF), mn_major_operand(BLOCK_KV)
        self.qk0, self.qk1 = (Mma(qk, k, q.part(half, len(HALVES))) for half in HALVES)
        self.pv = Mma(pv, v, p_layout(MMA_K))

    def kernel_tensors(
        self, operands: tuple[cute.Tensor, ...], lse: cute.Tensor, optional: Any
    ) -> ForwardKernelTensors:
        """TMA descriptors of Q, K and V, and the plain tensors."""
        load, (q, k, v, out) = cpasync.CopyBulkTensorTileG2SOp(), operands
        q = self.tma_tensor("q", q, (load, self.config.rows, HEAD_DIM))
        k = self.tma_tensor("k", k, (load, BLOCK_KV, HALF))
        v = self.tma_tensor("v", v, (load, BLOCK_KV, HALF))
        return ForwardKernelTensors(q, k, v, None, out, lse, optional)

    def descriptors(self, tensors: ForwardKernelTensors) -> tuple[TmaTensor, ...]:
        return tensors.q, tensors.k, tensors.v

    @cute.jit
    def run_role(self, context: BlackwellDecodeContext, warp: Int32):
        """The role of this warp."""
        warps = self.config.warps
        if warp < warps.mma:
            self.set_registers(warps.registers_softmax)
            self.softmax(self._of_group(context, warp))
        else:
            self.run_other_role(context, warp)

    @cute.jit
    def run_other_role(self, context: BlackwellDecodeContext, warp: Int32):
        """Run the role of a warp without softmax."""
        warps = self.config.warps
        self.set_registers(warps.registers_other)
        if warp == warps.mma:
            self.mma(context)
        if warp == warps.load:
            self.load(context)
        if warp == warps.scheduler:
            schedule(self.scheduler, context)

    def _of_group(self, context: BlackwellDecodeContext, warp: Int32) -> BlackwellDecodeContext:
        """Return the context of a softmax warp's group, `config` NOTE [two groups]: its rows are
        the first of tables and of tensor memory."""
        rows = self.softmax_rows
        if self.config.softmax_groups == 1:
            return context
        group = warp // self.softmax_warps
        tables = {
            name: cute.local_tile(table, (rows, cute.size(table, mode=[1])), (group, 0))
            for name, table in context.smem.items()
            if name in context.of_rows
        }
        return replace(
            context,
            smem=context.smem | tables,
            own_lanes=context.own_lanes + group * rows,
            first_row=group * rows,
            barrier=BARRIER + group,
        )

    def smem(self, memory: SharedMemory) -> dict[str, cute.Tensor]:
        config = self.config
        rows, groups = config.rows, config.rows // GROUP
        core_matrices = cute.make_layout(
            ((GROUP, groups), BLOCK_KV, 1),
            stride=((1, GROUP * BLOCK_KV), GROUP, rows * BLOCK_KV),
        )
        warps = self.softmax_warps
        shapes = {"maxima": (rows, warps), "sums": (rows, warps), "inverses": (rows, 1)}
        return {
            "q": memory.operand("q", rows, HEAD_DIM, config.q_stages),
            "kv": memory.operand("kv", BLOCK_KV, HALF, config.half_stages),
            "p": cute.make_tensor(memory.region("p", self.dtype, 128), core_matrices),
        } | {
            name: cute.make_tensor(memory.region(name, Float32, 16), cute.make_layout(shape))
            for name, shape in shapes.items()
        }

    def set_up(
        self,
        allocator: SmemAllocator,
        tensors: ForwardKernelTensors,
        sizes: tuple[Int32, ...],
        scalars: CallScalars,
        order: TileOrder,
    ) -> BlackwellDecodeContext:
        """`PairKernel.set_up`; with split keys their number is the last of the sizes."""
        common = super().set_up(allocator, tensors, sizes, scalars, order)
        sink, _ = self.sink_and_ragged(tensors.optional)
        num_splits = sizes[3] if self.problem_class.split else None
        return BlackwellDecodeContext(**vars(common), sink=sink, num_splits=num_splits)

    # ------------------------------------------------------------ load

    @cute.jit
    def load(self, context: BlackwellDecodeContext):
        """Load Q and K(0), then K(i + 1) before V(i); Q and K(0) of the next tile before the last
        V of this one.  K and V in halves."""
        rings = DecodeLoadRings.waiting(self.edges, "kv_free", "q_free")
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        scheduler, work = self.skip_empty_tiles(context, scheduler, work, True)
        if work.is_valid:
            rings = self._load_q_and_first_k(context, work, rings)
        while work.is_valid:
            # A look-up of the sequence in each step would take longer than the step's MMAs.
            own_context = context.of_tile(work)
            kv_tile = self._first_kv_tile(own_context, work)
            num_steps = self.num_steps(own_context, work)
            want_next_tile_if(scheduler, num_steps <= CLAIM_STEPS)
            for step in cutlass.range(1, num_steps, unroll=1):
                want_next_tile_if(scheduler, step + CLAIM_STEPS == num_steps)
                following_kv_tile = self.next_kv_tile(kv_tile)
                rings = self._load_halves(own_context, work, following_kv_tile, "k", rings)
                rings = self._load_halves(own_context, work, kv_tile, "v", rings)
                kv_tile = following_kv_tile
            following = scheduler.advance_to_next_work()
            is_ahead = self.has_steps(context, following)
            if is_ahead:
                rings = self._load_q_and_first_k(context, following, rings)
            rings = self._load_halves(own_context, work, kv_tile, "v", rings)
            work = following
            if not is_ahead:
                scheduler, work = self.skip_empty_tiles(context, scheduler, work, True)
                if work.is_valid:
                    rings = self._load_q_and_first_k(context, work, rings)
        context.barriers["kv_free"].wait_for_all(rings.kv)
        context.barriers["q_free"].wait_for_all(rings.q)

    def _load_q_and_first_k(
        self, context: BlackwellDecodeContext, work: WorkTile, rings: DecodeLoadRings
    ) -> DecodeLoadRings:
        """Load what QK(0) of a tile takes."""
        kv_tile = self._first_kv_tile(context, work)
        rings = self._load_q(context, work, rings)
        return self._load_halves(context, work, kv_tile, "k", rings)

    def _first_kv_tile(self, context: BlackwellDecodeContext, work: WorkTile) -> KvTile:
        """Return the KV tile of a tile's first step."""
        visibility = context.visibility(work, BLOCK_KV)
        return self.first_kv_tile(context, work, visibility, self.queries(work)[0])

    @traced("load")
    def _load_q(
        self, context: BlackwellDecodeContext, work: WorkTile, rings: DecodeLoadRings
    ) -> DecodeLoadRings:
        """Load the rows of Q."""
        place = context.query(work), self.queries(work)[0], 0, work.head
        barrier, index = claim_buffer(context, "q", rings.q)
        load_tile(context.tensors.q, context.smem["q"], place, barrier, index, self.of_query)
        rings.q.advance()
        return rings

    def _load_halves(
        self,
        context: BlackwellDecodeContext,
        work: WorkTile,
        kv_tile: KvTile,
        name: str,
        rings: DecodeLoadRings,
    ) -> DecodeLoadRings:
        """Load both halves of the columns of K or V, a buffer each."""
        for half in HALVES:
            rings.kv = self._load_columns(context, work, kv_tile, (name, half), rings.kv)
        return rings

    @traced("load")
    def _load_columns(
        self,
        context: BlackwellDecodeContext,
        work: WorkTile,
        kv_tile: KvTile,
        what: tuple[str, int],
        state: RingState,
    ) -> RingState:
        """Load a buffer of K or V.  what: which of them, and the number of the block of columns."""
        name, block = what
        head = work.head // context.heads_per_kv
        keys, first_key = self.keys(context, work, kv_tile), self.first_key(kv_tile)
        target = claim_buffer(context, "kv", state)
        source = getattr(context.tensors, name)
        self.load_kv(source, context.smem["kv"], (keys, first_key, block, head), target)
        state.advance()
        return state

    # ------------------------------------------------------------ mma

    @cute.jit
    def mma(self, context: BlackwellDecodeContext):
        """Issue QK(0), then QK(i + 1) before PV(i); QK(0) of the next tile before the last PV of
        this one.  QK is added up from the halves of K; of PV each half of V makes a half of O.

        Only one tile ahead: the dynamic scheduler hands out a further tile when every role has
        taken the one before, and the softmax waits for the last MMA of this tile.  So tiles without
        steps are skipped after it.
        """
        waited = "kv_loaded", "q_loaded", "s_done", "p_done", "o_done"
        rings = DecodeMmaRings.waiting(self.edges, *waited)
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        scheduler, work = self.skip_empty_tiles(context, scheduler, work, False)
        if work.is_valid:
            rings = self._first_qk(context, work, rings)
        while work.is_valid:
            num_steps = self.num_steps(context, work)
            for step in cutlass.range(1, num_steps, unroll=1):
                is_last = step + 1 == num_steps
                rings = self._qk0(context, rings)
                rings = self._qk1(context, is_last, rings)
                rings = self._pv0(context, step > 1, rings)
                rings = self._pv1(context, step > 1, rings)
            rings = self._leave_q(rings)
            following = scheduler.advance_to_next_work()
            is_ahead = self.has_steps(context, following)
            if is_ahead:
                rings = self._first_qk(context, following, rings)
            rings = self._pv0(context, num_steps > 1, rings)
            rings = self._pv1(context, num_steps > 1, rings)
            work = following
            if not is_ahead:
                scheduler, work = self.skip_empty_tiles(context, scheduler, work, False)
                if work.is_valid:
                    rings = self._first_qk(context, work, rings)

    def _first_qk(
        self, context: BlackwellDecodeContext, work: WorkTile, rings: DecodeMmaRings
    ) -> DecodeMmaRings:
        """QK of a tile's first step, which waits for the tile's Q."""
        rings = self._enter_q(context, rings)
        rings = self._qk0(context, rings)
        return self._qk1(context, self.num_steps(context, work) == 1, rings)

    def _enter_q(self, context: BlackwellDecodeContext, rings: DecodeMmaRings) -> DecodeMmaRings:
        """Wait for a tile's Q.  The only buffer's phase is that of the next tile at once."""
        context.barriers["q_loaded"].wait(rings.q)
        if rings.q.stages == 1:
            rings.q.advance()
        return rings

    def _leave_q(self, rings: DecodeMmaRings) -> DecodeMmaRings:
        """Advance to the next tile's Q buffer, where there is another one."""
        if rings.q.stages > 1:
            rings.q.advance()
        return rings

    @traced("QK0")
    def _qk0(self, context: BlackwellDecodeContext, rings: DecodeMmaRings) -> DecodeMmaRings:
        """S^T = K Q^T of a step, over the first half of the columns."""
        barriers = context.barriers
        barriers["kv_loaded"].wait(rings.kv)
        fence_after_thread_sync()
        k, q = smem_buffer(context, "kv", rings.kv), smem_buffer(context, "q", rings.q)
        self.qk0.issue(tmem_buffer(context.tmem, self.tmem_plan, "s", rings.s), k, q, False)
        barriers["kv_free"].commit(rings.kv)
        rings.kv.advance()
        return rings

    @traced("QK1")
    @cute.jit
    def _qk1(self, context: BlackwellDecodeContext, is_last: Boolean, rings: DecodeMmaRings):
        """S^T += K Q^T over the other half; the tile's last one is done with Q."""
        barriers = context.barriers
        barriers["kv_loaded"].wait(rings.kv)
        fence_after_thread_sync()
        k, q = smem_buffer(context, "kv", rings.kv), smem_buffer(context, "q", rings.q)
        self.qk1.issue(tmem_buffer(context.tmem, self.tmem_plan, "s", rings.s), k, q, True)
        barriers["kv_free"].commit(rings.kv)
        rings.kv.advance()
        barriers["s_done"].commit(rings.s)
        rings.s.advance()
        if is_last:
            barriers["q_free"].commit(rings.q)
        return rings

    @traced("PV0")
    def _pv0(self, context: BlackwellDecodeContext, adds: Boolean, rings: DecodeMmaRings):
        """The first half of O^T += V^T P^T, which overwrites in a tile's first step."""
        barriers = context.barriers
        barriers["p_done"].wait(rings.p)
        barriers["kv_loaded"].wait(rings.kv)
        fence_after_thread_sync()
        v, p = smem_buffer(context, "kv", rings.kv), smem_buffer(context, "p", rings.p)
        self.pv.issue(tmem_buffer(context.tmem, self.tmem_plan, "o0", rings.o), v, p, adds)
        barriers["kv_free"].commit(rings.kv)
        rings.kv.advance()
        return rings

    @traced("PV1")
    def _pv1(self, context: BlackwellDecodeContext, adds: Boolean, rings: DecodeMmaRings):
        """The second half of O^T += V^T P^T."""
        barriers = context.barriers
        barriers["kv_loaded"].wait(rings.kv)
        fence_after_thread_sync()
        v, p = smem_buffer(context, "kv", rings.kv), smem_buffer(context, "p", rings.p)
        self.pv.issue(tmem_buffer(context.tmem, self.tmem_plan, "o1", rings.o), v, p, adds)
        barriers["kv_free"].commit(rings.kv)
        rings.kv.advance()
        barriers["o_done"].commit(rings.o)
        rings.o.advance()
        rings.p.advance()
        return rings

    # ------------------------------------------------------------ softmax

    def _create(self, context: BlackwellDecodeContext) -> KeySoftmax:
        """The softmax's state."""
        return KeySoftmax.create(
            context.scalars.scale_log2,
            self.config.ex2_pattern,
            self.config.rescale_threshold,
            self.dtype,
            self.softmax_rows,
        )

    def _load_scores(
        self, context: BlackwellDecodeContext, softmax: Any, buffer: Int32, work: Any
    ) -> cute.Tensor:
        """Load this thread's key of S."""
        scores = cute.make_rmem_tensor(self.softmax_rows, Float32)
        tmem_load(self._scores(context, buffer), scores, self.softmax_rows)
        cute.arch.fence_view_async_tmem_load()
        return scores

    def _weigh(self, context: BlackwellDecodeContext, softmax: Any, scores: cute.Tensor) -> None:
        """Apply a key's own scale of V to the scores; here there is none."""

    def _store_probabilities(
        self, context: BlackwellDecodeContext, softmax: Any, scores: cute.Tensor
    ) -> None:
        """P of this thread's key to shared memory, and into the sums."""
        probabilities = cute.make_rmem_tensor(self.softmax_rows, self.dtype)
        softmax.exponentiate(scores, probabilities)
        own = context.smem["p"][None, self._own_key(), 0]
        cute.autovec_copy(probabilities, columns_of(own, context.first_row, self.softmax_rows))

    def _load_half(self, context: BlackwellDecodeContext, half: int) -> cute.Tensor:
        """Load this lane's column of a half of O."""
        values = cute.make_rmem_tensor(self.softmax_rows, Float32)
        tmem_load(self._of_half(context, half), values, self.softmax_rows)
        cute.arch.fence_view_async_tmem_load()
        return values

    def _of_half(self, context: BlackwellDecodeContext, half: int) -> Any:
        """Return the address of this warp's lanes in its rows of a half of O."""
        return context.own_lanes + self.tmem_plan[f"o{half}"].start

    @property
    def softmax_warps(self) -> int:
        return len(self.config.warps.softmax) // self.config.softmax_groups

    @property
    def softmax_rows(self) -> int:
        return self.config.softmax_rows

    def _first_row(self, context: BlackwellDecodeContext) -> Any:
        return context.first_row

    def _own_number(self) -> Int32:
        thread = cute.arch.thread_idx()[0]
        return thread if self.config.softmax_groups == 1 else thread % self.softmax_threads

    def _synchronise(self, context: BlackwellDecodeContext) -> None:
        synchronise(self.softmax_threads, context.barrier)

    @property
    def rows_of_query(self) -> int:
        """Rows of a query, those of padding among them, that a group has."""
        return min(self.of_query, self.softmax_rows)

    def _own_queries(self, context: BlackwellDecodeContext, work: Any) -> tuple[Int32, int]:
        """Return (first query, their number) of a group's rows."""
        first = self.queries(work)[0] + context.first_row // self.of_query
        return first, self.softmax_rows // self.rows_of_query

    def _first_in_group(self, context: BlackwellDecodeContext) -> Any:
        """The first query head with rows in a group, among those that share keys."""
        return context.first_row if self.of_query > self.softmax_rows else 0

    def _step_states(self) -> DecodeSoftmaxRings:
        s_done = self.edges["s_done"].waiter_state()
        # There is no MMA before the first step.
        return DecodeSoftmaxRings(s_done, RingState(1, Int32(0), Int32(1)))

    def _own_key(self) -> Int32:
        return self._own_number()

    @traced("softmax")
    @cute.jit
    def _step(
        self,
        context: BlackwellDecodeContext,
        running: tuple[KeySoftmax, DecodeSoftmaxRings, Int32],
        place: tuple[WorkTile, Int32],
        is_masked: bool,
    ):
        """One score tile: mask, maxima where they move, exp2, P to shared memory, sums.

        running: (softmax, rings, number of the step).  place: (tile, this thread's
        key), the latter right where it is used; is_masked: static, some key may be invisible.
        """
        softmax, rings, step = running
        # Loaded before the wait.
        nodes = self._nodes(context, place[0], is_masked)
        context.barriers["s_done"].wait(rings.s)
        fence_after_thread_sync()
        scores = self._load_scores(context, softmax, rings.s.index, place[0])
        if cutlass.const_expr(self.functions.change.exists):
            places = self._places(context, place, not is_masked)
            self.functions.change.apply(scores, context.scalars.cap_scale, places)
        self._weigh(context, softmax, scores)
        if cutlass.const_expr(is_masked):
            self._mask(context, scores, place, nodes)
        # P and O are this step's from here on.
        context.barriers["o_done"].wait(rings.o)
        if any_of_softmax(softmax.exceeds(scores), self.softmax_threads, context.barrier):
            self._raise_maxima(context, softmax, scores, step)
        self._store_probabilities(context, softmax, scores)
        # The tensor core reads through the async proxy what was written here.
        cute.arch.fence_view_async_shared()
        fence_before_thread_sync()
        context.barriers["p_done"].arrive(rings.o)
        rings.s.advance()
        rings.o.advance()
        return rings

    def _scores(self, context: BlackwellDecodeContext, buffer: Int32) -> Any:
        """Return the address of this warp's lanes in its rows of S."""
        start, distance = self.tmem_plan.buffers("s", self.config.s_stages)
        return context.own_lanes + (start + buffer * distance)

    def _places(
        self, context: BlackwellDecodeContext, place: tuple[WorkTile, Int32], keys_exist: bool
    ) -> Any:
        """Return the places of this thread's scores, one of each row.  place: (tile, key)."""
        work, key = place
        first_query, packed = self._own_queries(context, work)[0], self.problem_class.packed_heads
        first_head, of_query = self._first_in_group(context), self.rows_of_query
        smaller = min if isinstance(first_head, int) else cutlass.min

        def locate(row: int) -> tuple[Int32, Int32, Int32]:
            # Rows past the heads are padding.
            in_group = smaller(first_head + row % of_query, packed - 1)
            return work.head * packed + in_group, first_query + row // of_query, key

        return self.functions.score_places(context, work, locate, keys_exist)

    def _nodes(self, context: BlackwellDecodeContext, work: Any, is_masked: bool) -> Any:
        """The words of a group's queries for a masked step, None where they have none."""
        if not (is_masked and context.mask.tree):
            return None
        first_query, queries = self._own_queries(context, work)
        return [context.nodes(work, first_query + query) for query in range(queries)]

    def _mask(
        self,
        context: BlackwellDecodeContext,
        scores: cute.Tensor,
        place: tuple[WorkTile, Int32],
        nodes: Any,
    ) -> None:
        """The scores of rows that do not see this thread's key, -inf.  place: (tile, key); nodes:
        see `_nodes`."""
        (work, key), of_query = place, self.rows_of_query
        visibility = context.visibility(work, BLOCK_KV)
        first_query, queries = self._own_queries(context, work)
        for query in range(queries):
            row = first_query + query
            is_visible = (key >= visibility.first(row)) & (key < visibility.limit(row))
            if cutlass.const_expr(nodes is not None):
                is_visible = is_visible & visibility.sees_node(key, nodes[query])
            for number in range(query * of_query, (query + 1) * of_query):
                scores[number] = cutlass.select_(is_visible, scores[number], Float32(-math.inf))

    @traced("maxima")
    @cute.jit
    def _raise_maxima(
        self, context: BlackwellDecodeContext, softmax: Any, scores: cute.Tensor, step: Int32
    ):
        """Maxima over all keys of the step; O, if there is any, and sums rescaled."""
        self._share(context, "maxima", scores, cute.arch.fmax)
        shared, rows = context.smem["maxima"], self.config.rows_at_once
        for first in cutlass.range_constexpr(0, self.softmax_rows, rows):
            own = cute.local_tile(shared, (rows, self.softmax_warps), (first // rows, 0))
            maxima = self._combined(own, cute.arch.fmax)
            factors = cute.make_rmem_tensor(rows, Float32)
            softmax.raise_maxima(maxima, factors, first)
            if step > 0:
                self._rescale(context, factors, first)

    @traced("rescale O")
    def _rescale(
        self, context: BlackwellDecodeContext, factors: cute.Tensor, first_row: int
    ) -> None:
        """O *= factor, a row per column of tensor memory, from a row of the group's on."""
        rows = cute.size(factors)
        fence_after_thread_sync()
        for half in HALVES:
            for part in range(0, self.config.columns, self.config.rows):
                address = self._of_half(context, half) + (part + first_row)
                values = cute.make_rmem_tensor(rows, Float32)
                tmem_load(address, values, rows)
                cute.arch.fence_view_async_tmem_load()
                multiply_rows(values, factors)
                tmem_store(values, address)
        if first_row + rows == self.softmax_rows:
            # One wait for the stores of all rows.
            cute.arch.fence_view_async_tmem_store()

    def _share(
        self,
        context: BlackwellDecodeContext,
        name: str,
        values: cute.Tensor,
        operation: Callable[[Float32, Float32], Float32],
    ) -> None:
        """Each warp's values, combined over its lanes, to shared memory, for all threads."""
        found = reduce_over_lanes(values, operation)
        row = first_row_of_lane(self.softmax_rows)
        warp = self._own_number() // WARP_SIZE
        for number, value in enumerate(found):
            # Neighbours that have the same row write the same.
            context.smem[name][row + number, warp] = value
        self._synchronise(context)

    def _store_sums(
        self,
        context: BlackwellDecodeContext,
        running: tuple[KeySoftmax, DecodeSoftmaxRings],
        work: Any,
        inverses: cute.Tensor,
    ) -> None:
        """O of a tile with steps.  running: (softmax, rings)."""
        context.barriers["o_done"].wait(running[1].o)
        fence_after_thread_sync()
        self._store(context, work, inverses)

    @traced("store O")
    @cute.jit
    def _store(self, context: BlackwellDecodeContext, work: Any, inverses: cute.Tensor):
        """O / sum to global memory, in the type of `out`."""
        for half in cutlass.range_constexpr(len(HALVES)):
            values = self._load_half(context, half)
            multiply_rows(values, inverses)
            self._store_half(context, work, values, half)

    @cute.jit
    def _store_half(
        self, context: BlackwellDecodeContext, work: Any, values: cute.Tensor, half: int
    ):
        """A half of the columns of a group's rows, this lane's of each."""
        column = half * HALF + self._own_key()
        first_query, queries = self._own_queries(context, work)
        packed, length = self.problem_class.packed_heads, context.query(work).length
        first_head, of_query = self._first_in_group(context), self.rows_of_query
        for query in cutlass.range_constexpr(queries):
            if first_query + query < length:
                for number in cutlass.range_constexpr(min(packed, of_query)):
                    in_group = first_head + number
                    head = work.head * packed + in_group
                    out = self.result_row(context, work, first_query + query, head)
                    value = values[query * of_query + number].to(out.element_type)
                    if cutlass.const_expr(self.of_query > packed > of_query):
                        # The last group's last rows are padding.
                        if in_group < packed:
                            out[column] = value
                    else:
                        out[column] = value

    @cute.jit
    def _store_zeros(self, context: BlackwellDecodeContext, work: Any):
        """Store out = 0 for the rows of a tile that sees no key."""
        zeros = cute.make_rmem_tensor(self.softmax_rows, Float32)
        zeros.fill(0.0)
        for half in cutlass.range_constexpr(len(HALVES)):
            self._store_half(context, work, zeros, half)


def smem_buffer(context: BlackwellDecodeContext, name: str, state: RingState) -> cute.Pointer:
    """Return the address of a ring's buffer that is in use."""
    index = state.index if state.stages > 1 else 0
    return context.smem[name][None, None, index].iterator
