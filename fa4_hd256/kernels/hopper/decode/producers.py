"""The load role of the decode kernel, made from its table of steps."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ....schedulers import WorkTile
from ...plan.steps import CLAIM_STEPS, Load
from ...ranges import traced
from .config import BLOCK_KV
from .context import HopperE4m3DecodeContext

__all__ = ["E4m3Producer"]


class E4m3Producer:
    """Mixed into the decode kernel; the shared state is its
    `HopperE4m3DecodeContext`."""

    @cute.jit
    def load(self, context: HopperE4m3DecodeContext):
        """K and V of each step; one warp."""
        loads = self.config.steps.loads_of("load", False)
        state = self.edges["kv_free"].waiter_state()
        scheduler = self.scheduler.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            own_context = context.of_tile(work)
            num_steps = self.num_steps(own_context, work)
            self.want_next_tile_if(scheduler, num_steps < CLAIM_STEPS)
            if num_steps > 0:
                visibility = own_context.visibility(work, BLOCK_KV)
                first_query = self.queries(work)[0]
                position = self.first_kv_tile(own_context, work, visibility, first_query)
                for step in cutlass.range(num_steps, unroll=1):
                    self.want_next_tile_if(scheduler, step + CLAIM_STEPS == num_steps)
                    for load in loads:
                        state = self._fill(own_context, load, (work, position), state)
                    position = self.next_kv_tile(position)
            work = scheduler.advance_to_next_work()
        # Every buffer must be free before this CTA may exit: its barriers are still signalled.
        for _ in range(self.config.kv_stages):
            context.barriers["kv_free"].wait(state)
            state.advance()

    @traced("load")
    @cute.jit
    def _fill(
        self, context: HopperE4m3DecodeContext, load: Load, which: tuple[WorkTile, Any], state: Any
    ):
        """The next buffer, once it is free.  which: (tile, KV tile)."""
        (work, position), (copy,) = which, load.copies
        loaded = context.barriers["kv_loaded"]
        context.barriers["kv_free"].wait(state)
        loaded.expect_bytes(state)
        keys, first_key = self.keys(context, work, position), self.first_key(position)
        place = keys, first_key, Int32(0), work.head // context.heads_per_kv
        target = loaded.pointer(state), state.index
        self.load_kv(getattr(context.tensors, copy.box), context.smem[copy.memory], place, target)
        state.advance()
        return state
