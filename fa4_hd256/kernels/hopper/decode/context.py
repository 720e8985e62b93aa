"""Context of the warp roles of the Hopper decode kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...forward.context import ForwardContext


@dataclass(frozen=True)
class HopperE4m3DecodeContext(ForwardContext):
    """State that every warp role of one CTA shares.

    Buffers in `smem`: "q" (rows, 256, q_stages) of the call's type, "q_halves" the same memory in
    f16; "kv" (keys of a step, 128, kv_stages), bytes in twos, "kv_words" the same memory by words
    of 32 bits; "p_words", P^T by words, two neighbouring rows of a key each; float32: "factors"
    (rows, q_stages), by which scores of a row are multiplied, "maxima" and "sums" (rows, softmax
    warps) of each warp's keys, "offsets" (rows, 1) that are subtracted from scores in the exponent
    of 2, "inverses" (rows, 1), the factors of the rows of O.
    """

    #: Descriptors of Q as the second operand of S^T, by stage.
    q: Any = None
    #: Descriptors of P^T as the second operand of O^T.
    p: Any = None
