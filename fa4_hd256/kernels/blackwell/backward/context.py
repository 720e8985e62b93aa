"""Context of the warp roles of the Blackwell gradient kernels."""

from __future__ import annotations

from dataclasses import dataclass

from ...backward.common import BackwardContext
from ..context import PairContext

__all__ = ["BlackwellBackwardContext"]


@dataclass(frozen=True)
class BlackwellBackwardContext(BackwardContext, PairContext):
    """State that every warp role of one CTA shares.

    Buffers in `smem`: those of the kernel's `smem(memory)`, which has their shapes.
    """
