"""The forward kernel's roles that feed the tensor core: load, mma, and the tile scheduler."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import cpasync

from .instructions import fence_after_thread_sync, mma_chain

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
        scheduler, work = self._next_with_keys(context, scheduler, scheduler.initial_work())
        if work.is_valid:
            q_free = self._load_q(context, work, q_free)
            last = context.num_kv_tiles(work, self.config.tile_q) - 1
            kv_free = self._load_k(context, work, last, kv_free)
        while work.is_valid:
            num_tiles = context.num_kv_tiles(work, self.config.tile_q)
            for step in cutlass.range(1, num_tiles, unroll=1):
                kv_tile = num_tiles - 1 - step
                kv_free = self._load_k(context, work, kv_tile, kv_free)
                kv_free = self._load_v(context, work, kv_tile + 1, kv_free)
            scheduler, following = self._next_with_keys(
                context, scheduler, scheduler.advance_to_next_work()
            )
            if following.is_valid:
                q_free = self._load_q(context, following, q_free)
                last = context.num_kv_tiles(following, self.config.tile_q) - 1
                kv_free = self._load_k(context, following, last, kv_free)
            kv_free = self._load_v(context, work, Int32(0), kv_free)
            work = following
        # Every buffer must be free before this CTA may exit: its barriers are still signalled.
        for _ in cutlass.range_constexpr(self.config.kv_stages):
            barriers["kv_free"].wait(kv_free)
            kv_free.advance()
        for _ in cutlass.range_constexpr(self.config.q_stages):
            barriers["q_free"].wait(q_free)
            q_free.advance()

    @cute.jit
    def _next_with_keys(self, context: Any, scheduler: Any, work: Any):
        """Skip tiles of which no row sees any key: nothing is loaded or multiplied for them."""
        num_tiles = context.num_kv_tiles(work, self.config.tile_q)
        while work.is_valid & (num_tiles == 0):
            work = scheduler.advance_to_next_work()
            num_tiles = context.num_kv_tiles(work, self.config.tile_q)
        return scheduler, work

    @cute.jit
    def _load_q(self, context: Any, work: Any, q_free: Any):
        block = work.query_block * 2 + context.cta_rank
        self._load_tile(
            context, ("q_loaded", "q_free"), context.tensors.q, context.q_smem, q_free,
            (block, 0, work.head, work.batch),
        )  # fmt: skip
        q_free.advance()
        return q_free

    @cute.jit
    def _load_k(self, context: Any, work: Any, kv_tile: Int32, kv_free: Any):
        head = work.head // context.heads_per_kv
        block = kv_tile * 2 + context.cta_rank
        self._load_tile(
            context, ("kv_loaded", "kv_free"), context.tensors.k, context.k_smem, kv_free,
            (block, 0, head, work.batch),
        )  # fmt: skip
        kv_free.advance()
        return kv_free

    @cute.jit
    def _load_v(self, context: Any, work: Any, kv_tile: Int32, kv_free: Any):
        head = work.head // context.heads_per_kv
        self._load_tile(
            context, ("kv_loaded", "kv_free"), context.tensors.v, context.v_smem, kv_free,
            (kv_tile, context.cta_rank, head, work.batch),
        )  # fmt: skip
        kv_free.advance()
        return kv_free

    @cute.jit
    def _load_tile(
        self, context: Any, edges: tuple, source: Any, smem: Any, free: Any, coordinates: tuple
    ):
        """One TMA load of the tile at (row block, column block, head, batch)."""
        loaded, released = context.barriers[edges[0]], context.barriers[edges[1]]
        row_block, column_block, head, batch = coordinates
        tiler = (cute.size(smem, mode=[0]), cute.size(smem, mode=[1]))
        tiles = cute.local_tile(
            source.tensor[None, None, head, batch], tiler, (row_block, column_block)
        )
        to_smem, from_global = cpasync.tma_partition(
            source.atom, 0, cute.make_layout(1),
            cute.group_modes(smem, 0, 2), cute.group_modes(tiles, 0, 2),
        )  # fmt: skip
        released.wait(free)
        if context.cta_rank == 0:
            loaded.expect_bytes(free)
        cute.copy(
            source.atom, from_global, to_smem[None, free.index],
            tma_bar_ptr=loaded.pointer(free),
        )  # fmt: skip

    @cute.jit
    def mma(self, context: Any):
        """Issue every QK and PV of the pair; one warp of the leader CTA.

        One step ahead: QK of the following step, of the next tile too, goes before PV.
        """
        edges = self.edges
        q_loaded = edges["q_loaded"].waiter_state()
        kv_loaded = edges["kv_loaded"].waiter_state()
        s_done = edges["s_done"].producer_state()
        p_done = edges["p_done"].waiter_state()
        o_free = edges["o_free"].waiter_state()
        scheduler = self.scheduler.create(context.order, context.channel)
        scheduler, work = self._next_with_keys(context, scheduler, scheduler.initial_work())
        if work.is_valid:
            context.barriers["q_loaded"].wait(q_loaded)
            kv_loaded, s_done = self._qk(context, q_loaded, kv_loaded, s_done)
        while work.is_valid:
            num_tiles = context.num_kv_tiles(work, self.config.tile_q)
            for step in cutlass.range(1, num_tiles, unroll=1):
                kv_loaded, s_done = self._qk(context, q_loaded, kv_loaded, s_done)
                kv_loaded, p_done, o_free = self._pv(
                    context, step > 1, (kv_loaded, p_done, o_free)
                )
            q_loaded.advance()
            scheduler, following = self._next_with_keys(
                context, scheduler, scheduler.advance_to_next_work()
            )
            if following.is_valid:
                context.barriers["q_loaded"].wait(q_loaded)
                kv_loaded, s_done = self._qk(context, q_loaded, kv_loaded, s_done)
            kv_loaded, p_done, o_free = self._pv(
                context, num_tiles > 1, (kv_loaded, p_done, o_free)
            )
            work = following
        # The last drain of O signals this CTA's barrier, which must outlive it.
        context.barriers["o_free"].wait(o_free)

    @cute.jit
    def _qk(self, context: Any, q_loaded: Any, kv_loaded: Any, s_done: Any):
        """S = Q K^T of one step, K = 256 in 16 slices.

        The S buffer needs no wait: its last reader was the PV two steps back, issued before
        (NOTE [S and P share columns] in forward.py).
        """
        barriers = context.barriers
        barriers["kv_loaded"].wait(kv_loaded)
        fence_after_thread_sync()
        q = context.q_smem[None, None, q_loaded.index].iterator
        k = context.k_smem[None, None, kv_loaded.index].iterator
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

    @cute.jit
    def _pv(self, context: Any, accumulate: Boolean, states: tuple):
        """O += P V of one step, K = 128 keys in 8 slices; P from TMEM."""
        kv_loaded, p_done, o_free = states
        barriers = context.barriers
        barriers["kv_loaded"].wait(kv_loaded)
        barriers["o_free"].wait(o_free)
        barriers["p_done"].wait(p_done)
        fence_after_thread_sync()
        v = context.v_smem[None, None, kv_loaded.index].iterator
        mma_chain(
            self.pv_shape,
            context.tmem.toint() + self.tmem_plan["o"].start,
            (self._s_address(context, p_done.index), None),
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

    @cute.jit
    def schedule(self, context: Any):
        """Ask for the next tiles ahead of time; nothing to do under a static scheduler."""
        if cutlass.const_expr(self.scheduler.needs_scheduler_warp):
            scheduler = self.scheduler.create(context.order, context.channel)
            work = scheduler.initial_work()
            while work.is_valid:
                scheduler.prefetch_next_work()
                work = scheduler.advance_to_next_work()
            scheduler.producer_tail()


