"""The Hopper forward for Q, K and V in e4m3: out = softmax(scale * Q K^T) V and LSE.

A CTA works on 128 query rows, of one head or of all heads that share a KV head; two warpgroups on
64 of them each, with S, P and O in registers.  One warp loads.  Two transpose V, unless a launch
before the forward has: `config` NOTE [who transposes].

Timeline of one CTA; QK(i) makes S(i), PV(i) adds P(i) V(i) to O, V(i)' is V^T(i)::

    load          K(0) Q V(0) K(1) V(1) K(2) V(2) ..
    transposers            V(0)'     V(1)'     V(2)' ..
    warpgroup 0   QK(0) S(0)->P(0)  QK(1) PV(0)  QK(2) PV(1) ..   PV(last) O -> global  QK(0) ..
                                          S(1)->P(1)   S(2)->P(2)
    warpgroup 1   the same, for its own rows

A warpgroup issues QK(i + 1) and PV(i) together and makes P(i + 1) while PV(i) runs; nothing ties
the warpgroups together but the buffers, so that one multiplies while the other rounds or stores.

The roles follow in the order in which a tile passes through them: set-up, load, transpose, consume
(its tiles, their steps, the softmax, what hides scores), results.  The tables of roles, barriers
and SMEM, and what binds: `E4m3ForwardConfig`; docs/kernels.md.  V^T and P: `values`.

V^T of the next step is waited for before PV of this one, and O leaves from registers: `..kernel`
NOTE [exponentials before the wait], `fragments` NOTE [results leave from registers].

Scales of Q and K multiply the scores, by the softmax's scale of a tile; V's multiplies O at the
tile's end.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from .....schedulers.order import TileOrder
from .....schedulers.protocol import WorkTile
from .....softmax_emu.online import OnlineSoftmax
from ....context import CLAIM_STEPS, schedule, shared_fields
from ....forward.common import ForwardCommon
from ....forward.context import ForwardKernelTensors
from ....limits import HEAD_DIM, SWIZZLE_ALIGNMENT
from ....mask.masking import TileRange, Visibility
from ....operands import (
    LoadTarget,
    SharedMemory,
    TmaTensor,
    load_box,
    load_tile,
    smem_layout,
)
from ....plan.edges import RingState
from ....problem_class import CallScalars, ProblemClass, query_rows
from ....ranges import traced
from ....rows.output_gate import multiply_by_gate
from ...fragments import rescale
from ...instructions import (
    QUAD,
    WgmmaShape,
    commit,
    fence,
    multiply,
    row_of_fragment,
    rows_of,
    wait,
)
from ..config import WARPGROUP_ROWS
from ..context import Fragments, RowSoftmax, Running, StepKeys, WarpgroupTile
from ..masks import hide_by_range
from .columns import ColumnsKernel
from .config import BLOCK_KV, P_LOG2, WARPGROUPS, E4m3ForwardConfig
from .context import E4m3ForwardContext, StepStates
from .values import (
    exchanged_pieces,
    lane_columns,
    ordered,
    pack_codes,
    store_float32,
    store_pieces,
    transpose,
)

__all__ = ["ForwardE4m3Kernel"]

ROWS = 2  # of a thread
NO_NODES = (None,) * ROWS
PAIRS = HEAD_DIM // 2  # of a row's bytes, as TMA has them


class ForwardE4m3Kernel(ForwardCommon):
    """The kernel for one configuration.

    config: stages, warps, exp2 pattern.  problem_class: what of a call is compiled in.
    scheduler: a class of the `schedulers` protocol.

    Called under `cute.compile`; see `ForwardCommon.__call__` for the arguments at run time.
    """

    q_bytes = kv_bytes = 1

    def __init__(
        self, config: E4m3ForwardConfig, problem_class: ProblemClass, scheduler: Any
    ) -> None:
        self.config, self.problem_class = config, problem_class
        self.dtype = problem_class.element_type
        self.scheduler = scheduler
        self.warps, self.edges, self.smem_plan = config.warps, config.edges, config.smem
        # Rows of a query.
        of_query = self.query_rows = query_rows(problem_class.packed_heads, WARPGROUP_ROWS)
        # Queries of a tile, and of a warpgroup.
        self.tile_queries = config.block_q // of_query
        self.part_queries = WARPGROUP_ROWS // of_query
        self.load_keys = BLOCK_KV
        # What the load warp waits for before it loads V, or V^T.
        self.v_free = "v_free" if config.transposes else "columns_free"
        self.qk = WgmmaShape(Float8E4M3FN, BLOCK_KV)
        self.pv = WgmmaShape(Float8E4M3FN, HEAD_DIM, a_in_registers=True)

    def kernel_tensors(
        self, operands: tuple[cute.Tensor, ...], lse: cute.Tensor, optional: Any
    ) -> ForwardKernelTensors:
        load = cpasync.CopyBulkTensorTileG2SOp()
        q = self.loaded_tensor("q", operands[0], (load, WARPGROUP_ROWS, PAIRS))
        k = self.loaded_tensor("k", operands[1], (load, BLOCK_KV, PAIRS))
        if self.config.transposes:
            v = self.loaded_tensor("v", operands[2], (load, BLOCK_KV, PAIRS))
        else:
            box = HEAD_DIM, BLOCK_KV // 2
            columns, layout = _columns(optional), cute.select(smem_layout(*box, 1), mode=[0, 1])
            info = cpasync.make_tiled_tma_atom(load, columns, layout, box)
            v = TmaTensor(info[0], info[1])
        return ForwardKernelTensors(q, k, v, None, operands[3], lse, optional)

    def launch_before(self, operands: tuple[cute.Tensor, ...], optional: Any, stream: Any) -> None:
        """Launch the transposition of V, where no warps of the kernel do it."""
        if not self.config.transposes:
            ColumnsKernel().launch(operands[2], _columns(optional), stream)

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
        cute.arch.sync_threads()
        if warp < self.warps.load:
            cute.arch.setmaxregister_increase(self.warps.registers_consumers)
            self.consume(context)
        else:
            cute.arch.setmaxregister_decrease(self.warps.registers_other)
            if warp == self.warps.load:
                self.load(context)
            if warp == self.warps.scheduler:
                schedule(self.scheduler, context)
            if cutlass.const_expr(self.config.transposes):
                if (warp != self.warps.load) & (warp != self.warps.scheduler):
                    self.transpose(context)

    def set_up(
        self,
        allocator: SmemAllocator,
        tensors: ForwardKernelTensors,
        sizes: tuple[Int32, ...],
        scalars: CallScalars,
        order: TileOrder,
    ) -> E4m3ForwardContext:
        """Lay out shared memory as the plan says and initialise the barriers: `shared_fields`."""
        memory = SharedMemory(allocator, self.smem_plan, self.dtype)
        return E4m3ForwardContext(
            **shared_fields(self, allocator, memory, tensors, sizes, scalars, order),
            cta_rank=Int32(0),
            smem=self._operands(memory),
            **self.context_fields(tensors, sizes),
        )

    @property
    def scheduled_warps(self) -> int:
        return self.warps.scheduled_warps

    def _operands(self, memory: SharedMemory) -> dict[str, cute.Tensor]:
        config = self.config
        v = memory.operand("columns", HEAD_DIM, BLOCK_KV // 2, config.v_stages)
        if config.transposes:
            v = memory.operand("v", BLOCK_KV, PAIRS, config.v_stages)
        return {
            "q": memory.operand("q", WARPGROUP_ROWS, PAIRS, WARPGROUPS),
            "k": memory.operand("k", BLOCK_KV, PAIRS, config.k_stages),
            "v": v,
            "q_codes": _codes(memory, "q", WARPGROUP_ROWS, HEAD_DIM, WARPGROUPS),
            "k_codes": _codes(memory, "k", BLOCK_KV, HEAD_DIM, config.k_stages),
            "columns": _codes(memory, "columns", HEAD_DIM, BLOCK_KV, config.v_stages),
        }

    def first_row(self, work: WorkTile, warpgroup: Int32 | int) -> Int32:
        """The first query of a warpgroup's part of a tile."""
        return work.block * self.tile_queries + warpgroup * self.part_queries

    # ------------------------------------------------------------------------------------- load

    @cute.jit
    def load(self, context: E4m3ForwardContext):
        """Fetch K and V of each step, and behind the first K of a tile its Q."""
        edges = self.edges
        q_free = RingState(1, Int32(0), Int32(1))
        k_free, v_free = edges["k_free"].waiter_state(), edges[self.v_free].waiter_state()
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            tile_context = context.of_tile(work)
            visibility = tile_context.visibility(work, BLOCK_KV)
            first_query = work.block * self.tile_queries
            num_steps = visibility.num_tiles(first_query, self.tile_queries)
            self.claim_if(scheduler, num_steps < CLAIM_STEPS)
            if num_steps > 0:
                position = self.first_kv_tile(tile_context, work, visibility, first_query)
                # Before Q: its buffer is free while the tile before is still worked on.
                k_free = self._load_k(tile_context, work, position, k_free)
                self._load_q(tile_context, work, q_free)
                v_free = self._load_v(tile_context, work, position, v_free)
                for step in cutlass.range(1, num_steps, unroll=1):
                    self.claim_if(scheduler, step + CLAIM_STEPS - 1 == num_steps)
                    position = self.next_kv_tile(position)
                    k_free = self._load_k(tile_context, work, position, k_free)
                    v_free = self._load_v(tile_context, work, position, v_free)
                q_free.advance()
            work = scheduler.advance_to_next_work()
        # Every buffer must be free before this CTA may exit: its barriers are still signalled.
        context.barriers["k_free"].wait_for_all(k_free)
        context.barriers[self.v_free].wait_for_all(v_free)

    def _load_q(self, context: E4m3ForwardContext, work: WorkTile, q_free: RingState) -> None:
        """The rows of each warpgroup, once its last MMA with those before is done."""
        loaded = context.barriers["q_loaded"]
        for warpgroup in range(WARPGROUPS):
            buffer = RingState(1, Int32(warpgroup), q_free.phase)
            context.barriers["q_free"].wait(buffer)
            loaded.expect_bytes(buffer)
            load_tile(
                context.tensors.q,
                context.smem["q"],
                (context.query(work), self.first_row(work, warpgroup), 0, work.head),
                loaded.pointer(buffer),
                warpgroup,
                self.query_rows,
            )

    @traced("load K")
    @cute.jit
    def _load_k(self, context: E4m3ForwardContext, work: WorkTile, position: Any, state: RingState):
        """One tile of K.  position: the KV tile, as `first_kv_tile` counts them."""
        loaded = context.barriers["k_loaded"]
        context.barriers["k_free"].wait(state)
        loaded.expect_bytes(state)
        self._load_keys(context, "k", work, position, (loaded.pointer(state), state.index))
        state.advance()
        return state

    @traced("load V")
    @cute.jit
    def _load_v(self, context: E4m3ForwardContext, work: WorkTile, position: Any, state: RingState):
        """One tile of V, or of V^T where that is in global memory."""
        loaded = context.barriers["v_loaded" if self.config.transposes else "columns_written"]
        context.barriers[self.v_free].wait(state)
        loaded.expect_bytes(state)
        target = loaded.pointer(state), state.index
        if cutlass.const_expr(self.config.transposes):
            self._load_keys(context, "v", work, position, target)
        else:
            tiles = (context.sequences.seqlen_k + BLOCK_KV - 1) // BLOCK_KV
            entry, head = context.batch(work) * tiles + position, work.head // context.heads_per_kv
            tile = context.tensors.v.tensor[None, None, head, entry]
            load_box(context.tensors.v, context.smem["v"], tile, *target)
        state.advance()
        return state

    def _load_keys(
        self,
        context: E4m3ForwardContext,
        name: str,
        work: WorkTile,
        position: Any,
        target: LoadTarget,
    ) -> None:
        head = work.head // context.heads_per_kv
        keys, row = self.keys(context, work, position), self.first_key(position)
        source = getattr(context.tensors, name)
        self.load_kv(source, context.smem[name], (keys, row, Int32(0), head), target)

    # -------------------------------------------------------------------------------- transpose

    @cute.jit
    def transpose(self, context: E4m3ForwardContext):
        """Bring V of each step to V^T, 64 keys a warp: `values` NOTE [V by columns]."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        keys = warp - self.warps.transposers[0]
        state = self.edges["v_loaded"].waiter_state()
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            visibility = context.visibility(work, BLOCK_KV)
            first_query = work.block * self.tile_queries
            num_steps = visibility.num_tiles(first_query, self.tile_queries)
            num_steps = cute.arch.make_warp_uniform(num_steps)
            for _ in cutlass.range(num_steps, unroll=1):
                state = self._transpose(context, keys, state)
            work = scheduler.advance_to_next_work()
        context.barriers["columns_free"].wait_for_all(_as_free(state))

    @traced("transpose V")
    @cute.jit
    def _transpose(self, context: E4m3ForwardContext, keys: Int32, state: RingState):
        """Transpose one tile.  The MMAs read through the async proxy what is written here.  state:
        of V, and of V^T, which has as many buffers."""
        barriers, smem = context.barriers, context.smem
        barriers["v_loaded"].wait(state)
        barriers["columns_free"].wait(_as_free(state))
        source = smem["v"][None, None, state.index].iterator
        target = smem["columns"][None, None, state.index].iterator
        transpose(source, target, keys)
        cute.arch.fence_view_async_shared()
        barriers["columns_written"].arrive(state)
        barriers["v_free"].arrive(state)
        state.advance()
        return state

    # ------------------------------------------------------------------------------------ tiles

    @cute.jit
    def consume(self, context: E4m3ForwardContext):
        """Q K^T, softmax and P V of the 64 rows of this warpgroup; O and LSE at the tile's end."""
        warpgroup = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4
        # Q of this warpgroup has one buffer, whose number is the warpgroup's.
        q_loaded = RingState(1, warpgroup, Int32(0))
        states = StepStates(
            self.edges["k_loaded"].waiter_state(), self.edges["columns_written"].waiter_state()
        )
        fragments = self._fragments(context, warpgroup)
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            running = Running((self._softmax(context, work), self._softmax(context, work)), *states)
            running, q_loaded = self._tile(context, fragments, running, work, q_loaded)
            first_row = self.first_row(work, warpgroup)
            self._finish(context, fragments, running.softmax, work, first_row)
            states = StepStates(running.k, running.v)
            work = scheduler.advance_to_next_work()

    def _fragments(self, context: E4m3ForwardContext, warpgroup: Int32) -> Fragments:
        qk, pv = self.qk, self.pv
        return Fragments(
            p=pv.a_fragment(BLOCK_KV),
            o=pv.accumulator(),
            q=qk.a_operand(context.smem["q_codes"])[None, None, None, warpgroup],
            k=qk.b_operand(context.smem["k_codes"]),
            v=pv.b_operand(context.smem["columns"]),
        )

    def _softmax(self, context: E4m3ForwardContext, work: WorkTile) -> OnlineSoftmax:
        """The online softmax of one row, which the lanes of a quad share, with a tile's scale."""
        config, scale = self.config, context.scalars.scale_log2
        if not self.problem_class.softcap:
            scale = self._scaled(context, work, scale)
        return OnlineSoftmax.create(
            scale,
            config.ex2_pattern,
            config.rescale_threshold,
            Float8E4M3FN,
            "scalar",
            QUAD,
            self.problem_class.max_logits,
            p_log2=P_LOG2,
        )

    def _scaled(self, context: E4m3ForwardContext, work: WorkTile, scale: Float32) -> Float32:
        """Return a scale of scores times the scales of Q and K."""
        descale = context.score_descale(work)
        return scale if descale is None else scale * descale

    @cute.jit
    def _tile(
        self,
        context: E4m3ForwardContext,
        fragments: Fragments,
        running: Running,
        work: WorkTile,
        q_loaded: RingState,
    ):
        """Run all steps of a tile; this warpgroup takes part in its own.  Returns (running, state
        of its Q) for the next tile."""
        visibility = context.visibility(work, BLOCK_KV)
        first_query = work.block * self.tile_queries
        num_steps = visibility.num_tiles(first_query, self.tile_queries)
        tile = WarpgroupTile(work, self.first_row(work, q_loaded.index), q_loaded)
        tiles, warpgroup_steps = self._warpgroup_tiles(visibility, tile)
        fragments.o.fill(0.0)
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
    def _skip(self, context: E4m3ForwardContext, running: Running, count: Int32):
        """Give back K and V^T of steps that this warpgroup takes no part in."""
        softmax, k_loaded, columns_written = running
        for _ in cutlass.range(count, unroll=1):
            context.barriers["k_loaded"].wait(k_loaded)
            context.barriers["k_free"].arrive(k_loaded)
            k_loaded.advance()
            context.barriers["columns_written"].wait(columns_written)
            context.barriers["columns_free"].arrive(columns_written)
            columns_written.advance()
        return Running(softmax, k_loaded, columns_written)

    @cute.jit
    def _steps(
        self,
        context: E4m3ForwardContext,
        fragments: Fragments,
        running: Running,
        tile: WarpgroupTile,
        tiles: TileRange,
    ):
        """All steps of a tile: QK of a step is issued before PV of the one before it, and runs
        while the softmax of that one does.  tiles: KV tiles of this warpgroup."""
        key, nodes = (tiles.end - 1) * BLOCK_KV, self._nodes(context, tile)
        masked, unmasked = tiles.num_masked_first, tiles.num_unmasked
        # Steps behind this one.
        left = masked + unmasked + tiles.num_masked_last - 1
        running = self._first_step(context, fragments, running, tile, StepKeys(key, nodes, left))
        key -= BLOCK_KV
        # The kind of the first step.
        was_masked = cutlass.min(masked, 1)
        was_unmasked = (1 - was_masked) * cutlass.min(unmasked, 1)
        was_last = 1 - was_masked - was_unmasked
        for _ in cutlass.range(masked - was_masked, unroll=1):
            left -= 1
            running = self._step(context, fragments, running, tile, StepKeys(key, nodes, left))
            key -= BLOCK_KV
        for _ in cutlass.range(unmasked - was_unmasked, unroll=1):
            left -= 1
            running = self._step(context, fragments, running, tile, StepKeys(key, None, left))
        if cutlass.const_expr(self.problem_class.mask.hides_first):
            key -= (unmasked - was_unmasked) * BLOCK_KV
            for _ in cutlass.range(tiles.num_masked_last - was_last, unroll=1):
                left -= 1
                keys = StepKeys(key, NO_NODES, left)
                running = self._step(context, fragments, running, tile, keys)
                key -= BLOCK_KV
        return self._last_pv(context, fragments, running)

    # ------------------------------------------------------------------------------------ steps

    @traced("first step")
    @cute.jit
    def _first_step(
        self,
        context: E4m3ForwardContext,
        fragments: Fragments,
        running: Running,
        tile: WarpgroupTile,
        keys: StepKeys,
    ):
        """QK and softmax of the first step; O is empty yet."""
        softmax, k_loaded, columns_written = running
        context.barriers["k_loaded"].wait(k_loaded)
        fence()
        scores = self._issue_qk(fragments, k_loaded)
        wait(0)
        self._give_back_k(context, k_loaded, tile.q_loaded, keys.left)
        k_loaded.advance()
        self._exponentiate(context, scores, softmax, tile, keys)
        context.barriers["columns_written"].wait(columns_written)
        pack_codes(scores, fragments.p)
        return Running(softmax, k_loaded, columns_written)

    @traced("step")
    @cute.jit
    def _step(
        self,
        context: E4m3ForwardContext,
        fragments: Fragments,
        running: Running,
        tile: WarpgroupTile,
        keys: StepKeys,
    ):
        """QK of a step, PV of the one before, softmax, O rescaled."""
        softmax, k_loaded, columns_written = running
        context.barriers["k_loaded"].wait(k_loaded)
        fence()
        scores = self._issue_qk(fragments, k_loaded)
        self._issue_pv(fragments, columns_written)
        wait(1)
        self._give_back_k(context, k_loaded, tile.q_loaded, keys.left)
        k_loaded.advance()
        factors = self._exponentiate(context, scores, softmax, tile, keys)
        following = columns_written.copy()
        following.advance()
        context.barriers["columns_written"].wait(following)
        wait(0)
        context.barriers["columns_free"].arrive(columns_written)
        # P is free now that PV is done.
        pack_codes(scores, fragments.p)
        rescale(fragments.o, factors)
        return Running(softmax, k_loaded, following)

    def _last_pv(
        self, context: E4m3ForwardContext, fragments: Fragments, running: Running
    ) -> Running:
        """PV of a tile's last step."""
        fence()
        self._issue_pv(fragments, running.v)
        wait(0)
        context.barriers["columns_free"].arrive(running.v)
        running.v.advance()
        return running

    def _issue_qk(self, fragments: Fragments, k_loaded: RingState) -> cute.Tensor:
        """Issue S = Q K^T, a group of its own; S."""
        scores = self.qk.accumulator()
        k = fragments.k[None, None, None, k_loaded.index]
        multiply(self.qk, scores, fragments.q, k, False)
        commit()
        return scores

    def _issue_pv(self, fragments: Fragments, columns_written: RingState) -> None:
        """Issue O += P V, a group of its own."""
        v = fragments.v[None, None, None, columns_written.index]
        multiply(self.pv, fragments.o, fragments.p, v, True)
        commit()

    @cute.jit
    def _give_back_k(
        self, context: E4m3ForwardContext, k_loaded: RingState, q_loaded: RingState, left: Int32
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
        context: E4m3ForwardContext,
        scores: cute.Tensor,
        softmax: RowSoftmax,
        tile: WarpgroupTile,
        keys: StepKeys,
    ) -> tuple[Float32, Float32]:
        """S -> P, float32 in place, for both rows of a thread; the factors for O."""
        if cutlass.const_expr(self.problem_class.negative_scale):
            scores.store(-scores.load())
        if cutlass.const_expr(self.functions.change.exists):
            scale = self._scaled(context, tile.work, context.scalars.cap_scale)
            self.functions.change.apply(scores, scale, None, packed=False)
        factors = []
        for number, row in enumerate(rows_of(scores)):
            if cutlass.const_expr(keys.mask is not None):
                hide_by_range(context, row, number, tile, keys, (self.query_rows, BLOCK_KV))
            factors.append(softmax[number].update_max(row))
            softmax[number].exponentiate(row, None, 0, 1)
            softmax[number].accumulate_sum(row)
        return tuple(factors)

    def _nodes(self, context: E4m3ForwardContext, tile: WarpgroupTile) -> tuple[Any, ...]:
        """The words of both rows of a thread, `NO_NODES` where rows have none."""
        rows = (tile.first_row + row_of_fragment(i) // self.query_rows for i in range(ROWS))
        return tuple(context.nodes(tile.work, r) for r in rows) if context.mask.tree else NO_NODES

    # ---------------------------------------------------------------------------------- results

    @cute.jit
    def _finish(
        self,
        context: E4m3ForwardContext,
        fragments: Fragments,
        softmax: RowSoftmax,
        work: WorkTile,
        first_row: Int32,
    ):
        """O / sum and LSE of both rows of a thread to global memory."""
        query_rows, v_scale = context.query(work), context.value_descale(work)
        # Once: with KV splits it is a division, which the branches below would repeat.
        batch = context.result_batch(work)
        packed, of_query = self.problem_class.packed_heads, self.query_rows
        rows = rows_of(fragments.o)
        for number in cutlass.range_constexpr(ROWS):
            in_part = row_of_fragment(number)
            row = first_row + in_part // of_query
            head = work.head * packed + in_part % of_query
            inverse, lse = softmax[number].finish(self.sink_log2(context, work, head))
            if cutlass.const_expr(v_scale is not None):
                inverse = inverse * v_scale
            values = ordered(rows[number])
            values.store(values.load() * inverse)
            is_row = row < query_rows.length
            if cutlass.const_expr(context.out_gate is not None):
                if is_row:
                    multiply_by_gate(values, context.gate_row(work, row, head), lane_columns())
            if is_row:
                if cute.arch.thread_idx()[0] % QUAD == 0:
                    self.store_lse(context, work, (row, head), softmax[number], lse, batch)
            if cutlass.const_expr(self.problem_class.split):
                if is_row:
                    store_float32(values, context.result_row(work, row, head))
            else:
                pieces = exchanged_pieces(values, self.dtype)
                if is_row:
                    store_pieces(pieces, context.result_row(work, row, head), self.dtype)


def _columns(optional: Any) -> cute.Tensor:
    """Return the memory for V^T as (256, 64 pairs of keys, heads, batch x tiles); it is the last of
    what a call has that needs it."""
    memory = tuple(optional)[-1]
    entries, heads, _, _ = memory.shape
    rows, pairs = HEAD_DIM, BLOCK_KV // 2
    layout = cute.make_layout(
        (rows, pairs, heads, entries), stride=(pairs, 1, rows * pairs, heads * (rows * pairs))
    )
    return cute.make_tensor(memory.iterator.align(16), layout)


def _as_free(loaded: RingState) -> RingState:
    """Return the state of who waits for a ring's free buffers, at the place in it of one who waits
    for its full ones: the phase before."""
    return RingState(loaded.stages, loaded.index, loaded.phase ^ 1)


def _codes(memory: SharedMemory, name: str, rows: int, columns: int, stages: int) -> cute.Tensor:
    """Return a region as rows x columns x stages of e4m3, an operand of wgmma: as
    `operands.smem_layout` has it, with 128 columns to a block."""
    block = cute.make_layout((8, 128), stride=(128, 1))
    atom = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, block)
    layout = cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))
    region = memory.region(name, Float8E4M3FN, SWIZZLE_ALIGNMENT)
    pointer = cute.recast_ptr(region, layout.inner, dtype=Float8E4M3FN)
    return cute.make_tensor(pointer, layout.outer)
