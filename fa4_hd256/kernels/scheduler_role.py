"""The role of the scheduler warp, the same in every kernel of tiles."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean

from .context import KernelContext

__all__ = ["CLAIM_STEPS", "schedule", "want_next_tile_if"]

#: Steps of a tile that the load role has left when it lets the scheduler request the next one. Too
#: early keeps tiles from clusters that have nothing to do; the response takes 500 to 2,000 clocks,
#: and the load role wants it when these steps are loaded.
CLAIM_STEPS = 2


@cute.jit
def schedule(scheduler_class: Any, context: KernelContext):
    """Request each next tile when the load warp wants it; nothing to do under a static scheduler.

    scheduler_class: of the `schedulers` protocol.
    """
    if cutlass.const_expr(scheduler_class.needs_scheduler_warp):
        scheduler = scheduler_class.create(context.order, context.channel)
        work = scheduler.initial_work()
        while work.is_valid:
            scheduler.prefetch_next_work()
            work = scheduler.advance_to_next_work()
        scheduler.producer_tail()


@cute.jit
def want_next_tile_if(scheduler: Any, is_time: Boolean):
    """Let the scheduler warp request the next tile, once in a tile."""
    if is_time:
        scheduler.want_next_work()
