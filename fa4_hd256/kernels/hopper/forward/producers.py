"""The load role of the Hopper forward."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32
from cutlass.cute.nvgpu import cpasync

from ....schedulers import WorkTile
from ...limits import HEAD_DIM
from ...operands import load_tile
from ...plan.edges import RingState
from ...plan.steps import CLAIM_STEPS
from ...ranges import traced
from .context import HopperForwardContext

__all__ = ["ForwardProducer"]


class ForwardProducer:
    """Mixed into ForwardKernel; the shared state is its
    `HopperForwardContext`."""

    @cute.jit
    def load(self, context: HopperForwardContext):
        """Fetch what the MMAs need: K and Q of a tile's first step, then K of a step before V of
        the one before it."""
        edges = self.edges
        q_free = RingState(1, Int32(0), Int32(1))
        states = edges["k_free"].waiter_state(), edges["v_free"].waiter_state()
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            own_context = context.of_tile(work)
            visibility = own_context.visibility(work, self.config.block_kv)
            tile = (work.block * self.tile_queries, self.tile_queries)
            if cutlass.const_expr(self.lists_steps):
                num_steps = self.step_list(context, work).count
            else:
                num_steps = visibility.num_tiles(*tile)
            self.want_next_tile_if(scheduler, num_steps < CLAIM_STEPS)
            if num_steps > 0:
                position = self.first_kv_tile(own_context, work, visibility, tile[0])
                k_free, v_free = states
                # Before Q: its buffer is free while the tile before is still worked on.
                k_free = self._load_kv(own_context, "k", (work, position), k_free)
                self._load_q(own_context, work, q_free)
                for step in cutlass.range(1, num_steps, unroll=1):
                    self.want_next_tile_if(scheduler, step + CLAIM_STEPS - 1 == num_steps)
                    following = self.next_kv_tile(position)
                    k_free = self._load_kv(own_context, "k", (work, following), k_free)
                    v_free = self._load_kv(own_context, "v", (work, position), v_free)
                    position = following
                v_free = self._load_kv(own_context, "v", (work, position), v_free)
                q_free.advance()
                states = k_free, v_free
            work = scheduler.advance_to_next_work()
        # Every buffer must be free before this CTA may exit: its barriers are still signalled.
        k_free, v_free = states
        for _ in range(self.config.k_stages):
            context.barriers["k_free"].wait(k_free)
            k_free.advance()
        for _ in range(self.config.v_stages):
            context.barriers["v_free"].wait(v_free)
            v_free.advance()

    def _load_q(self, context: HopperForwardContext, work: Any, q_free: Any) -> None:
        """The rows of each warpgroup, once its last MMA with those before is done."""
        of_query = self.query_rows
        for warpgroup in range(self.config.warpgroups):
            buffer = RingState(1, Int32(warpgroup), q_free.phase)
            context.barriers["q_free"].wait(buffer)
            loaded = context.barriers["q_loaded"]
            loaded.expect_bytes(buffer)
            first = self.first_row(context, work, warpgroup)
            place = context.query(work), first, 0, work.head
            load_tile(
                context.tensors.q,
                context.smem["q"],
                place,
                loaded.pointer(buffer),
                warpgroup,
                of_query,
            )

    @traced("load")
    @cute.jit
    def _load_kv(
        self, context: HopperForwardContext, name: str, which: tuple[WorkTile, Any], state: Any
    ):
        """One tile of K or V, or this CTA's columns of it for both CTAs.  which: (tile, KV
        tile)."""
        work, position = which
        loaded = context.barriers[f"{name}_loaded"]
        context.barriers[f"{name}_free"].wait(state)
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

    def kv_copy(self) -> tuple[Any, int, int]:
        """Return (operation, rows, columns) of a box of K or V."""
        config = self.config
        operation = (
            cpasync.CopyBulkTensorTileG2SMulticastOp()
            if config.ctas > 1
            else cpasync.CopyBulkTensorTileG2SOp()
        )
        return operation, config.block_kv, HEAD_DIM // config.ctas
