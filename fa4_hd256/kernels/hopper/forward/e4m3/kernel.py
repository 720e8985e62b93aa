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

Here are the loads, the transposers and, of a consuming warpgroup, the loop over tiles and the
softmax; `..warpgroup` has the set-up, the dispatch of warps to roles, the steps of a tile and its
results.  What binds: `config` NOTE [a step in clocks].  V^T and P: `values`.  The tables of roles,
barriers and SMEM: `python -m fa4_hd256 plan --arch sm_90a`.

Scales of Q and K multiply the scores, by the softmax's scale of a tile; V's multiplies O at the
tile's end.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32
from cutlass.cute.nvgpu import cpasync

from .....schedulers.protocol import WorkTile
from .....softmax_emu.online import OnlineSoftmax
from ....context import CLAIM_STEPS, KernelParts, schedule
from ....forward.context import ForwardKernelTensors
from ....limits import HEAD_DIM, SWIZZLE_ALIGNMENT
from ....operands import LoadTarget, SharedMemory, TmaTensor, load_box, smem_layout
from ....plan.edges import RingState
from ....problem_class import OptionalTensors, ProblemClass
from ....ranges import traced
from ...instructions import QUAD, WgmmaShape, rows_of
from ..config import WARPGROUP_ROWS
from ..context import Fragments, RowSoftmax, Running, StepKeys, WarpgroupTile
from ..context import HopperForwardContext as Context
from ..masks import hide_by_range
from ..warpgroup import ResultRow, WarpgroupForward
from .columns import ColumnsKernel
from .config import BLOCK_KV, P_LOG2, WARPGROUPS, E4m3ForwardConfig
from .values import (
    exchanged_pieces,
    lane_columns,
    ordered,
    pack_codes,
    store_float32,
    store_pieces,
    transpose,
)

PAIRS = HEAD_DIM // 2  # of a row's bytes, as TMA has them


class ForwardE4m3Kernel(WarpgroupForward):
    """The kernel for one configuration; arguments at run time: `ForwardCommon.__call__`."""

    q_bytes = kv_bytes = 1
    v_loaded, v_free = "columns_written", "columns_free"
    pack = staticmethod(pack_codes)
    result_row = ResultRow(ordered, lane_columns, store_float32, exchanged_pieces, store_pieces)

    def __init__(
        self, config: E4m3ForwardConfig, problem_class: ProblemClass, parts: KernelParts
    ) -> None:
        super().__init__(config, problem_class, parts)
        # What the load warp waits for before it loads V, or V^T.
        self.buffer_free = "v_free" if config.transposes else "columns_free"
        self.qk = WgmmaShape(Float8E4M3FN, BLOCK_KV)
        self.pv = WgmmaShape(Float8E4M3FN, HEAD_DIM, a_in_registers=True)

    def kernel_tensors(
        self, operands: tuple[cute.Tensor, ...], lse: cute.Tensor, optional: OptionalTensors
    ) -> ForwardKernelTensors:
        load = cpasync.CopyBulkTensorTileG2SOp()
        q = self.loaded_tensor("q", operands[0], (load, WARPGROUP_ROWS, PAIRS))
        k = self.loaded_tensor("k", operands[1], (load, BLOCK_KV, PAIRS))
        if self.config.transposes:
            v = self.loaded_tensor("v", operands[2], (load, BLOCK_KV, PAIRS))
        else:
            box = HEAD_DIM, BLOCK_KV // 2
            columns, layout = (
                _columns(optional.columns),
                cute.select(smem_layout(*box, 1), mode=[0, 1]),
            )
            info = cpasync.make_tiled_tma_atom(load, columns, layout, box)
            v = TmaTensor(info[0], info[1])
        return ForwardKernelTensors(q, k, v, None, operands[3], lse, optional)

    def launch_before(
        self, operands: tuple[cute.Tensor, ...], optional: OptionalTensors, stream: Any
    ) -> None:
        if not self.config.transposes:
            ColumnsKernel().launch(operands[2], _columns(optional.columns), stream)

    @cute.jit
    def run_other_role(self, context: Context, warp: Int32):
        if warp == self.warps.load:
            self.load(context)
        if warp == self.warps.scheduler:
            schedule(self.scheduler, context)
        if cutlass.const_expr(self.config.transposes):
            if (warp != self.warps.load) & (warp != self.warps.scheduler):
                self.transpose(context)

    def _operands(self, memory: SharedMemory) -> dict[str, cute.Tensor]:
        """Return the buffers.

        As TMA loads them, two bytes in an element: "q" (64, 128, warpgroups), the rows of each
        warpgroup, "k" and "v" (128, 128, stages); where V^T is loaded, it is "v", (256, 64,
        stages).  As they are multiplied, of e4m3: "q_codes" (64, 256, warpgroups), "k_codes" (128,
        256, stages) and "columns" (256, 128, stages), V^T with its columns in the order of `values`
        NOTE [columns of O].
        """
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

    # ------------------------------------------------------------------------------------- load

    @cute.jit
    def load(self, context: Context):
        """Fetch K and V of each step, and behind the first K of a tile its Q."""
        edges = self.edges
        q_free = RingState(1, Int32(0), Int32(1))
        k_free, v_free = edges["k_free"].waiter_state(), edges[self.buffer_free].waiter_state()
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            tile_context = context.of_tile(work)
            visibility = tile_context.visibility(work, BLOCK_KV)
            first_query = work.block * self.tile_queries
            num_steps = visibility.num_tiles(first_query, self.tile_queries)
            self.claim_if(scheduler, num_steps < CLAIM_STEPS)
            if num_steps > 0:
                position = self.keys.first(tile_context, work, visibility, first_query)
                # Before Q: its buffer is free while the tile before is still worked on.
                k_free = self._load_k(tile_context, work, position, k_free)
                self._load_q(tile_context, work, q_free)
                v_free = self._load_v(tile_context, work, position, v_free)
                for step in cutlass.range(1, num_steps, unroll=1):
                    self.claim_if(scheduler, step + CLAIM_STEPS - 1 == num_steps)
                    position = self.keys.next(position)
                    k_free = self._load_k(tile_context, work, position, k_free)
                    v_free = self._load_v(tile_context, work, position, v_free)
                q_free.advance()
            work = scheduler.advance_to_next_work()
        # Every buffer must be free before this CTA may exit: its barriers are still signalled.
        context.barriers["k_free"].wait_for_all(k_free)
        context.barriers[self.buffer_free].wait_for_all(v_free)

    @traced("load K")
    @cute.jit
    def _load_k(self, context: Context, work: WorkTile, position: Any, state: RingState):
        loaded = context.barriers["k_loaded"]
        context.barriers["k_free"].wait(state)
        loaded.expect_bytes(state)
        self._load_keys(context, "k", work, position, (loaded.pointer(state), state.index))
        state.advance()
        return state

    @traced("load V")
    @cute.jit
    def _load_v(self, context: Context, work: WorkTile, position: Any, state: RingState):
        loaded = context.barriers["v_loaded" if self.config.transposes else "columns_written"]
        context.barriers[self.buffer_free].wait(state)
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
        self, context: Context, name: str, work: WorkTile, position: Any, target: LoadTarget
    ) -> None:
        head = work.head // context.heads_per_kv
        keys, row = self.keys.rows(context, work, position), self.keys.first_row(position)
        source = getattr(context.tensors, name)
        self.keys.load(source, context.smem[name], (keys, row, Int32(0), head), target)

    # -------------------------------------------------------------------------------- transpose

    @cute.jit
    def transpose(self, context: Context):
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
    def _transpose(self, context: Context, keys: Int32, state: RingState):
        """Transpose one tile; MMAs read it through the async proxy.  state: of V and of V^T."""
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
    def consume(self, context: Context):
        """Q K^T, softmax and P V of the 64 rows of this warpgroup; O and LSE at the tile's end."""
        warpgroup = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4
        # Q of this warpgroup has one buffer, whose number is the warpgroup's.
        q_loaded = RingState(1, warpgroup, Int32(0))
        k = self.edges["k_loaded"].waiter_state()
        columns = self.edges["columns_written"].waiter_state()
        fragments = self._fragments(context, warpgroup)
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            softmax = self._softmax(context, work), self._softmax(context, work)
            running = Running(softmax, k, columns)
            running, q_loaded = self._range_tile(context, fragments, running, work, q_loaded)
            first_row = self.first_row(context, work, warpgroup)
            self._finish(context, fragments, running.softmax, work, first_row)
            k, columns = running.k, running.v
            work = scheduler.advance_to_next_work()

    def _fragments(self, context: Context, warpgroup: Int32) -> Fragments:
        qk, pv = self.qk, self.pv
        return Fragments(
            p=pv.a_fragment(BLOCK_KV),
            o=pv.accumulator(),
            q=qk.a_operand(context.smem["q_codes"])[None, None, None, warpgroup],
            k=qk.b_operand(context.smem["k_codes"]),
            v=pv.b_operand(context.smem["columns"]),
        )

    def _softmax(self, context: Context, work: WorkTile) -> OnlineSoftmax:
        config, scale = self.config, context.scalars.scale_log2
        if not self.problem_class.softcap:
            scale = self._scaled(context, work, scale)
        return OnlineSoftmax.create(
            scale,
            config.ex2_pattern,
            config.rescale_threshold,
            Float8E4M3FN,
            packed=False,
            lanes=QUAD,
            tracks_largest=self.problem_class.max_logits,
            p_log2=P_LOG2,
        )

    def _clear(self, fragments: Fragments, running: Running) -> None:
        """Clear O; the maxima and sums are those of a softmax made for the tile."""
        fragments.o.fill(0.0)

    def _scaled(self, context: Context, work: WorkTile, scale: Float32) -> Float32:
        descale = context.score_descale(work)
        return scale if descale is None else scale * descale

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


def _columns(memory: cute.Tensor) -> cute.Tensor:
    """Return the memory for V^T as (256, 64 pairs of keys, heads, batch x tiles)."""
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
    """Return a region as rows x columns x stages of e4m3, 128 columns to a block: `smem_layout`."""
    block = cute.make_layout((8, 128), stride=(128, 1))
    atom = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, block)
    layout = cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))
    region = memory.region(name, Float8E4M3FN, SWIZZLE_ALIGNMENT)
    pointer = cute.recast_ptr(region, layout.inner, dtype=Float8E4M3FN)
    return cute.make_tensor(pointer, layout.outer)
