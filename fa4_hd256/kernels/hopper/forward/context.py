"""Context of the warp roles of the Hopper forward kernel."""

from __future__ import annotations

from dataclasses import dataclass

from ...forward.context import ForwardContext

__all__ = ["HopperForwardContext"]


@dataclass(frozen=True)
class HopperForwardContext(ForwardContext):
    """State that every warp role of one CTA shares.

    Buffers in `smem`, of 16-bit elements: "q" (64, 256, warpgroups), the rows of each warpgroup;
    "k" and "v" (block_kv, 256 / ctas, stages * ctas), as this CTA loads them; "k_tiles" and
    "v_tiles" (block_kv, 256, stages), the same memory as it is multiplied.
    """
