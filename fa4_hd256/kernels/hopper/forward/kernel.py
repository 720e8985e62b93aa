"""The Hopper forward: out = softmax(scale * Q K^T) V and LSE at head_dim 256.

A CTA works on 128 query rows, of one head or of all heads that share a KV head; two warpgroups on
64 of them each, with S, P and O in registers.  One warp loads.  In a cluster of two the CTAs work
on neighbouring rows, and each loads half of the columns of every K and V tile for both.

Timeline of one CTA; QK(i) makes S(i), PV(i) adds P(i) V(i) to O, 0' is the next tile's first step::

    load          K(0) Q K(1) V(0) K(2) V(1) ..       V(last) K(0') Q' K(1') V(0') ..
    warpgroup 0   QK(0) S(0)->P(0)  QK(1) PV(0)  QK(2) PV(1) ..   PV(last) O -> global  QK(0')
                                          S(1)->P(1)   S(2)->P(2)
    warpgroup 1   the same, for its own rows

A warpgroup issues QK(i + 1) and PV(i) together and makes P(i + 1) while PV(i) runs; nothing ties
the warpgroups together but the buffers, so that one multiplies while the other rounds or stores.

The roles follow in the order in which a tile passes through them: set-up, load, consume (its tiles,
their steps, the softmax, what hides scores), results.  The tables of roles, barriers and SMEM:
`ForwardConfig`; docs/kernels.md.

NOTE [exponentials before the wait].  A warp that waits for its MMAs does nothing else, and ptxas
moves arithmetic across such a wait: half of the exponentials would come after PV, which is there to
hide them.  It does not move them across the loop of an mbarrier wait: that for the next V, which is
there by then, stands between the two.

O leaves from registers (`fragments` NOTE [results leave from registers]), so that Q of the next
tile arrives while the last P of this one is made.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ....schedulers.order import TileOrder
from ....schedulers.protocol import WorkTile
from ....softmax_emu.online import OnlineSoftmax
from ...context import CLAIM_STEPS, schedule, shared_fields
from ...forward.common import ForwardCommon
from ...forward.context import ForwardKernelTensors
from ...functions.kernel_functions import Locate
from ...limits import HEAD_DIM
from ...mask.block_mask import FULL, StepList
from ...mask.masking import TileRange, Visibility
from ...operands import SharedMemory, load_tile
from ...plan.edges import RingState
from ...problem_class import CallScalars, ProblemClass, query_rows
from ...ranges import traced
from ...rows.output_gate import multiply_by_gate
from ..fragments import exchanged_words, rescale, row_columns, store_exchanged, store_float32
from ..instructions import (
    QUAD,
    WgmmaShape,
    commit,
    fence,
    multiply,
    pack,
    row_of_fragment,
    rows_of,
    transposed,
    wait,
)
from .config import WARPGROUP_ROWS, ForwardConfig
from .context import Fragments, HopperForwardContext, RowSoftmax, Running, StepKeys, WarpgroupTile
from .masks import hide_by_bits, hide_by_range, listed_bits, locator

__all__ = ["ForwardKernel"]

ROWS = 2  # of a thread
NO_NODES = (None,) * ROWS


class ForwardKernel(ForwardCommon):
    """The forward kernel for one configuration.

    config: tile shapes, stages, warps, exp2 pattern.  problem_class: what of a call is compiled in.
    scheduler: a class of the `schedulers` protocol.

    Called under `cute.compile`; see `__call__` for the arguments at run time.
    """

    def __init__(self, config: ForwardConfig, problem_class: ProblemClass, scheduler: Any) -> None:
        self.config, self.problem_class = config, problem_class
        self.dtype = problem_class.element_type
        self.scheduler = scheduler
        self.warps, self.edges, self.smem_plan = config.warps, config.edges, config.smem
        # Rows of a query.
        of_query = self.query_rows = query_rows(problem_class.packed_heads, WARPGROUP_ROWS)
        # Queries of a cluster's tile, of a CTA and of a warpgroup.
        self.tile_queries = config.tile_q // of_query
        self.block_queries = config.block_q // of_query
        self.part_queries = WARPGROUP_ROWS // of_query
        self.load_keys = config.block_kv
        self.qk = WgmmaShape(self.dtype, config.block_kv)
        self.pv = WgmmaShape(self.dtype, HEAD_DIM, a_in_registers=True, b_mn_major=True)

    def kernel_tensors(
        self, operands: tuple[cute.Tensor, ...], lse: cute.Tensor, optional: Any
    ) -> ForwardKernelTensors:
        load = cpasync.CopyBulkTensorTileG2SOp()
        boxes = (load, WARPGROUP_ROWS, HEAD_DIM), self.kv_copy(), self.kv_copy()
        q, k, v = (
            self.loaded_tensor(name, view, box)
            for name, view, box in zip("qkv", operands[:3], boxes, strict=True)
        )
        return ForwardKernelTensors(q, k, v, None, operands[3], lse, optional)

    def kv_copy(self) -> tuple[Any, int, int]:
        """Return (operation, rows, columns) of a box of K or V."""
        config = self.config
        operation = (
            cpasync.CopyBulkTensorTileG2SMulticastOp()
            if config.ctas > 1
            else cpasync.CopyBulkTensorTileG2SOp()
        )
        return operation, config.block_kv, HEAD_DIM // config.ctas

    @cute.kernel
    def kernel(
        self,
        tensors: ForwardKernelTensors,
        sizes: tuple[Int32, ...],
        scalars: CallScalars,
        order: TileOrder,
    ):
        self.allow_next()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == self.warps.load:
            self.prefetch_descriptors(tensors)
        context = self.set_up(SmemAllocator(), tensors, sizes, scalars, order)
        cute.arch.mbarrier_init_fence()
        self._synchronise()
        if warp < self.warps.load:
            cute.arch.setmaxregister_increase(self.warps.registers_consumers)
            self.consume(context)
        else:
            cute.arch.setmaxregister_decrease(self.warps.registers_other)
            if cutlass.const_expr(self.gathers):
                if (warp != self.warps.load) & (warp != self.warps.scheduler):
                    self.load(context)
                if warp == self.warps.load:
                    self.load_queries(context)
            elif warp == self.warps.load:
                self.load(context)
            if warp == self.warps.scheduler:
                schedule(self.scheduler, context)
        # Nobody may leave while the peer still signals it.
        if cutlass.const_expr(self.config.ctas > 1):
            self._synchronise()

    def _synchronise(self) -> None:
        if self.config.ctas > 1:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def set_up(
        self,
        allocator: SmemAllocator,
        tensors: ForwardKernelTensors,
        sizes: tuple[Int32, ...],
        scalars: CallScalars,
        order: TileOrder,
    ) -> HopperForwardContext:
        """Lay out shared memory as the plan says and initialise the barriers: `shared_fields`."""
        memory = SharedMemory(allocator, self.smem_plan, self.dtype)
        rank = Int32(0)
        if self.config.ctas > 1:
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        return HopperForwardContext(
            **shared_fields(self, allocator, memory, tensors, sizes, scalars, order),
            cta_rank=rank,
            smem=self._operands(memory),
            **self.context_fields(tensors, sizes),
        )

    @property
    def scheduled_warps(self) -> int:
        """Return the warps of a cluster that run the tile loop."""
        return self.config.ctas * self.warps.scheduled_warps

    def _operands(self, memory: SharedMemory) -> dict[str, cute.Tensor]:
        config = self.config
        rows, ctas = config.block_kv, config.ctas
        buffers = {"q": memory.operand("q", WARPGROUP_ROWS, HEAD_DIM, config.warpgroups)}
        for name, stages in (("k", config.k_stages), ("v", config.v_stages)):
            # Columns lie by blocks, so that half of them are a tile of their own.
            buffers[name] = memory.operand(name, rows, HEAD_DIM // ctas, stages * ctas)
            buffers[f"{name}_tiles"] = memory.operand(name, rows, HEAD_DIM, stages)
        return buffers

    def first_row(
        self, context: HopperForwardContext, work: WorkTile, warpgroup: Int32 | int
    ) -> Int32:
        """The first query of a warpgroup's part of a tile."""
        first = work.block * self.tile_queries + context.cta_rank * self.block_queries
        return first + warpgroup * self.part_queries

    # ------------------------------------------------------------------------------------- load

    @cute.jit
    def load(self, context: HopperForwardContext):
        """Fetch what the MMAs need: K and Q of a tile's first step, then K of a step before V of
        the one before it.  Warps that gather leave Q to `load_queries`."""
        edges = self.edges
        q_free = RingState(1, Int32(0), Int32(1))
        k_free, v_free = edges["k_free"].waiter_state(), edges["v_free"].waiter_state()
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            tile_context = context.of_tile(work)
            visibility = tile_context.visibility(work, self.config.block_kv)
            first_query = work.block * self.tile_queries
            if cutlass.const_expr(self.lists_steps):
                num_steps = self.step_list(context, work).count
            else:
                num_steps = visibility.num_tiles(first_query, self.tile_queries)
            self.claim_if(scheduler, num_steps < CLAIM_STEPS)
            if num_steps > 0:
                position = self.first_kv_tile(tile_context, work, visibility, first_query)
                # Before Q: its buffer is free while the tile before is still worked on.
                k_free = self._load_kv(tile_context, "k", work, position, k_free)
                if cutlass.const_expr(not self.gathers):
                    self._load_q(tile_context, work, q_free)
                for step in cutlass.range(1, num_steps, unroll=1):
                    self.claim_if(scheduler, step + CLAIM_STEPS - 1 == num_steps)
                    following = self.next_kv_tile(position)
                    k_free = self._load_kv(tile_context, "k", work, following, k_free)
                    v_free = self._load_kv(tile_context, "v", work, position, v_free)
                    position = following
                v_free = self._load_kv(tile_context, "v", work, position, v_free)
                q_free.advance()
            work = scheduler.advance_to_next_work()
        # Every buffer must be free before this CTA may exit: its barriers are still signalled.
        for _ in range(self.config.k_stages):
            context.barriers["k_free"].wait(k_free)
            k_free.advance()
        for _ in range(self.config.v_stages):
            context.barriers["v_free"].wait(v_free)
            v_free.advance()

    @cute.jit
    def load_queries(self, context: HopperForwardContext):
        """Fetch Q of each tile, where warps gather K and V."""
        q_free = RingState(1, Int32(0), Int32(1))
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            tile_context = context.of_tile(work)
            visibility = tile_context.visibility(work, self.config.block_kv)
            if visibility.num_tiles(work.block * self.tile_queries, self.tile_queries) > 0:
                self._load_q(tile_context, work, q_free)
                q_free.advance()
            work = scheduler.advance_to_next_work()

    def _load_q(self, context: HopperForwardContext, work: WorkTile, q_free: RingState) -> None:
        """The rows of each warpgroup, once its last MMA with those before is done."""
        loaded = context.barriers["q_loaded"]
        for warpgroup in range(self.config.warpgroups):
            buffer = RingState(1, Int32(warpgroup), q_free.phase)
            context.barriers["q_free"].wait(buffer)
            loaded.expect_bytes(buffer)
            load_tile(
                context.tensors.q,
                context.smem["q"],
                (context.query(work), self.first_row(context, work, warpgroup), 0, work.head),
                loaded.pointer(buffer),
                warpgroup,
                self.query_rows,
            )

    @traced("load")
    @cute.jit
    def _load_kv(
        self,
        context: HopperForwardContext,
        name: str,
        work: WorkTile,
        position: Any,
        state: RingState,
    ):
        """One tile of K or V, or this CTA's columns of it for both CTAs.  position: the KV tile, as
        `first_kv_tile` counts them."""
        loaded = context.barriers[f"{name}_loaded"]
        context.barriers[f"{name}_free"].wait(state)
        if cutlass.const_expr(self.gathers):
            self.gather_kv(context, name, work, position, name, state)
        else:
            loaded.expect_bytes(state)
            head = work.head // context.heads_per_kv
            source = getattr(context.tensors, name)
            keys, row = self.keys(context, work, position), self.first_key(position)
            place = keys, row, context.cta_rank, head
            buffer, mask = state.index, None
            if cutlass.const_expr(self.config.ctas > 1):
                buffer, mask = buffer * 2 + context.cta_rank, Int16(0b11)
            target = loaded.pointer(state), buffer
            self.load_kv(source, context.smem[name], place, target, mask)
        state.advance()
        return state

    # ------------------------------------------------------------------------------------ tiles

    @cute.jit
    def consume(self, context: HopperForwardContext):
        """Q K^T, softmax and P V of the 64 rows of this warpgroup; O and LSE at the tile's end."""
        warpgroup = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4
        # Q of this warpgroup has one buffer, whose number is the warpgroup's.
        q_loaded = RingState(1, warpgroup, Int32(0))
        running = Running(
            (self._softmax(context), self._softmax(context)),
            self.edges["k_loaded"].waiter_state(),
            self.edges["v_loaded"].waiter_state(),
        )
        fragments = self._fragments(context, warpgroup)
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            tile = self._listed_tile if self.lists_steps else self._range_tile
            running, q_loaded = tile(context, fragments, running, work, q_loaded)
            first_row = self.first_row(context, work, warpgroup)
            self._finish(context, fragments, running.softmax, work, first_row)
            work = scheduler.advance_to_next_work()

    def _fragments(self, context: HopperForwardContext, warpgroup: Int32) -> Fragments:
        qk, pv = self.qk, self.pv
        return Fragments(
            p=pv.a_fragment(self.config.block_kv),
            o=pv.accumulator(),
            q=qk.a_operand(context.smem["q"])[None, None, None, warpgroup],
            k=qk.b_operand(context.smem["k_tiles"]),
            v=pv.b_operand(transposed(context.smem["v_tiles"])),
        )

    def _softmax(self, context: HopperForwardContext) -> OnlineSoftmax:
        """The online softmax of one row, which the lanes of a quad share."""
        config = self.config
        return OnlineSoftmax.create(
            context.scalars.scale_log2,
            config.ex2_pattern,
            config.rescale_threshold,
            self.dtype,
            "scalar",
            QUAD,
            self.problem_class.max_logits,
        )

    @cute.jit
    def _range_tile(
        self,
        context: HopperForwardContext,
        fragments: Fragments,
        running: Running,
        work: WorkTile,
        q_loaded: RingState,
    ):
        """Run all steps of a tile; this warpgroup takes part in its own.  Returns (running, state
        of its Q) for the next tile."""
        visibility = context.visibility(work, self.config.block_kv)
        first_query = work.block * self.tile_queries
        num_steps = visibility.num_tiles(first_query, self.tile_queries)
        tile = WarpgroupTile(work, self.first_row(context, work, q_loaded.index), q_loaded)
        tiles, warpgroup_steps = self._warpgroup_tiles(visibility, tile)
        _clear(fragments, running)
        if num_steps > 0:
            last_tile = visibility.last_tile(first_query, self.tile_queries)
            skipped_first = last_tile + 1 - tiles.end
            skipped_last = num_steps - warpgroup_steps - skipped_first
            context.barriers["q_loaded"].wait(q_loaded)
            running = self._skip(context, running, skipped_first)
            if warpgroup_steps > 0:
                running = self._steps(context, fragments, running, tile, tiles)
            else:
                context.barriers["q_free"].arrive(q_loaded)
            running = self._skip(context, running, skipped_last)
            q_loaded.advance()
        return running, q_loaded

    def _warpgroup_tiles(
        self, visibility: Visibility, tile: WarpgroupTile
    ) -> tuple[TileRange, Int32]:
        """Return (KV tiles, their number) that the rows of a warpgroup take part in."""
        first_query = tile.work.block * self.tile_queries
        part = (tile.first_row, self.part_queries)
        if cutlass.const_expr(self.config.skips and not self.problem_class.split):
            tiles, count = visibility.tile_range(part, part), visibility.num_tiles(*part)
            # Without rows or keys of its own it skips all of the tile's.
            last = visibility.last_tile(first_query, self.tile_queries)
            end = cutlass.select_(count > 0, tiles.end, last + 1)
            return TileRange(tiles.begin, end, tiles.unmasked_begin, tiles.unmasked_end), count
        of_tile = (first_query, self.tile_queries)
        return visibility.tile_range(of_tile, part), visibility.num_tiles(*of_tile)

    @cute.jit
    def _skip(self, context: HopperForwardContext, running: Running, count: Int32):
        """Give back K and V of steps that this warpgroup takes no part in."""
        softmax, k_loaded, v_loaded = running
        for _ in cutlass.range(count, unroll=1):
            context.barriers["k_loaded"].wait(k_loaded)
            context.barriers["k_free"].arrive(k_loaded)
            k_loaded.advance()
            context.barriers["v_loaded"].wait(v_loaded)
            context.barriers["v_free"].arrive(v_loaded)
            v_loaded.advance()
        return Running(softmax, k_loaded, v_loaded)

    @cute.jit
    def _steps(
        self,
        context: HopperForwardContext,
        fragments: Fragments,
        running: Running,
        tile: WarpgroupTile,
        tiles: TileRange,
    ):
        """All steps of a tile: QK of a step is issued before PV of the one before it, and runs
        while the softmax of that one does.  tiles: KV tiles of this warpgroup."""
        block, by_place = self.config.block_kv, self.functions.change.by_place
        key, nodes = (tiles.end - 1) * block, self._nodes(context, tile)
        masked, unmasked = tiles.num_masked_first, tiles.num_unmasked
        # Steps behind this one.
        left = masked + unmasked + tiles.num_masked_last - 1
        running = self._first_step(context, fragments, running, tile, StepKeys(key, nodes, left))
        key -= block
        # The kind of the first step.
        was_masked = cutlass.min(masked, 1)
        was_unmasked = (1 - was_masked) * cutlass.min(unmasked, 1)
        was_last = 1 - was_masked - was_unmasked
        for _ in cutlass.range(masked - was_masked, unroll=1):
            left -= 1
            running = self._step(context, fragments, running, tile, StepKeys(key, nodes, left))
            key -= block
        for _ in cutlass.range(unmasked - was_unmasked, unroll=1):
            left -= 1
            running = self._step(context, fragments, running, tile, StepKeys(key, None, left))
            if cutlass.const_expr(by_place):
                key -= block
        if cutlass.const_expr(self.problem_class.mask.hides_first):
            if cutlass.const_expr(not by_place):
                key -= (unmasked - was_unmasked) * block
            for _ in cutlass.range(tiles.num_masked_last - was_last, unroll=1):
                left -= 1
                keys = StepKeys(key, NO_NODES, left)
                running = self._step(context, fragments, running, tile, keys)
                key -= block
        return self._last_pv(context, fragments, running)

    @cute.jit
    def _listed_tile(
        self,
        context: HopperForwardContext,
        fragments: Fragments,
        running: Running,
        work: WorkTile,
        q_loaded: RingState,
    ):
        """Run a tile's steps that a block mask lists; both warpgroups take part in all of them.
        Returns as `_range_tile`."""
        steps, warpgroup = self.step_list(context, work), q_loaded.index
        num_steps = steps.count
        _clear(fragments, running)
        if num_steps > 0:
            context.barriers["q_loaded"].wait(q_loaded)
            left = num_steps - 1
            tile = WarpgroupTile(work, self.first_row(context, work, warpgroup), q_loaded)
            keys = self._listed_keys(steps, Int32(0), warpgroup, left)
            running = self._first_step(context, fragments, running, tile, keys)
            for step in cutlass.range(1, num_steps, unroll=1):
                left -= 1
                keys = self._listed_keys(steps, step, warpgroup, left)
                running = self._step(context, fragments, running, tile, keys)
            running = self._last_pv(context, fragments, running)
            q_loaded.advance()
        return running, q_loaded

    # ------------------------------------------------------------------------------------ steps

    @traced("first step")
    @cute.jit
    def _first_step(
        self,
        context: HopperForwardContext,
        fragments: Fragments,
        running: Running,
        tile: WarpgroupTile,
        keys: StepKeys,
    ):
        """QK and softmax of the first step; O is empty yet."""
        softmax, k_loaded, v_loaded = running
        self._wait_for(context, "k_loaded", k_loaded)
        fence()
        scores = self._issue_qk(fragments, k_loaded)
        wait(0)
        self._give_back_k(context, k_loaded, tile.q_loaded, keys.left)
        k_loaded.advance()
        self._exponentiate(context, scores, softmax, tile, keys)
        self._wait_for(context, "v_loaded", v_loaded)
        pack(scores, fragments.p)
        return Running(softmax, k_loaded, v_loaded)

    @traced("step")
    @cute.jit
    def _step(
        self,
        context: HopperForwardContext,
        fragments: Fragments,
        running: Running,
        tile: WarpgroupTile,
        keys: StepKeys,
    ):
        """QK of a step, PV of the one before, softmax, O rescaled.

        V of a step is waited for at the end of its softmax: NOTE [exponentials before the wait].
        """
        softmax, k_loaded, v_loaded = running
        self._wait_for(context, "k_loaded", k_loaded)
        fence()
        scores = self._issue_qk(fragments, k_loaded)
        self._issue_pv(fragments, v_loaded)
        wait(1)
        self._give_back_k(context, k_loaded, tile.q_loaded, keys.left)
        k_loaded.advance()
        factors = self._exponentiate(context, scores, softmax, tile, keys)
        following = v_loaded.copy()
        following.advance()
        self._wait_for(context, "v_loaded", following)
        wait(0)
        context.barriers["v_free"].arrive(v_loaded)
        # P is free now that PV is done.
        pack(scores, fragments.p)
        rescale(fragments.o, factors)
        return Running(softmax, k_loaded, following)

    def _last_pv(
        self, context: HopperForwardContext, fragments: Fragments, running: Running
    ) -> Running:
        """PV of a tile's last step."""
        fence()
        self._issue_pv(fragments, running.v)
        wait(0)
        context.barriers["v_free"].arrive(running.v)
        running.v.advance()
        return running

    def _wait_for(self, context: HopperForwardContext, loaded: str, state: RingState) -> None:
        """Wait for a tile of K or V, which the MMAs read through the async proxy: TMA writes
        through it, cp.async does not."""
        context.barriers[loaded].wait(state)
        if self.gathers:
            cute.arch.fence_view_async_shared()

    def _issue_qk(self, fragments: Fragments, k_loaded: RingState) -> cute.Tensor:
        """Issue S = Q K^T, a group of its own; S."""
        scores = self.qk.accumulator()
        k = fragments.k[None, None, None, k_loaded.index]
        multiply(self.qk, scores, fragments.q, k, False)
        commit()
        return scores

    def _issue_pv(self, fragments: Fragments, v_loaded: RingState) -> None:
        """Issue O += P V, a group of its own."""
        v = fragments.v[None, None, None, v_loaded.index]
        multiply(self.pv, fragments.o, fragments.p, v, True)
        commit()

    @cute.jit
    def _give_back_k(
        self, context: HopperForwardContext, k_loaded: RingState, q_loaded: RingState, left: Int32
    ):
        """QK of a step is done: K is free, and Q with the tile's last.  left: steps behind it."""
        context.barriers["k_free"].arrive(k_loaded)
        if left == 0:
            context.barriers["q_free"].arrive(q_loaded)

    # ---------------------------------------------------------------------------------- softmax

    @traced("softmax")
    @cute.jit
    def _exponentiate(
        self,
        context: HopperForwardContext,
        scores: cute.Tensor,
        softmax: RowSoftmax,
        tile: WarpgroupTile,
        keys: StepKeys,
    ) -> tuple[Float32, Float32]:
        """S -> P, float32 in place, for both rows of a thread; the factors for O."""
        if cutlass.const_expr(self.problem_class.negative_scale):
            scores.store(-scores.load())
        if cutlass.const_expr(self.functions.change.exists):
            locate = self._locator(tile, keys.first)
            places = self.functions.score_places(context, tile.work, locate, keys.mask is None)
            self.functions.change.apply(scores, context.scalars.cap_scale, places, packed=False)
        if cutlass.const_expr(self.functions.mask_function.exists):
            self._hide_by_function(context, scores, tile, keys)
        factors = []
        for number, row in enumerate(rows_of(scores)):
            if cutlass.const_expr(self.functions.mask_function.exists):
                pass
            elif cutlass.const_expr(self.lists_steps):
                hide_by_bits(row, number, keys.mask, self.config.block_kv)
            elif cutlass.const_expr(keys.mask is not None):
                sizes = self.query_rows, self.config.block_kv
                hide_by_range(context, row, number, tile, keys, sizes)
            factors.append(softmax[number].update_max(row))
            softmax[number].exponentiate(row, None, 0, 1)
            softmax[number].accumulate_sum(row)
        return tuple(factors)

    # ------------------------------------------------------------------------- what hides scores

    def _nodes(self, context: HopperForwardContext, tile: WarpgroupTile) -> tuple[Any, ...]:
        """The words of both rows of a thread, `NO_NODES` where rows have none."""
        rows = (tile.first_row + row_of_fragment(i) // self.query_rows for i in range(ROWS))
        return tuple(context.nodes(tile.work, r) for r in rows) if context.mask.tree else NO_NODES

    def _listed_keys(self, steps: StepList, step: Int32, warpgroup: Int32, left: Int32) -> StepKeys:
        key = Int32(0)
        if self.functions.asks_places:
            key = steps.kv_tile(step) * self.config.block_kv
        if self.functions.mask_function.exists:
            return StepKeys(key, steps.bit_tile(step, Int32(0)), left)
        return StepKeys(key, listed_bits(steps, step, warpgroup), left)

    @cute.jit
    def _hide_by_function(
        self,
        context: HopperForwardContext,
        scores: cute.Tensor,
        tile: WarpgroupTile,
        keys: StepKeys,
    ):
        """Scores of a listed step that a mask_mod does not show := -inf."""
        if keys.mask != FULL:
            places = self.functions.mask_places(context, tile.work, self._locator(tile, keys.first))
            self.functions.mask_function.hide(scores, places, keys.mask)

    def _locator(self, tile: WarpgroupTile, key: Int32) -> Locate:
        """Return (query head, query, key) of the scores of a fragment, by number."""
        rows, packed = self.query_rows, self.problem_class.packed_heads
        return locator(tile, key, self.config.block_kv, rows, packed)

    # ---------------------------------------------------------------------------------- results

    @cute.jit
    def _finish(
        self,
        context: HopperForwardContext,
        fragments: Fragments,
        softmax: RowSoftmax,
        work: WorkTile,
        first_row: Int32,
    ):
        """O / sum and LSE of both rows of a thread to global memory."""
        query_rows = context.query(work)
        # Once: with KV splits it is a division, which the branches below would repeat.
        batch = context.result_batch(work)
        packed, of_query = self.problem_class.packed_heads, self.query_rows
        rows = rows_of(fragments.o)
        for number in cutlass.range_constexpr(ROWS):
            in_part = row_of_fragment(number)
            row = first_row + in_part // of_query
            in_group = in_part % of_query
            if cutlass.const_expr(of_query > packed):
                # Rows past the heads are padding.
                in_group = cutlass.min(in_group, packed - 1)
            head = work.head * packed + in_group
            inverse, lse = softmax[number].finish(self.sink_log2(context, work, head))
            values = rows[number]
            values.store(values.load() * inverse)
            is_row = row < query_rows.length
            if cutlass.const_expr(of_query > packed):
                is_row = is_row & (in_part % of_query < packed)
            if cutlass.const_expr(context.out_gate is not None):
                if is_row:
                    multiply_by_gate(values, context.gate_row(work, row, head), row_columns())
            if is_row:
                if cute.arch.thread_idx()[0] % QUAD == 0:
                    self.store_lse(context, work, (row, head), softmax[number], lse, batch)
            if cutlass.const_expr(self.problem_class.split):
                if is_row:
                    store_float32(values, context.result_row(work, row, head))
            else:
                words = exchanged_words(values, self.dtype)
                if is_row:
                    out = context.result_row(work, row, head)
                    store_exchanged(words, out, self.dtype)


def _clear(fragments: Fragments, running: Running) -> None:
    """Maxima, sums and O of a tile's rows before its first step."""
    for softmax in running.softmax:
        softmax.reset()
    fragments.o.fill(0.0)
