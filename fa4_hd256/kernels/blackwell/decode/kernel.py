"""The decode kernel: the forward of a few query rows against many keys, by one CTA per tile.

One tile is 16, 32 or 64 query rows, those of all heads that share a KV head, of a few queries; one
step multiplies 128 keys with it, S^T = K Q^T and O^T += V^T P^T.  Why so: `config` NOTE [keys as
M].

Timeline of a CTA; QK(i) makes S(i) from two halves of K, PV(i) adds to both halves of O, last is
the tile's last step, 0' the next tile's first::

    load     K(1) V(0) K(2) V(1) ..   | Q' K(0')  V(last) K(1')  V(0') ..
    mma      QK(1) PV(0) QK(2) PV(1)..| QK(0') PV(last)   QK(1') PV(0') ..
    softmax     S(1)->P(1)  S(2)->P(2)|          O -> global, S(0')->P(0') ..

The tables of roles, barriers, SMEM and TMEM: `python -m fa4_hd256 plan`.

NOTE [the same warps for all].  A row's maximum and sum go over all keys of a step, so over all
threads that have the row; each knows its offset.  So the same warps rescale O, whose lanes are
columns of the head, and store it: o_done says that they may, and P that they have.  With 64 rows
there are two such groups of warps: `config` NOTE [two groups].

NOTE [O leaves from registers].  A lane has one of the head's columns, a warp 32 of them in a row:
stores of a row by a warp are whole sectors without an exchange.

NOTE [packed heads] and NOTE [split keys]: `kernels.forward.common`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import cpasync

from ....schedulers.protocol import WorkTile
from ....softmax_emu.by_key import KeySoftmax, first_row_of_lane, reduce_over_lanes
from ...context import CLAIM_STEPS, KernelParts, schedule, want_next_tile_if
from ...forward.common import ForwardCommon
from ...forward.context import ForwardKernelTensors
from ...forward.decode_rows import (
    BARRIER,
    TileRows,
    any_of_softmax,
    combine_warps,
    sum_of_row,
    synchronise,
)
from ...forward.keys import KvTile
from ...forward.tiles import DECODE_ROWS
from ...limits import HEAD_DIM, WARP_SIZE
from ...operands import SharedMemory, TmaTensor, load_tile
from ...plan.edges import RingState, SharedByReference
from ...problem_class import OptionalTensors, ProblemClass
from ...ranges import traced
from ...rows.sequences import columns_of
from ..instructions import (
    Mma,
    MmaShape,
    OperandLayout,
    fence_after_thread_sync,
    fence_before_thread_sync,
    k_major_operand,
    mn_major_operand,
)
from ..pair_kernel import PairKernel, await_buffer
from ..tmem import multiply_rows, tmem_buffer, tmem_load, tmem_store
from .config import BLOCK_KV, HALF, HALVES, MMA_K, DecodeConfig
from .context import BlackwellDecodeContext as Context
from .context import DecodeLoadRings, DecodeMmaRings, DecodeSoftmaxRings
from .rows import GroupRows

# P^T lies by core matrices of 8 keys x 8 rows, 16 bytes per key: those of neighbouring keys first.
GROUP = 8
CORE_BYTES = 128
GROUP_BYTES = BLOCK_KV // GROUP * CORE_BYTES


def p_layout(keys: int) -> OperandLayout:
    """Return the layout of P^T.  keys: of one instruction."""
    slices = tuple(key // GROUP * CORE_BYTES for key in range(0, BLOCK_KV, keys))
    return OperandLayout(CORE_BYTES, GROUP_BYTES, slices, is_swizzled=False)


class NoState(SharedByReference):
    """Empty state of a kernel that waits for nothing at a tile's start."""


class DecodeKernel(ForwardCommon, PairKernel):
    """The decode kernel for one configuration. config: rows, stages, warps, exp2 pattern.
    problem_class: what of a call is compiled in. parts: see `KernelParts`. Arguments at run time:
    `ForwardCommon.__call__`."""

    context_class: type[Context] = Context
    #: Whether each half of V's columns has a buffer.
    halves_apart = True
    #: Ring of the buffers of K and V that the MMAs read.
    operand_ring = "kv"
    qk: list[Mma]
    pv: list[Mma]
    ctas = 1

    def __init__(
        self, config: DecodeConfig, problem_class: ProblemClass, parts: KernelParts
    ) -> None:
        super().__init__(config, problem_class, parts)
        self.config = config
        self.rows = TileRows(config.rows, problem_class.packed_heads, BLOCK_KV)
        self.group = GroupRows(self.rows, config.softmax_rows, self.functions)
        # Uniform registers do not suffice for 64 rows.
        self.smem_by_symbol = config.rows == max(DECODE_ROWS)
        self.tile_queries, self.load_keys = self.rows.queries, BLOCK_KV
        # Warps of a group of the softmax.
        self.softmax_warps = len(config.warps.softmax) // config.softmax_groups
        self.softmax_threads = self.softmax_warps * WARP_SIZE
        self.make_mmas()

    @property
    def operand_dtype(self) -> Any:
        return self.dtype

    def make_mmas(self) -> None:
        """Set the MMAs of both halves of K's columns, whose results add up, and of V's."""
        rows, is_bf16, ctas = self.config.rows, self.is_bf16, self.ctas
        negate = self.problem_class.negative_scale
        qk = MmaShape(BLOCK_KV, rows, is_bf16, negate_a=negate, ctas=ctas)
        pv = MmaShape(HALF, rows, is_bf16, a_mn_major=True, b_mn_major=True, ctas=ctas)
        q, k, v = k_major_operand(rows), k_major_operand(BLOCK_KV, HALF), mn_major_operand(BLOCK_KV)
        self.qk = [Mma(qk, k, q.part(half, len(HALVES))) for half in HALVES]
        self.pv = [Mma(pv, v, p_layout(MMA_K))] * len(HALVES)

    def kernel_tensors(
        self, operands: tuple[cute.Tensor, ...], lse: cute.Tensor, optional: OptionalTensors
    ) -> ForwardKernelTensors:
        load, (q, k, v, out) = cpasync.CopyBulkTensorTileG2SOp(), operands
        q = self.tma_tensor("q", q, (load, self.config.rows, HEAD_DIM))
        k = self.loaded_tensor("k", k, (load, BLOCK_KV, HALF))
        v = self.loaded_tensor("v", v, (load, BLOCK_KV, HALF))
        return ForwardKernelTensors(q, k, v, None, out, lse, optional)

    def gathering_operation(self) -> Any:
        return cpasync.CopyBulkTensor2DGather4G2SOp()

    def descriptors(self, tensors: ForwardKernelTensors) -> tuple[TmaTensor, ...]:
        return tensors.q, tensors.k, tensors.v

    @cute.jit
    def run_role(self, context: Context, warp: Int32):
        warps = self.config.warps
        if warp < warps.mma:
            self.set_registers(warps.registers_softmax)
            self.softmax(self._of_group(context, warp))
        else:
            self.run_other_role(context, warp)

    @cute.jit
    def run_other_role(self, context: Context, warp: Int32):
        warps = self.config.warps
        self.set_registers(warps.registers_other)
        if warp == warps.mma:
            self.mma(context)
        if warp == warps.load:
            self.load(context)
        if warp == warps.scheduler:
            schedule(self.scheduler, context)

    def _of_group(self, context: Context, warp: Int32) -> Context:
        """Return the context of a warp's group (NOTE [two groups]), with its rows first."""
        rows = self.group.count
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
            warp_lanes=context.warp_lanes + group * rows,
            first_row=group * rows,
            barrier=BARRIER + group,
        )

    def smem(self, memory: SharedMemory) -> dict[str, cute.Tensor]:
        config = self.config
        rows, groups = config.rows, config.rows // GROUP
        core_matrices = cute.make_layout(
            ((GROUP, groups), BLOCK_KV, 1), stride=((1, GROUP * BLOCK_KV), GROUP, rows * BLOCK_KV)
        )
        warps = self.softmax_warps
        shapes = {"maxima": (rows, warps), "sums": (rows, warps), "inverses": (rows, 1)}
        return {
            "q": memory.operand("q", rows, HEAD_DIM, config.q_stages),
            "kv": memory.operand("kv", BLOCK_KV, HALF, config.half_stages),
            "p": cute.make_tensor(memory.region("p", self.operand_dtype, 128), core_matrices),
        } | {
            name: cute.make_tensor(memory.region(name, Float32, 16), cute.make_layout(shape))
            for name, shape in shapes.items()
        }

    def num_steps(self, context: Context, work: WorkTile) -> Int32:
        return self.rows.num_steps(context, work)

    # ------------------------------------------------------------ load

    @cute.jit
    def load(self, context: Context):
        """Load Q and K(0), then K(i + 1) before V(i); Q and K(0) of the next tile before the last
        V of this one.  K and V in halves."""
        rings = DecodeLoadRings.waiting(self.edges, kv="kv_free", q="q_free")
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
                rings = self._load_tile(tile_context, work, following_kv_tile, "k", rings)
                rings = self._load_tile(tile_context, work, kv_tile, "v", rings)
                kv_tile = following_kv_tile
            following = scheduler.advance_to_next_work()
            is_ahead = self.has_steps(context, following)
            if is_ahead:
                rings = self._load_q_and_first_k(context, following, rings)
            rings = self._load_tile(tile_context, work, kv_tile, "v", rings)
            work = following
            if not is_ahead:
                scheduler, work = self.skip_empty_tiles(context, scheduler, work, True)
                if work.is_valid:
                    rings = self._load_q_and_first_k(context, work, rings)
        context.barriers["kv_free"].wait_for_all(rings.kv)
        if cutlass.const_expr(self.edges["q_free"].consumer == "load"):
            context.barriers["q_free"].wait_for_all(rings.q)

    def _load_q_and_first_k(
        self, context: Context, work: WorkTile, rings: DecodeLoadRings
    ) -> DecodeLoadRings:
        kv_tile = self._first_kv_tile(context, work)
        rings = self._load_q(context, work, rings)
        return self._load_tile(context, work, kv_tile, "k", rings)

    def _first_kv_tile(self, context: Context, work: WorkTile) -> KvTile:
        visibility = context.visibility(work, BLOCK_KV)
        return self.keys.first(context, work, visibility, self.rows.first_query(work))

    @traced("load")
    def _load_q(self, context: Context, work: WorkTile, rings: DecodeLoadRings) -> DecodeLoadRings:
        place = context.query(work), self.rows.first_query(work), 0, work.head
        barrier, index = await_buffer(context, "q", rings.q)
        load_tile(context.tensors.q, context.smem["q"], place, barrier, index, self.rows.of_query)
        rings.q.advance()
        return rings

    def _load_tile(
        self, context: Context, work: WorkTile, kv_tile: KvTile, name: str, rings: DecodeLoadRings
    ) -> DecodeLoadRings:
        """Load both halves of the columns of K or V, a buffer each."""
        for half in HALVES:
            rings.kv = self._load_columns(context, work, kv_tile, (name, half), rings.kv)
        return rings

    @traced("load")
    def _load_columns(
        self,
        context: Context,
        work: WorkTile,
        kv_tile: KvTile,
        what: tuple[str, int],
        state: RingState,
    ) -> RingState:
        name, block = what
        head = work.head // context.heads_per_kv
        keys, first_key = self.keys.rows(context, work, kv_tile), self.keys.first_row(kv_tile)
        target = await_buffer(context, "kv", state)
        source = getattr(context.tensors, name)
        self.keys.load(source, context.smem["kv"], (keys, first_key, block, head), target)
        state.advance()
        return state

    # ------------------------------------------------------------ mma

    @cute.jit
    def mma(self, context: Context):
        """Issue QK(0), then QK(i + 1) before PV(i); QK(0) of the next tile before the last PV of
        this one.  QK is added up from the halves of K; of PV each half of V makes a half of O.

        Only one tile ahead: the dynamic scheduler hands out a further tile when every role has
        taken the one before, and the softmax waits for the last MMA of this tile.  So tiles without
        steps are skipped after it.
        """
        rings = DecodeMmaRings.waiting(
            self.edges,
            kv=f"{self.operand_ring}_loaded",
            q="q_loaded",
            s="s_done",
            p="p_done",
            o="o_done",
        )
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        scheduler, work = self.skip_empty_tiles(context, scheduler, work, False)
        if work.is_valid:
            rings = self._first_qk(context, work, rings)
        while work.is_valid:
            num_steps = self.num_steps(context, work)
            for step in cutlass.range(1, num_steps, unroll=1):
                is_last = step + 1 == num_steps
                rings = self._begin_qk(context, rings)
                rings = self._end_qk(context, is_last, rings)
                rings = self._pv(context, step > 1, rings)
            rings = self._leave_q(rings)
            following = scheduler.advance_to_next_work()
            is_ahead = self.has_steps(context, following)
            if is_ahead:
                rings = self._first_qk(context, following, rings)
            rings = self._pv(context, num_steps > 1, rings)
            work = following
            if not is_ahead:
                scheduler, work = self.skip_empty_tiles(context, scheduler, work, False)
                if work.is_valid:
                    rings = self._first_qk(context, work, rings)

    def _first_qk(self, context: Context, work: WorkTile, rings: DecodeMmaRings) -> DecodeMmaRings:
        """QK of a tile's first step, which waits for the tile's Q."""
        rings = self._enter_q(context, rings)
        rings = self._begin_qk(context, rings)
        return self._end_qk(context, self.num_steps(context, work) == 1, rings)

    def _enter_q(self, context: Context, rings: DecodeMmaRings) -> DecodeMmaRings:
        """Wait for a tile's Q.  The only buffer's phase is that of the next tile at once."""
        context.barriers["q_loaded"].wait(rings.q)
        if rings.q.stages == 1:
            rings.q.advance()
        return rings

    def _leave_q(self, rings: DecodeMmaRings) -> DecodeMmaRings:
        if rings.q.stages > 1:
            rings.q.advance()
        return rings

    def _begin_qk(self, context: Context, rings: DecodeMmaRings) -> DecodeMmaRings:
        """S^T = K Q^T of a step, but for the last buffer of K."""
        for number in range(len(self.qk) - 1):
            rings = self._issue_qk(context, number, rings)
        return rings

    @cute.jit
    def _end_qk(self, context: Context, is_last: Boolean, rings: DecodeMmaRings):
        """S^T += K Q^T over the last buffer of K; the tile's last one is done with Q."""
        barriers = context.barriers
        rings = self._issue_qk(context, len(self.qk) - 1, rings)
        barriers["s_done"].commit(rings.s)
        rings.s.advance()
        if is_last:
            barriers["q_free"].commit(rings.q)
        return rings

    @traced("QK")
    def _issue_qk(self, context: Context, number: int, rings: DecodeMmaRings) -> DecodeMmaRings:
        """Issue the MMA of a buffer of K; those behind the first one add up."""
        barriers, ring = context.barriers, self.operand_ring
        barriers[f"{ring}_loaded"].wait(rings.kv)
        fence_after_thread_sync()
        k, q = self._operand(context, rings.kv), smem_buffer(context, "q", rings.q)
        scores = tmem_buffer(context.tmem, self.tmem_plan, "s", rings.s)
        self.qk[number].issue(scores, k, q, number > 0)
        barriers[f"{ring}_free"].commit(rings.kv)
        rings.kv.advance()
        return rings

    def _operand(self, context: Context, state: RingState) -> Any:
        return smem_buffer(context, "kv", state)

    @traced("PV")
    def _pv(self, context: Context, adds: Boolean, rings: DecodeMmaRings) -> DecodeMmaRings:
        barriers, ring = context.barriers, self.operand_ring
        barriers["p_done"].wait(rings.p)
        for half, pv in zip(HALVES, self.pv, strict=True):
            if half == HALVES[0] or self.halves_apart:
                barriers[f"{ring}_loaded"].wait(rings.kv)
            fence_after_thread_sync()
            v, p = self._operand(context, rings.kv), smem_buffer(context, "p", rings.p)
            pv.issue(tmem_buffer(context.tmem, self.tmem_plan, f"o{half}", rings.o), v, p, adds)
            if half == HALVES[-1] or self.halves_apart:
                barriers[f"{ring}_free"].commit(rings.kv)
                rings.kv.advance()
        barriers["o_done"].commit(rings.o)
        rings.o.advance()
        rings.p.advance()
        return rings

    # ------------------------------------------------------------ softmax

    @cute.jit
    def softmax(self, context: Context):
        """S -> P, and all else that a step does, by its threads; O and LSE at the tile's end."""
        rings = DecodeSoftmaxRings(
            s=self.edges["s_done"].waiter_state(),
            # There is no MMA before the first step.
            o=RingState(1, Int32(0), Int32(1)),
        )
        tile_state = self._tile_state()
        softmax = self._create(context)
        thread = self._number_in_group()
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            visibility = context.visibility(work, BLOCK_KV)
            num_steps = self.num_steps(context, work)
            tile = self.rows.first_query(work), self.tile_queries
            tiles = visibility.tile_range(tile, tile)
            softmax.reset()
            if num_steps > 0:
                step = Int32(0)
                key = (tiles.end - 1) * BLOCK_KV + thread
                self._begin_tile(context, softmax, (work, key), tile_state)
                for _ in cutlass.range(tiles.num_masked_first, unroll=1):
                    rings = self._step(context, (softmax, rings, step), (work, key), True)
                    step += 1
                    key -= BLOCK_KV
                for _ in cutlass.range(tiles.num_unmasked, unroll=1):
                    rings = self._step(context, (softmax, rings, step), (work, key), False)
                    step += 1
                    if cutlass.const_expr(self.functions.change.by_place):
                        key -= BLOCK_KV
                if cutlass.const_expr(self.problem_class.mask.hides_first):
                    if cutlass.const_expr(not self.functions.change.by_place):
                        key -= tiles.num_unmasked * BLOCK_KV
                    for _ in cutlass.range(tiles.num_masked_last, unroll=1):
                        rings = self._step(context, (softmax, rings, step), (work, key), True)
                        step += 1
                        key -= BLOCK_KV
                tile_state = self._end_tile(context, tile_state)
            inverses = self._finish(context, softmax, work)
            if num_steps > 0:
                context.barriers["o_done"].wait(rings.o)
                fence_after_thread_sync()
                self._store(context, work, inverses)
            else:
                self._store_zeros(context, work)
            work = scheduler.advance_to_next_work()

    def _create(self, context: Context) -> KeySoftmax:
        return KeySoftmax.create(
            context.scalars.scale_log2,
            self.config.ex2_pattern,
            self.config.rescale_threshold,
            self.dtype,
            self.group.count,
        )

    def _tile_state(self) -> Any:
        """Return the state that `_begin_tile` waits by."""
        return NoState()

    def _begin_tile(
        self, context: Context, softmax: Any, place: tuple[Any, Int32], state: Any
    ) -> None:
        """Start a tile with steps.  place: (tile, this thread's key)."""

    def _end_tile(self, context: Context, state: Any) -> Any:
        """End the steps of a tile; return the next one's state."""
        return state

    def _number_in_group(self) -> Int32:
        """Return the number of this thread in its group, and of its key in a step."""
        thread = cute.arch.thread_idx()[0]
        return thread if self.config.softmax_groups == 1 else thread % self.softmax_threads

    def _load_scores(self, context: Context, softmax: Any, buffer: Int32, work: Any) -> cute.Tensor:
        """Load this thread's key of S."""
        scores = cute.make_rmem_tensor(self.group.count, Float32)
        tmem_load(self._scores(context, buffer), scores, self.group.count)
        cute.arch.fence_view_async_tmem_load()
        return scores

    def _weigh(self, context: Context, softmax: Any, scores: cute.Tensor) -> None:
        """Apply a key's own scale of V to the scores; here there is none."""

    def _store_probabilities(self, context: Context, softmax: Any, scores: cute.Tensor) -> None:
        """P of this thread's key to shared memory, and into the sums."""
        probabilities = cute.make_rmem_tensor(self.group.count, self.dtype)
        softmax.exponentiate(scores, probabilities)
        column = context.smem["p"][None, self._number_in_group(), 0]
        cute.autovec_copy(probabilities, columns_of(column, context.first_row, self.group.count))

    def _load_half(self, context: Context, half: int) -> cute.Tensor:
        values = cute.make_rmem_tensor(self.group.count, Float32)
        tmem_load(self._of_half(context, half), values, self.group.count)
        cute.arch.fence_view_async_tmem_load()
        return values

    def _of_half(self, context: Context, half: int) -> Any:
        return context.warp_lanes + self.tmem_plan[f"o{half}"].start

    @traced("softmax")
    @cute.jit
    def _step(
        self,
        context: Context,
        running: tuple[KeySoftmax, DecodeSoftmaxRings, Int32],
        place: tuple[WorkTile, Int32],
        is_masked: bool,
    ):
        """One score tile: mask, maxima where they move, exp2, P to shared memory, sums. running:
        (softmax, rings, number of the step). place: (tile, this thread's key), the latter right
        where it is used; is_masked: static, some key may be invisible."""
        softmax, rings, step = running
        # Loaded before the wait.
        work, key = place
        nodes = self.group.nodes(context, work, is_masked)
        context.barriers["s_done"].wait(rings.s)
        fence_after_thread_sync()
        scores = self._load_scores(context, softmax, rings.s.index, work)
        if cutlass.const_expr(self.functions.change.exists):
            places = self.group.places(context, work, key, not is_masked)
            self.functions.change.apply(scores, context.scalars.cap_scale, places)
        self._weigh(context, softmax, scores)
        if cutlass.const_expr(is_masked):
            self.group.mask(context, scores, work, key, nodes)
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

    def _scores(self, context: Context, buffer: Int32) -> Any:
        start, distance = self.tmem_plan.buffers("s", self.config.s_stages)
        return context.warp_lanes + (start + buffer * distance)

    @traced("maxima")
    @cute.jit
    def _raise_maxima(self, context: Context, softmax: Any, scores: cute.Tensor, step: Int32):
        """Maxima over all keys of the step; O, if there is any, and sums rescaled."""
        self._share(context, "maxima", scores, cute.arch.fmax)
        shared, rows = context.smem["maxima"], self.config.rows_at_once
        for first in cutlass.range_constexpr(0, self.group.count, rows):
            of_group = cute.local_tile(shared, (rows, self.softmax_warps), (first // rows, 0))
            maxima = combine_warps(
                functools.partial(self._read, of_group), self.softmax_warps, cute.arch.fmax
            )
            factors = cute.make_rmem_tensor(rows, Float32)
            softmax.raise_maxima(maxima, factors, first)
            if step > 0:
                self._rescale(context, factors, first)

    @traced("rescale O")
    def _rescale(self, context: Context, factors: cute.Tensor, first_row: int) -> None:
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
        if first_row + rows == self.group.count:
            # One wait for the stores of all rows.
            cute.arch.fence_view_async_tmem_store()

    def _share(
        self,
        context: Context,
        name: str,
        values: cute.Tensor,
        operation: Callable[[Float32, Float32], Float32],
    ) -> None:
        """Each warp's values, combined over its lanes, to shared memory, for all threads."""
        shared = reduce_over_lanes(values, operation)
        row = first_row_of_lane(self.group.count)
        warp = self._number_in_group() // WARP_SIZE
        for number, value in enumerate(shared):
            # Neighbours that have the same row write the same.
            context.smem[name][row + number, warp] = value
        synchronise(self.softmax_threads, context.barrier)

    @traced("sums")
    @cute.jit
    def _finish(self, context: Context, softmax: Any, work: WorkTile):
        """LSE of each row to global memory; return 1/sum of this thread's rows."""
        self._share(context, "sums", softmax.sums, lambda a, b: a + b)
        row = self._number_in_group()
        if row < self.group.count:
            total = sum_of_row(context, row, self.softmax_warps)
            query, head, exists = self.rows.place(context, work, context.first_row + row)
            inverse, lse = softmax.finish(
                total, softmax.offset_in(row), self.sink_log2(context, work, head)
            )
            context.smem["inverses"][row, 0] = self._scaled_inverse(softmax, inverse)
            if exists:
                self.store_lse(context, work, (query, head), softmax, lse)
        synchronise(self.softmax_threads, context.barrier)
        return self._read(context.smem["inverses"], 0)

    def _scaled_inverse(self, softmax: Any, inverse: Float32) -> Float32:
        """Return the factor of a row of O.  inverse: of its sum."""
        return inverse

    @staticmethod
    def _read(shared: cute.Tensor, column: int) -> cute.Tensor:
        values = cute.make_rmem_tensor(cute.size(shared, mode=[0]), Float32)
        cute.autovec_copy(shared[None, column], values)
        return values

    @traced("store O")
    @cute.jit
    def _store(self, context: Context, work: WorkTile, inverses: cute.Tensor):
        for half in cutlass.range_constexpr(len(HALVES)):
            values = self._load_half(context, half)
            multiply_rows(values, inverses)
            self.group.store(context, work, values, self._column(half))

    def _column(self, half: int) -> Int32:
        return half * HALF + self._number_in_group()

    @cute.jit
    def _store_zeros(self, context: Context, work: WorkTile):
        """Store out = 0 for the rows of a tile that sees no key."""
        zeros = cute.make_rmem_tensor(self.group.count, Float32)
        zeros.fill(0.0)
        for half in cutlass.range_constexpr(len(HALVES)):
            self.group.store(context, work, zeros, self._column(half))


def smem_buffer(context: Context, name: str, state: RingState) -> cute.Pointer:
    """Return the address of a ring's buffer that is in use."""
    index = state.index if state.stages > 1 else 0
    return context.smem[name][None, None, index].iterator
