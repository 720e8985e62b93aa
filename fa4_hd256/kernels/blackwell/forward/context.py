"""Context of the warp roles of the Blackwell forward kernel."""

from __future__ import annotations

from dataclasses import dataclass

from ...forward.context import ForwardContext
from ..context import PairContext

__all__ = ["BlackwellForwardContext"]


@dataclass(frozen=True)
class BlackwellForwardContext(ForwardContext, PairContext):
    """State that every warp role of one CTA shares.

    Buffers in `smem`, of 16-bit elements but for the last: "q" (block_q, 256, q_stages); "k"
    (block_kv / 2, 256, kv_stages), this CTA's keys; "v" (block_kv, 128, kv_stages), this CTA's
    columns, in the same memory as "k"; "scale" (block_q, scale_stages) float32, the factor by
    which the correction warps rescale a row of O, after the last step 1 / the row's sum.
    """
