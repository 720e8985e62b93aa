"""Context of the warp roles of the Hopper forward for Q, K and V in e4m3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ....forward.context import ForwardContext
from ....plan.edges import RingState

__all__ = ["E4m3ForwardContext", "StepStates"]


@dataclass(frozen=True)
class E4m3ForwardContext(ForwardContext):
    """State that every warp role of one CTA shares.

    Buffers in `smem`.  As TMA loads them, two bytes in an element: "q" (64, 128, warpgroups), the
    rows of each warpgroup, "k" and "v" (128, 128, stages); where V^T is loaded, it is "v", (256,
    64, stages).  As they are multiplied, of e4m3:
    "q_codes" (64, 256, warpgroups), "k_codes" (128, 256, stages) and "columns" (256, 128, stages),
    V^T with its columns in the order of `values` NOTE [columns of O].
    """


class StepStates(NamedTuple):
    """State of the rings that a warpgroup reads, from tile to tile: of the next tile of K, and of
    V^T."""

    k: RingState
    columns: RingState
