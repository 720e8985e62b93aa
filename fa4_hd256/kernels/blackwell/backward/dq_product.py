"""The dQ kernel where dS is stored: dQ = softmax_scale dS K, a plain product by CTA pairs.

One tile is 256 query rows of one head; one step takes 128 keys.  The dK/dV kernel has stored dS^T,
(keys, queries): each CTA loads 128 keys x its own 128 queries as A, and 128 keys x half of the
columns as B.  Only what some row of the tile sees is read; the rest of dS was never written.

Timeline of one CTA (the MMA warp is the leader's); 0' is the next tile's first step::

    load      dS(0) K(0) dS(1) K(1) ..   | dS(0') K(0') ..
    mma       dQ(0) dQ(1) ..             | dQ(0') ..
    gradient                             | dQ -> global

Accumulators alternate between tiles, so a tile's dQ leaves while the next one is multiplied.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from fa4_hd256.kernels.blackwell.instructions import MmaShape, fence_after_thread_sync, mma_chain
from fa4_hd256.kernels.blackwell.operands import load_tile, mn_major_operand
from fa4_hd256.kernels.blackwell.pair_plan import BLOCK_KV, BLOCK_Q, CTAS, TILE_Q
from fa4_hd256.kernels.limits import HEAD_DIM
from fa4_hd256.kernels.ranges import traced
from fa4_hd256.kernels.sequences import Sequence

from .common import DS
from .dq import DqKernel

__all__ = ["DqProductKernel"]


class DqProductKernel(DqKernel):
    """The product for one configuration; arguments of a call: `BackwardKernel.__call__`.

    Tiles, their steps and how dQ leaves are the dQ kernel's.
    """

    boxes = {
        "ds": (DS, BLOCK_KV, BLOCK_Q),
        "k": (1, BLOCK_KV, HEAD_DIM // 2),
    }

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.shape = MmaShape(TILE_Q, HEAD_DIM, self.is_bf16, a_mn_major=True, b_mn_major=True)
        self.layout = mn_major_operand(BLOCK_KV)

    def smem(self, memory: Any) -> dict[str, cute.Tensor]:
        return {
            "ds": memory.operand("ds", BLOCK_KV, BLOCK_Q, self.plan.stages),
            "k": memory.operand("k", BLOCK_KV, HEAD_DIM // 2, self.plan.stages),
        }

    @cute.jit
    def load(self, context: Any):
        """Load dS and K of every step, the last KV tile first."""
        free = self.edges.waiter_states("step_free")
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            kv_tile = self.last_kv_tile(context, work)
            for _ in cutlass.range(self.num_steps(context, work), unroll=1):
                free = self._load_step(context, work, kv_tile, free)
                kv_tile -= 1
            work = scheduler.advance_to_next_work()
        self.wait_for_all(context, free, ("step_free",))

    @traced("load")
    @cute.jit
    def _load_step(self, context: Any, work: Any, kv_tile: Int32, free: Any):
        """dS and K of one step, both on one barrier."""
        loaded, state = context.barriers["step_loaded"], free["step_free"]
        context.barriers["step_free"].wait(state)
        if context.cta_rank == 0:
            loaded.expect_bytes(state)
        row, rank = kv_tile * BLOCK_KV, context.cta_rank
        keys = context.sequences.key(work.batch)
        # Every sequence has a plane of dS to itself, from its first key and query on.  What TMA
        # finds beyond its last key is 0, as in K: what the dK/dV kernel has there is no number.
        plane = Sequence(Int32(0), keys.length, work.batch)
        places = {
            "ds": (plane, row, work.block * CTAS + rank, work.head),
            "k": (keys, row, rank, work.head // context.heads_per_kv),
        }
        for name, source in zip(self.boxes, context.tensors.loads, strict=True):
            smem = context.smem[name]
            load_tile(source, smem, places[name], loaded.pointer(state), state.index)
        free.advance("step_free")
        return free

    @cute.jit
    def mma(self, context: Any):
        """Issue every product of the pair; one warp of the leader CTA."""
        states = self.edges.waiter_states("step_loaded", "dq_free")
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            num_steps = self.num_steps(context, work)
            if num_steps > 0:
                context.barriers["dq_free"].wait(states["dq_free"])
                for step in cutlass.range(num_steps, unroll=1):
                    states = self._product(context, step > 0, states)
                context.barriers["dq_done"].commit(states["dq_free"])
                states.advance("dq_free")
            work = scheduler.advance_to_next_work()
        self.wait_for_all(context, states, ("dq_free",))

    @traced("dQ")
    @cute.jit
    def _product(self, context: Any, accumulate: Boolean, states: Any):
        """dQ += dS K of one step, K = 128 keys in 8 slices."""
        loaded = states["step_loaded"]
        context.barriers["step_loaded"].wait(loaded)
        fence_after_thread_sync()
        ds, k = (
            self.layout.lower_word(context.smem[name][None, None, loaded.index].iterator)
            for name in ("ds", "k")
        )
        mma_chain(
            self.shape,
            self.region_address(context, "dq") + states["dq_free"].index * HEAD_DIM,
            (ds, self.layout),
            (k, self.layout),
            accumulate,
        )
        context.barriers["step_free"].commit(loaded)
        states.advance("step_loaded")
        return states

    @cute.jit
    def gradient(self, context: Any):
        """dQ of every tile to global memory."""
        states = self.edges.waiter_states("dq_done")
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            if self.num_steps(context, work) > 0:
                states = self._drain(context, work, states)
            else:
                self._store_zeros(context, work)
            work = scheduler.advance_to_next_work()
