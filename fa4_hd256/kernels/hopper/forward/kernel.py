"""The Hopper forward: out = softmax(scale * Q K^T) V and LSE at head_dim 256.

A CTA works on 128 query rows, of one head or of all heads that share a KV head; two warpgroups on
64 of them each, with S, P and O in registers.  One warp loads.  With ctas=2, not the default, the
CTAs of a cluster work on neighbouring rows, and each loads half of the columns of every K and V
tile for both.

Timeline of one CTA; QK(i) makes S(i), PV(i) adds P(i) V(i) to O, 0' is the next tile's first step::

    load          K(0) Q K(1) V(0) K(2) V(1) ..       V(last) K(0') Q' K(1') V(0') ..
    warpgroup 0   QK(0) S(0)->P(0)  QK(1) PV(0)  QK(2) PV(1) ..   PV(last) O -> global  QK(0')
                                          S(1)->P(1)   S(2)->P(2)
    warpgroup 1   the same, for its own rows

Here are the loads and, of a consuming warpgroup, the loop over tiles, the softmax and the masks.
`warpgroup` has the set-up, the dispatch of warps to roles, the steps of a tile and its results.
`python -m fa4_hd256 plan --arch sm_90a` prints roles, barriers and SMEM; docs/kernels.md has the
differences from Blackwell's kernel.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32
from cutlass.cute.nvgpu import cpasync

from ....schedulers.protocol import WorkTile
from ....softmax_emu.online import OnlineSoftmax
from ...context import CLAIM_STEPS, KernelParts, schedule
from ...forward.context import ForwardKernelTensors
from ...functions.kernel_functions import Locate
from ...limits import HEAD_DIM
from ...mask.block_mask import FULL, StepList
from ...operands import SharedMemory
from ...plan.edges import RingState
from ...problem_class import GATE_OF_ELEMENTS, OptionalTensors, ProblemClass
from ...ranges import traced
from ...rows.sequences import by_sequence
from ..fragments import exchanged_words, row_columns, store_exchanged, store_float32
from ..instructions import QUAD, WgmmaShape, pack, rows_of, transposed
from .config import WARPGROUP_ROWS, ForwardConfig
from .context import Fragments, RowSoftmax, Running, StepKeys, WarpgroupTile
from .context import HopperForwardContext as Context
from .masks import hide_by_bits, hide_by_range, listed_bits, locator
from .warpgroup import ResultRow, WarpgroupForward


class ForwardKernel(WarpgroupForward):
    """The forward kernel for one configuration; arguments at run time: `__call__`."""

    pack = staticmethod(pack)
    result_row = ResultRow(
        lambda values: values, row_columns, store_float32, exchanged_words, store_exchanged
    )

    def __init__(
        self, config: ForwardConfig, problem_class: ProblemClass, parts: KernelParts
    ) -> None:
        super().__init__(config, problem_class, parts)
        self.loads_gate = problem_class.out_gate == GATE_OF_ELEMENTS
        self.qk = WgmmaShape(self.dtype, config.block_kv)
        self.pv = WgmmaShape(self.dtype, HEAD_DIM, a_in_registers=True, b_mn_major=True)

    def kernel_tensors(
        self, operands: tuple[cute.Tensor, ...], lse: cute.Tensor, optional: OptionalTensors
    ) -> ForwardKernelTensors:
        load = cpasync.CopyBulkTensorTileG2SOp()
        boxes = (load, WARPGROUP_ROWS, HEAD_DIM), self.kv_copy(), self.kv_copy()
        q, k, v = (
            self.loaded_tensor(name, view, box)
            for name, view, box in zip("qkv", operands[:3], boxes, strict=True)
        )
        gate = None
        if self.loads_gate:
            view = by_sequence(optional.out_gate)
            gate = self.loaded_tensor("q", view, boxes[0])
        return ForwardKernelTensors(q, k, v, None, operands[3], lse, optional, gate=gate)

    def kv_copy(self) -> tuple[Any, int, int]:
        config = self.config
        operation = (
            cpasync.CopyBulkTensorTileG2SMulticastOp()
            if config.ctas > 1
            else cpasync.CopyBulkTensorTileG2SOp()
        )
        return operation, config.block_kv, HEAD_DIM // config.ctas

    @cute.jit
    def run_other_role(self, context: Context, warp: Int32):
        if cutlass.const_expr(self.gathers):
            if (warp != self.warps.load) & (warp != self.warps.scheduler):
                self.load(context)
            if warp == self.warps.load:
                self.load_queries(context)
        elif warp == self.warps.load:
            self.load(context)
        if warp == self.warps.scheduler:
            schedule(self.scheduler, context)

    def _operands(self, memory: SharedMemory) -> dict[str, cute.Tensor]:
        """Return buffers of 16-bit elements: "q" (64, 256, warpgroups), the rows of each warpgroup;
        "k" and "v" (block_kv, 256 / ctas, stages * ctas), as this CTA loads them; "k_tiles" and
        "v_tiles" (block_kv, 256, stages), the same memory as it is multiplied."""
        config = self.config
        rows, ctas = config.block_kv, config.ctas
        buffers = {"q": memory.operand("q", WARPGROUP_ROWS, HEAD_DIM, config.warpgroups)}
        for name, stages in (("k", config.k_stages), ("v", config.v_stages)):
            # Columns lie by blocks, so that half of them are a tile of their own.
            buffers[name] = memory.operand(name, rows, HEAD_DIM // ctas, stages * ctas)
            buffers[f"{name}_tiles"] = memory.operand(name, rows, HEAD_DIM, stages)
        return buffers

    # ------------------------------------------------------------------------------------- load

    @cute.jit
    def load(self, context: Context):
        """Fetch K and Q of a tile's first step, then K of a step before V of the one before."""
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
                position = self.keys.first(tile_context, work, visibility, first_query)
                # Before Q: its buffer is free while the tile before is still worked on.
                k_free = self._load_kv(tile_context, "k", work, position, k_free)
                if cutlass.const_expr(not self.gathers):
                    self._load_q(tile_context, work, q_free)
                for step in cutlass.range(1, num_steps, unroll=1):
                    self.claim_if(scheduler, step + CLAIM_STEPS - 1 == num_steps)
                    following = self.keys.next(position)
                    k_free = self._load_kv(tile_context, "k", work, following, k_free)
                    v_free = self._load_kv(tile_context, "v", work, position, v_free)
                    position = following
                v_free = self._load_kv(tile_context, "v", work, position, v_free)
                q_free.advance()
            if cutlass.const_expr(self.loads_gate and not self.gathers):
                self._load_rows(tile_context, tile_context.tensors.gate, work, q_free)
                q_free.advance()
            work = scheduler.advance_to_next_work()
        # Every buffer must be free before this CTA may exit: its barriers are still signalled.
        context.barriers["k_free"].wait_for_all(k_free)
        context.barriers["v_free"].wait_for_all(v_free)

    @cute.jit
    def load_queries(self, context: Context):
        q_free = RingState(1, Int32(0), Int32(1))
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            tile_context = context.of_tile(work)
            visibility = tile_context.visibility(work, self.config.block_kv)
            if visibility.num_tiles(work.block * self.tile_queries, self.tile_queries) > 0:
                self._load_q(tile_context, work, q_free)
                q_free.advance()
            if cutlass.const_expr(self.loads_gate):
                self._load_rows(tile_context, tile_context.tensors.gate, work, q_free)
                q_free.advance()
            work = scheduler.advance_to_next_work()

    @traced("load")
    @cute.jit
    def _load_kv(
        self, context: Context, name: str, work: WorkTile, position: Any, state: RingState
    ):
        """A tile of K or V, or this CTA's columns for both.  position: as of `KeySource.first`."""
        loaded = context.barriers[f"{name}_loaded"]
        context.barriers[f"{name}_free"].wait(state)
        if cutlass.const_expr(self.gathers):
            self.gather_kv(context, name, work, position, name, state)
        else:
            loaded.expect_bytes(state)
            head = work.head // context.heads_per_kv
            source = getattr(context.tensors, name)
            keys, row = self.keys.rows(context, work, position), self.keys.first_row(position)
            place = keys, row, context.cta_rank, head
            buffer, mask = state.index, None
            if cutlass.const_expr(self.config.ctas > 1):
                buffer, mask = buffer * 2 + context.cta_rank, Int16(0b11)
            target = loaded.pointer(state), buffer
            self.keys.load(source, context.smem[name], place, target, mask)
        state.advance()
        return state

    # ------------------------------------------------------------------------------------ tiles

    @cute.jit
    def consume(self, context: Context):
        """Q K^T, softmax and P V of the 64 rows of this warpgroup; O and LSE at the tile's end."""
        warpgroup = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4
        # Q of this warpgroup has one buffer, whose number is the warpgroup's; so advancing changes
        # the phase alone.
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
            gate = None
            if cutlass.const_expr(self.loads_gate):
                gate = self._take_gate(context, q_loaded)
                q_loaded.advance()
            self._finish(context, fragments, running.softmax, work, first_row, gate)
            work = scheduler.advance_to_next_work()

    def _fragments(self, context: Context, warpgroup: Int32) -> Fragments:
        qk, pv = self.qk, self.pv
        return Fragments(
            p=pv.a_fragment(self.config.block_kv),
            o=pv.accumulator(),
            q=qk.a_operand(context.smem["q"])[None, None, None, warpgroup],
            k=qk.b_operand(context.smem["k_tiles"]),
            v=pv.b_operand(transposed(context.smem["v_tiles"])),
        )

    def _softmax(self, context: Context) -> OnlineSoftmax:
        config = self.config
        return OnlineSoftmax.create(
            context.scalars.scale_log2,
            config.ex2_pattern,
            config.rescale_threshold,
            self.dtype,
            packed=False,
            lanes=QUAD,
            tracks_largest=self.problem_class.max_logits,
        )

    @cute.jit
    def _listed_tile(
        self,
        context: Context,
        fragments: Fragments,
        running: Running,
        work: WorkTile,
        q_loaded: RingState,
    ):
        """Run the steps that a block mask lists, in both warpgroups. Returns as `_range_tile`."""
        steps, warpgroup = self.step_list(context, work), q_loaded.index
        num_steps = steps.count
        self._clear(fragments, running)
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

    # ---------------------------------------------------------------------------------- softmax

    @traced("softmax")
    @cute.jit
    def _exponentiate(
        self,
        context: Context,
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

    def _listed_keys(self, steps: StepList, step: Int32, warpgroup: Int32, left: Int32) -> StepKeys:
        key = Int32(0)
        if self.functions.asks_places:
            key = steps.kv_tile(step) * self.config.block_kv
        if self.functions.mask_function.exists:
            return StepKeys(key, steps.bit_tile(step, Int32(0)), left)
        return StepKeys(key, listed_bits(steps, step, warpgroup), left)

    @cute.jit
    def _hide_by_function(
        self, context: Context, scores: cute.Tensor, tile: WarpgroupTile, keys: StepKeys
    ):
        """Scores of a listed step that a mask_mod does not show := -inf."""
        if keys.mask != FULL:
            places = self.functions.mask_places(context, tile.work, self._locator(tile, keys.first))
            self.functions.mask_function.hide(scores, places, keys.mask)

    def _locator(self, tile: WarpgroupTile, key: Int32) -> Locate:
        rows, packed = self.query_rows, self.problem_class.packed_heads
        return locator(tile, key, self.config.block_kv, rows, packed)
