"""The forward kernel's roles that feed the tensor core: load and mma."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from fa4_hd256.kernels.blackwell.instructions import fence_after_thread_sync, mma_chain
from fa4_hd256.kernels.blackwell.operands import load_tile
from fa4_hd256.kernels.ranges import traced

__all__ = ["ForwardProducers"]


class ForwardProducers:
    """Mixed into ForwardKernel; the shared state is its `Context`."""

    @cute.jit
    def load(self, context: Any):
        """Load Q, K and V in the order in which the MMA warp uses them.

        Each CTA loads its own 128 rows of Q and its half of every K and V tile; both complete on
        the leader's barrier, which expects the bytes of both.
        """
        barriers = context.barriers
        q_free = barriers["q_free"].edge.waiter_state()
        kv_free = barriers["kv_free"].edge.waiter_state()
        scheduler = self.scheduler.create(context.order, context.channel)
        scheduler, work = self.next_with_steps(context, scheduler, scheduler.initial_work())
        if work.is_valid:
            q_free, kv_free = self._load_first(context, work, q_free, kv_free)
        while work.is_valid:
            last = self._last_kv_tile(context, work)
            num_tiles = self.num_steps(context, work)
            for step in cutlass.range(1, num_tiles, unroll=1):
                if cutlass.const_expr(not self.qk_ahead):
                    kv_free = self._load_v(context, work, last - step + 1, kv_free)
                kv_free = self._load_k(context, work, last - step, kv_free)
                if cutlass.const_expr(self.qk_ahead):
                    kv_free = self._load_v(context, work, last - step + 1, kv_free)
            following = scheduler.advance_to_next_work()
            ahead = self._starts_ahead(context, following)
            if ahead:
                q_free, kv_free = self._load_first(context, following, q_free, kv_free)
            kv_free = self._load_v(context, work, last - num_tiles + 1, kv_free)
            work = following
            if not ahead:
                scheduler, work = self.next_with_steps(context, scheduler, work)
                if work.is_valid:
                    q_free, kv_free = self._load_first(context, work, q_free, kv_free)
        # Every buffer must be free before this CTA may exit: its barriers are still signalled.
        for _ in cutlass.range_constexpr(self.config.kv_stages):
            barriers["kv_free"].wait(kv_free)
            kv_free.advance()
        for _ in cutlass.range_constexpr(self.config.q_stages):
            barriers["q_free"].wait(q_free)
            q_free.advance()

    @property
    def qk_ahead(self) -> bool:
        """Whether QK of the following step goes before PV: it needs an S buffer of its own."""
        return self.config.s_stages > 1

    def _starts_ahead(self, context: Any, following: Any) -> Boolean:
        """Whether the following tile's first QK goes before this tile's last PV."""
        return self.has_steps(context, following) if self.qk_ahead else Boolean(False)

    @cute.jit
    def _load_first(self, context: Any, work: Any, q_free: Any, kv_free: Any):
        """What the first QK of a tile needs."""
        q_free = self._load_q(context, work, q_free)
        kv_free = self._load_k(context, work, self._last_kv_tile(context, work), kv_free)
        return q_free, kv_free

    def _last_kv_tile(self, context: Any, work: Any) -> Int32:
        """The KV tile that is worked on first."""
        visibility = context.visibility(work, self.config.block_kv)
        return visibility.last_tile(work.block * self.tile_queries, self.tile_queries)

    @cute.jit
    def _load_q(self, context: Any, work: Any, q_free: Any):
        place = (context.query(work), self.first_row(context, work), 0, work.head)
        self._load_tile(context, "q", context.smem["q"], q_free, place)
        q_free.advance()
        return q_free

    @cute.jit
    def _load_k(self, context: Any, work: Any, kv_tile: Int32, kv_free: Any):
        row = kv_tile * self.config.block_kv + context.cta_rank * (self.config.block_kv // 2)
        head = work.head // context.heads_per_kv
        place = (context.key(work), row, 0, head)
        self._load_tile(context, "k", context.smem["k"], kv_free, place)
        kv_free.advance()
        return kv_free

    @cute.jit
    def _load_v(self, context: Any, work: Any, kv_tile: Int32, kv_free: Any):
        row = kv_tile * self.config.block_kv
        head = work.head // context.heads_per_kv
        place = (context.key(work), row, context.cta_rank, head)
        self._load_tile(context, "v", context.smem["v"], kv_free, place)
        kv_free.advance()
        return kv_free

    @traced("load")
    @cute.jit
    def _load_tile(self, context: Any, name: str, smem: Any, free: Any, place: tuple):
        """One TMA load of the tile at place = (sequence, first row, column block, head)."""
        edge = "q" if name == "q" else "kv"
        loaded = context.barriers[f"{edge}_loaded"]
        context.barriers[f"{edge}_free"].wait(free)
        if context.cta_rank == 0:
            loaded.expect_bytes(free)
        load_tile(
            getattr(context.tensors, name), smem, place, loaded.pointer(free), free.index,
            self.problem_class.packed_heads if name == "q" else 1,
        )

    @cute.jit
    def mma(self, context: Any):
        """Issue every QK and PV of the pair; one warp of the leader CTA.

        One step ahead (`qk_ahead`): QK of the following step, of the next tile too, goes before PV.
        Only one tile ahead, though: the dynamic scheduler hands out a further tile when every role
        has taken the one before, and some of them wait for the last PV of this tile.  So tiles
        without keys are skipped after it, here and in the load warp alike.
        """
        edges = self.edges
        q_loaded = edges["q_loaded"].waiter_state()
        kv_loaded = edges["kv_loaded"].waiter_state()
        s_done = edges["s_done"].producer_state()
        p_done = edges["p_done"].waiter_state()
        o_free = edges["o_free"].waiter_state()
        scheduler = self.scheduler.create(context.order, context.channel)
        scheduler, work = self.next_with_steps(context, scheduler, scheduler.initial_work())
        if work.is_valid:
            context.barriers["q_loaded"].wait(q_loaded)
            kv_loaded, s_done = self._qk(context, q_loaded, kv_loaded, s_done)
        while work.is_valid:
            num_tiles = self.num_steps(context, work)
            for step in cutlass.range(1, num_tiles, unroll=1):
                if cutlass.const_expr(self.qk_ahead):
                    kv_loaded, s_done = self._qk(context, q_loaded, kv_loaded, s_done)
                kv_loaded, p_done, o_free = self._pv(
                    context, step > 1, (kv_loaded, p_done, o_free)
                )
                if cutlass.const_expr(not self.qk_ahead):
                    kv_loaded, s_done = self._qk(context, q_loaded, kv_loaded, s_done)
            q_loaded.advance()
            following = scheduler.advance_to_next_work()
            ahead = self._starts_ahead(context, following)
            if ahead:
                context.barriers["q_loaded"].wait(q_loaded)
                kv_loaded, s_done = self._qk(context, q_loaded, kv_loaded, s_done)
            kv_loaded, p_done, o_free = self._pv(
                context, num_tiles > 1, (kv_loaded, p_done, o_free)
            )
            work = following
            if not ahead:
                scheduler, work = self.next_with_steps(context, scheduler, work)
                if work.is_valid:
                    context.barriers["q_loaded"].wait(q_loaded)
                    kv_loaded, s_done = self._qk(context, q_loaded, kv_loaded, s_done)
        # The last drain of O signals this CTA's barrier, which must outlive it.
        context.barriers["o_free"].wait(o_free)

    @traced("QK")
    @cute.jit
    def _qk(self, context: Any, q_loaded: Any, kv_loaded: Any, s_done: Any):
        """S = Q K^T of one step, K = 256 in 16 slices.

        The S buffer needs no wait: the PV that read it last was issued before
        (NOTE [S and P share columns] in forward.py).
        """
        barriers = context.barriers
        barriers["kv_loaded"].wait(kv_loaded)
        fence_after_thread_sync()
        q = context.smem["q"][None, None, q_loaded.index].iterator
        k = context.smem["k"][None, None, kv_loaded.index].iterator
        mma_chain(
            self.qk_shape,
            self._s_address(context, s_done.index),
            (self.q_layout.lower_word(q), self.q_layout),
            (self.k_layout.lower_word(k), self.k_layout),
            Boolean(False),
        )
        barriers["kv_free"].commit(kv_loaded)
        barriers["s_done"].commit(s_done)
        kv_loaded.advance()
        s_done.advance()
        return kv_loaded, s_done

    @traced("PV")
    @cute.jit
    def _pv(self, context: Any, accumulate: Boolean, states: tuple):
        """O += P V of one step, K = 128 keys in 8 slices; P from TMEM."""
        kv_loaded, p_done, o_free = states
        barriers = context.barriers
        barriers["kv_loaded"].wait(kv_loaded)
        barriers["o_free"].wait(o_free)
        barriers["p_done"].wait(p_done)
        fence_after_thread_sync()
        v = context.smem["v"][None, None, kv_loaded.index].iterator
        mma_chain(
            self.pv_shape,
            context.tmem.toint() + self.tmem_plan["o"].start,
            (self._s_address(context, p_done.index), self.p_layout),
            (self.v_layout.lower_word(v), self.v_layout),
            Boolean(accumulate),
        )
        barriers["kv_free"].commit(kv_loaded)
        barriers["o_done"].commit(o_free)
        kv_loaded.advance()
        p_done.advance()
        o_free.advance()
        return kv_loaded, p_done, o_free

    def _s_address(self, context: Any, stage: Int32) -> Int32:
        """TMEM address of an S buffer, and of the P that replaces it."""
        plan = self.tmem_plan
        return context.tmem.toint() + plan["s0"].start + stage * plan["s0"].columns
