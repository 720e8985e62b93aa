"""Context of the warp roles of a Blackwell kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute

from ..context import KernelContext
from ..operands import LoadTarget
from ..plan.edges import RingState, Signal

__all__ = ["PairContext", "claim_buffer"]


@dataclass(frozen=True)
class PairContext(KernelContext):
    """State that every warp role of one CTA shares; kernels add to it.

    A tensor-memory address has the lane in its upper 16 bits and the column of 32 bits in its
    lower ones.
    """

    #: Word of shared memory that receives the address of the allocated tensor memory.
    tmem_address: cute.Pointer
    #: First lane and column of the allocated tensor memory; None until it is allocated.
    tmem: Any = None
    #: Like `tmem`, from the first of the 32 lanes that this warp reaches: differs between warps.
    own_lanes: Any = None


@cute.jit
def claim_buffer(context: PairContext, ring: str, state: RingState) -> LoadTarget:
    """Wait until the next buffer of a ring is free, and expect its bytes; return what loads take.

    Of bytes of both CTAs, which complete on the leader's barrier, the leader alone expects all.
    The peer's bytes may come before that: the phase still waits for the leader's arrival.  The
    phase before was complete when the buffer became free, so they never count for that one.
    """
    loaded = context.barriers[f"{ring}_loaded"]
    context.barriers[f"{ring}_free"].wait(state)
    if cutlass.const_expr(loaded.edge.signal is Signal.TMA_CTA):
        loaded.expect_bytes(state)
    else:
        if context.cta_rank == 0:
            loaded.expect_bytes(state)
    return loaded.pointer(state), state.index
