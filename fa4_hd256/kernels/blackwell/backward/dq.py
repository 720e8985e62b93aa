"""The dQ kernel: dQ = softmax_scale dS K at head_dim 256, by CTA pairs.

One tile is 256 query rows of one head; one step multiplies it with 128 keys.  Each CTA owns 128
rows, with their Q, dO, S, dP and dQ.  K is needed in two halves that a pair cannot share: as B of
S = Q K^T a CTA holds 64 keys x 256, as B of dQ = dS K it holds 128 keys x 128 columns
(NOTE [two halves of K]).

Timeline of one CTA (the MMA warp is the leader's); last is the tile's last step, 0' the next
tile's first::

    load      K(1) Kc(0) V(1)  ..  | Q' K(0') Kc(last) dO' V(0') ...
    mma       S(1) dQ(0) dP(1) ..  | S(0')    dQ(last) dP(0') ...
    gradient  P(1) dS(1)       ..  | P(0')    dQ -> global, dS(0') ...

S(i+1) is issued as soon as S(i) is in registers, so the exp2 of a step has the time of two
products, and the arithmetic of dS that of one.  dQ leaves straight from registers while dP(0') is
computed.

NOTE [two halves of K].  The tensor core of a pair takes the same descriptor offsets in both CTAs,
half of B's N from each.  For S, N are the keys and the reduction runs over the columns: at one
offset the CTAs hold different keys and the same columns.  For dQ, N are the columns: the same keys
and different columns.  No byte of K can serve both, so each CTA loads 64 KiB of K a step.

NOTE [dS over dP].  dS(i) lies over dP(i); dP(i+1), which writes the same columns, is issued after
dQ(i), which reads them, by the same thread, and the MMAs of a pair execute in issue order.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from fa4_hd256.kernels.blackwell.instructions import (
    MmaShape,
    TmemOperand,
    fence_after_thread_sync,
    fence_before_thread_sync,
    mma_chain,
)
from fa4_hd256.kernels.blackwell.operands import k_major_operand, mn_major_operand
from fa4_hd256.kernels.blackwell.pair_plan import BLOCK_KV, BLOCK_Q, TILE_Q
from fa4_hd256.kernels.blackwell.tmem import multiply, tmem_load, tmem_store
from fa4_hd256.kernels.limits import HEAD_DIM
from fa4_hd256.kernels.ranges import traced
from fa4_hd256.kernels.views import columns_of
from schedulers import TileProblem, section_heads_for

from .common import FRAGMENT, BackwardKernel, score_gradients, store_row, zeros

__all__ = ["DqKernel"]

OWN_KEYS = BLOCK_KV // 2  # keys of a step that one warpgroup works on, and that a CTA loads for S
OWN_COLUMNS = HEAD_DIM // 2  # columns of dQ that one warpgroup drains


class DqKernel(BackwardKernel):
    """The dQ kernel for one configuration; arguments of a call: `BackwardKernel.__call__`."""

    boxes = {
        "q": (0, BLOCK_Q, HEAD_DIM),
        "k": (1, OWN_KEYS, HEAD_DIM),
        "k_columns": (1, BLOCK_KV, HEAD_DIM // 2),
        "v": (2, OWN_KEYS, HEAD_DIM),
        "dout": (3, BLOCK_Q, HEAD_DIM),
    }

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        is_bf16, negate = self.is_bf16, self.problem_class.negative_scale
        self.s_shape = MmaShape(TILE_Q, BLOCK_KV, is_bf16, negate_a=negate)
        self.dp_shape = MmaShape(TILE_Q, BLOCK_KV, is_bf16)
        self.dq_shape = MmaShape(TILE_Q, HEAD_DIM, is_bf16, b_mn_major=True)
        self.rows_layout = k_major_operand(BLOCK_Q)
        self.keys_layout = k_major_operand(OWN_KEYS)
        self.columns_layout = mn_major_operand(BLOCK_KV)
        # dS of the two warpgroups lies at either half of dP.
        half = TmemOperand.contiguous(OWN_KEYS).step_columns
        self.ds_layout = TmemOperand((*half, *(OWN_KEYS + column for column in half)))

    def problem(self, scalars: Any, operands: tuple, batch: Any) -> TileProblem:
        """The tiles: 256 query rows of a head each."""
        q, k = operands
        heads = cute.size(q, mode=[2])
        return TileProblem(
            (scalars.max_seqlen_q + TILE_Q - 1) // TILE_Q,
            heads,
            batch,
            section_heads_for(
                num_heads_per_kv=heads // cute.size(k, mode=[2]),
                num_pairs=heads * batch,
                kv_bytes_per_head=cutlass.min(cute.size(k, mode=[0]), 1 << 20) * (4 * HEAD_DIM),
                l2_bytes=scalars.l2_bytes,
                unequal_lengths=self.problem_class.has_unequal_tiles,
            ),
            later_blocks_first=self.problem_class.bounded_right,
        )

    def smem(self, memory: Any) -> dict[str, cute.Tensor]:
        stages = self.plan.ring_stages
        return {
            "q": memory.operand("q", BLOCK_Q, HEAD_DIM, 1),
            "dout": memory.operand("dout", BLOCK_Q, HEAD_DIM, 1),
            "keys": memory.operand("ring", OWN_KEYS, HEAD_DIM, stages),
            "columns": memory.operand("ring", BLOCK_KV, HEAD_DIM // 2, stages),
        }

    def num_steps(self, context: Any, work: Any) -> Int32:
        """KV tiles that some row of the tile sees."""
        return context.visibility(work, BLOCK_KV).num_tiles(work.block * TILE_Q, TILE_Q)

    def first_row(self, context: Any, work: Any) -> Int32:
        """The first query row of this CTA's half of a tile."""
        return work.block * TILE_Q + context.cta_rank * BLOCK_Q

    def last_kv_tile(self, context: Any, work: Any) -> Int32:
        """The KV tile that is worked on first."""
        return context.visibility(work, BLOCK_KV).last_tile(work.block * TILE_Q, TILE_Q)

    # ------------------------------------------------------------------------------------- load

    @cute.jit
    def load(self, context: Any):
        """Load Q, dO, K and V in the order in which the MMA warp uses them."""
        free = self.edges.waiter_states("q_free", "dout_free", "ring_free")
        scheduler = self.scheduler.create(context.order, context.channel)
        scheduler, work = self.next_with_steps(context, scheduler, scheduler.initial_work())
        if work.is_valid:
            free = self._load_for_scores(context, work, free)
            free = self._load_for_dp(context, work, free)
        while work.is_valid:
            kv_tile = self.last_kv_tile(context, work)
            for _ in cutlass.range(1, self.num_steps(context, work), unroll=1):
                free = self._load_keys(context, "k", work, kv_tile - 1, free)
                free = self._load_columns(context, work, kv_tile, free)
                free = self._load_keys(context, "v", work, kv_tile - 1, free)
                kv_tile -= 1
            following = scheduler.advance_to_next_work()
            ahead = self.has_steps(context, following)
            if ahead:
                free = self._load_for_scores(context, following, free)
            free = self._load_columns(context, work, kv_tile, free)
            if ahead:
                free = self._load_for_dp(context, following, free)
            work = following
            if not ahead:
                scheduler, work = self.next_with_steps(context, scheduler, work)
                if work.is_valid:
                    free = self._load_for_scores(context, work, free)
                    free = self._load_for_dp(context, work, free)
        self.wait_for_all(context, free, ("q_free", "dout_free", "ring_free"))

    @cute.jit
    def _load_for_scores(self, context: Any, work: Any, free: Any):
        """Q, and the first K of a tile."""
        free = self._load_rows(context, "q", work, free)
        return self._load_keys(context, "k", work, self.last_kv_tile(context, work), free)

    @cute.jit
    def _load_for_dp(self, context: Any, work: Any, free: Any):
        """dO, and the first V of a tile."""
        free = self._load_rows(context, "dout", work, free)
        return self._load_keys(context, "v", work, self.last_kv_tile(context, work), free)

    @cute.jit
    def _load_rows(self, context: Any, name: str, work: Any, free: Any):
        place = (context.sequences.query(work.batch), self.first_row(context, work), 0, work.head)
        return self.load_stage(context, (name, name, name), place, free)

    @cute.jit
    def _load_keys(self, context: Any, name: str, work: Any, kv_tile: Int32, free: Any):
        row = kv_tile * BLOCK_KV + context.cta_rank * OWN_KEYS
        head = work.head // context.heads_per_kv
        place = (context.sequences.key(work.batch), row, 0, head)
        return self.load_stage(context, ("ring", name, "keys"), place, free)

    @cute.jit
    def _load_columns(self, context: Any, work: Any, kv_tile: Int32, free: Any):
        head = work.head // context.heads_per_kv
        place = (context.sequences.key(work.batch), kv_tile * BLOCK_KV, context.cta_rank, head)
        return self.load_stage(context, ("ring", "k_columns", "columns"), place, free)

    # -------------------------------------------------------------------------------------- mma

    @cute.jit
    def mma(self, context: Any):
        """Issue every S, dP and dQ of the pair; one warp of the leader CTA.

        S of the following step, of the next tile too, goes before dQ, and dP after it.  Only one
        tile ahead, as in the forward kernel's MMA warp, and for the same reason.
        """
        states = self.edges.waiter_states(
            "q_loaded", "dout_loaded", "ring_loaded", "s_free", "ds_done", "dq_free"
        )
        scheduler = self.scheduler.create(context.order, context.channel)
        scheduler, work = self.next_with_steps(context, scheduler, scheduler.initial_work())
        if work.is_valid:
            states = self._first_scores(context, work, states)
            states = self._first_dp(context, work, states)
        while work.is_valid:
            num_steps = self.num_steps(context, work)
            for step in cutlass.range(1, num_steps, unroll=1):
                is_last = step + 1 == num_steps
                states = self._scores(context, is_last, states)
                states = self._dq(context, step == 1, Boolean(False), states)
                states = self._dp(context, is_last, states)
            following = scheduler.advance_to_next_work()
            ahead = self.has_steps(context, following)
            if ahead:
                states = self._first_scores(context, following, states)
            states = self._dq(context, num_steps == 1, Boolean(True), states)
            if ahead:
                states = self._first_dp(context, following, states)
            work = following
            if not ahead:
                scheduler, work = self.next_with_steps(context, scheduler, work)
                if work.is_valid:
                    states = self._first_scores(context, work, states)
                    states = self._first_dp(context, work, states)
        self.wait_for_all(context, states, ("s_free", "dq_free"))

    @cute.jit
    def _first_scores(self, context: Any, work: Any, states: Any):
        """S of a tile's first step, once its Q is there."""
        context.barriers["q_loaded"].wait(states["q_loaded"])
        states.advance("q_loaded")
        return self._scores(context, self.num_steps(context, work) == 1, states)

    @cute.jit
    def _first_dp(self, context: Any, work: Any, states: Any):
        """dP of a tile's first step, once its dO is there."""
        context.barriers["dout_loaded"].wait(states["dout_loaded"])
        states.advance("dout_loaded")
        return self._dp(context, self.num_steps(context, work) == 1, states)

    @traced("S")
    @cute.jit
    def _scores(self, context: Any, is_last: Boolean, states: Any):
        """S = Q K^T of one step; is_last: of the tile, after which Q is free."""
        barriers = context.barriers
        barriers["s_free"].wait(states["s_free"])
        states = self._rows_by_keys(context, self.s_shape, ("s", "q"), states)
        barriers["s_done"].commit(states["s_free"])
        states.advance("s_free")
        if is_last:
            barriers["q_free"].commit(states["q_loaded"])
        return states

    @traced("dP")
    @cute.jit
    def _dp(self, context: Any, is_last: Boolean, states: Any):
        """dP = dO V^T of one step; needs no wait (NOTE [dS over dP])."""
        states = self._rows_by_keys(context, self.dp_shape, ("dp", "dout"), states)
        context.barriers["dp_done"].commit(states["ds_done"])
        if is_last:
            context.barriers["dout_free"].commit(states["dout_loaded"])
        return states

    @cute.jit
    def _rows_by_keys(self, context: Any, shape: MmaShape, names: tuple[str, str], states: Any):
        """A product of 256 rows and 128 keys, K = 256 in 16 slices.

        names: of the result in TMEM, and of the rows in SMEM.
        """
        result, rows = names
        ring = states["ring_loaded"]
        context.barriers["ring_loaded"].wait(ring)
        fence_after_thread_sync()
        a = context.smem[rows][None, None, 0].iterator
        b = context.smem["keys"][None, None, ring.index].iterator
        mma_chain(
            shape,
            self.region_address(context, result),
            (self.rows_layout.lower_word(a), self.rows_layout),
            (self.keys_layout.lower_word(b), self.keys_layout),
            Boolean(False),
        )
        context.barriers["ring_free"].commit(ring)
        states.advance("ring_loaded")
        return states

    @traced("dQ")
    @cute.jit
    def _dq(self, context: Any, is_first: Boolean, is_last: Boolean, states: Any):
        """dQ += dS K of one step, K = 128 keys in 8 slices; dS from TMEM."""
        barriers, ring = context.barriers, states["ring_loaded"]
        if is_first:
            barriers["dq_free"].wait(states["dq_free"])
            states.advance("dq_free")
        barriers["ring_loaded"].wait(ring)
        barriers["ds_done"].wait(states["ds_done"])
        fence_after_thread_sync()
        b = context.smem["columns"][None, None, ring.index].iterator
        mma_chain(
            self.dq_shape,
            self.region_address(context, "dq"),
            (self.region_address(context, "dp"), self.ds_layout),
            (self.columns_layout.lower_word(b), self.columns_layout),
            ~is_first,
        )
        barriers["ring_free"].commit(ring)
        states.advance("ring_loaded")
        states.advance("ds_done")
        if is_last:
            barriers["dq_done"].commit(states["dq_free"])
        return states

    # --------------------------------------------------------------------------------- gradient

    @cute.jit
    def gradient(self, context: Any):
        """S -> P and dP -> dS for this CTA's 128 rows: one row a thread, half of the keys."""
        states = self.edges.waiter_states("s_done", "dp_done", "dq_done")
        scheduler = self.scheduler.create(context.order, context.channel)
        work, undrained = scheduler.initial_work(), self.no_work()
        factors = cute.make_rmem_tensor(OWN_KEYS, Float32)
        while work.is_valid:
            num_steps = self.num_steps(context, work)
            if num_steps > 0:
                first_row = self.first_row(context, work)
                row = first_row + self._lane()
                stats_row = context.sequences.padded_query_offset(work.batch) + row
                negative_lse = context.tensors.stats[0, work.head, stats_row]
                negative_delta = context.tensors.stats[1, work.head, stats_row]
                visibility = context.visibility(work, BLOCK_KV)
                tiles = visibility.tile_range(
                    (work.block * TILE_Q, TILE_Q), (first_row, BLOCK_Q)
                )
                key = (tiles.end - 1) * BLOCK_KV + self.warpgroup() * OWN_KEYS
                mask = (Boolean(True), visibility, row, key)
                states = self._probabilities(context, factors, negative_lse, mask, states)
                if undrained.is_valid:
                    states = self._drain(context, undrained, states)
                masked_again = tiles.num_masked_first + tiles.num_unmasked
                for step in cutlass.range(1, num_steps, unroll=1):
                    states = self._score_gradients(context, factors, negative_delta, states)
                    key -= BLOCK_KV
                    is_masked = (step < tiles.num_masked_first) | (step >= masked_again)
                    mask = (is_masked, visibility, row, key)
                    states = self._probabilities(context, factors, negative_lse, mask, states)
                states = self._score_gradients(context, factors, negative_delta, states)
                undrained = work
            else:
                self._store_zeros(context, work)
            work = scheduler.advance_to_next_work()
        if undrained.is_valid:
            states = self._drain(context, undrained, states)

    @staticmethod
    def _lane() -> Int32:
        """The lane of tensor memory, and the row of the CTA, of this thread."""
        return cute.arch.thread_idx()[0] % BLOCK_Q

    @traced("P")
    @cute.jit
    def _probabilities(
        self, context: Any, factors: cute.Tensor, negative_lse: Float32, mask: tuple, states: Any
    ):
        """factors := P of one step, times the slope of the softcap."""
        context.barriers["s_done"].wait(states["s_done"])
        fence_after_thread_sync()
        tmem_load(self.own_columns(context, "s", OWN_KEYS), factors)
        cute.arch.fence_view_async_tmem_load()
        fence_before_thread_sync()
        context.barriers["s_free"].arrive(states["s_done"], is_converged=True)
        states.advance("s_done")
        slopes = self.mask_and_cap(context, factors, mask)
        self.exponentiate(context, factors, negative_lse, (0, OWN_KEYS))
        if cutlass.const_expr(self.problem_class.softcap):
            factors.store(factors.load() * slopes.load())
        return states

    @traced("dS")
    @cute.jit
    def _score_gradients(
        self, context: Any, factors: cute.Tensor, negative_delta: Float32, states: Any
    ):
        """dS = factors (dP - delta) of one step, to tensor memory over dP."""
        context.barriers["dp_done"].wait(states["dp_done"])
        fence_after_thread_sync()
        address = self.own_columns(context, "dp", OWN_KEYS)
        for start in cutlass.range_constexpr(0, OWN_KEYS, FRAGMENT):
            dp = cute.make_rmem_tensor(FRAGMENT, Float32)
            tmem_load(address + start, dp)
            cute.arch.fence_view_async_tmem_load()
            score_gradients(dp, columns_of(factors, start, FRAGMENT), negative_delta)
            # Two 16-bit values a column, over the dP of this fragment or of one before.
            packed = cute.make_rmem_tensor(FRAGMENT // 2, Float32)
            cute.recast_tensor(packed, self.dtype).store(dp.load().to(self.dtype))
            tmem_store(packed, address + start // 2)
        cute.arch.fence_view_async_tmem_store()
        fence_before_thread_sync()
        context.barriers["ds_done"].arrive(states["dp_done"], is_converged=True)
        states.advance("dp_done")
        return states

    @traced("drain dQ")
    @cute.jit
    def _drain(self, context: Any, work: Any, states: Any):
        """softmax_scale * dQ of a tile to global memory, half of the columns a warpgroup."""
        context.barriers["dq_done"].wait(states["dq_done"])
        fence_after_thread_sync()
        sequence = context.sequences.query(work.batch)
        row = self.first_row(context, work) + self._lane()
        address = self.own_columns(context, "dq", OWN_COLUMNS) + states["dq_done"].index * HEAD_DIM
        for start in cutlass.range_constexpr(0, OWN_COLUMNS, FRAGMENT):
            values = cute.make_rmem_tensor(FRAGMENT, Float32)
            tmem_load(address + start, values)
            cute.arch.fence_view_async_tmem_load()
            if cutlass.const_expr(start + FRAGMENT == OWN_COLUMNS):
                fence_before_thread_sync()
                context.barriers["dq_free"].arrive(states["dq_done"], is_converged=True)
            multiply(values, context.scalars.softmax_scale)
            if row < sequence.length:
                destination = self._destination(context, sequence, row, work.head)
                column = self.warpgroup() * OWN_COLUMNS + start
                store_row(values, columns_of(destination, column, FRAGMENT))
        states.advance("dq_done")
        return states

    def _destination(self, context: Any, sequence: Any, row: Int32, head: Int32) -> cute.Tensor:
        """The 256 elements of a row of dQ."""
        return context.tensors.results[0][sequence.offset + row, None, head, sequence.batch]

    @cute.jit
    def _store_zeros(self, context: Any, work: Any):
        """dQ = 0 for the rows of a tile that sees no key."""
        row = self.first_row(context, work) + self._lane()
        sequence = context.sequences.query(work.batch)
        if row < sequence.length:
            destination = self._destination(context, sequence, row, work.head)
            for start in cutlass.range(0, OWN_COLUMNS, FRAGMENT, unroll=1):
                column = self.warpgroup() * OWN_COLUMNS + start
                store_row(zeros(FRAGMENT), columns_of(destination, column, FRAGMENT))
