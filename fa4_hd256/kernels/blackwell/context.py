"""Context of the warp roles of a Blackwell kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute

from ..context import KernelContext

__all__ = ["PairContext"]


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
