"""P again from the scores and LSE, as the backward pass needs it.

With c = softmax_scale * log2(e) and LSE2 = LSE * log2(e)::

    p = 2^(c * s - LSE2)

by the same pattern of hardware and polynomial exp2 as in the forward pass (`pattern`).
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32

from .exp2 import exp2_hardware, exp2_polynomial_pair
from .online import SMALLEST_SCALE
from .pattern import FRAGMENT_COLUMNS, Ex2Pattern


def scale_for_masking(scale_log2: Float32) -> Float32:
    """c, with 0 replaced by 2^-126, so that a masked score of -inf gives p = 0 and not NaN."""
    return cute.arch.fmax(scale_log2, Float32(SMALLEST_SCALE))


def probabilities_from_lse(
    scores: cute.Tensor,
    scale_log2: Float32,
    negative_lse: Any,
    pattern: tuple[Ex2Pattern, int, int],
) -> None:
    """scores := p, in place.

    scores: register tensor of whole fragments of 32 Float32, masked ones -inf.  scale_log2: c > 0
    (see `scale_for_masking`).  negative_lse: -LSE2, one Float32 for all columns or a register
    tensor with one for each; -inf gives p = 0.  pattern: (pattern, number of the first fragment,
    number of fragments the thread has).
    """
    ex2_pattern, first_fragment, num_fragments = pattern
    scale = (scale_log2, scale_log2)
    for column in range(0, cute.size(scores), 2):
        offset = (negative_lse, negative_lse)
        if isinstance(negative_lse, cute.Tensor):
            offset = (negative_lse[column], negative_lse[column + 1])
        x0, x1 = cute.arch.fma_packed_f32x2((scores[column], scores[column + 1]), scale, offset)
        fragment = first_fragment + column // FRAGMENT_COLUMNS
        if ex2_pattern.is_emulated(fragment, column % FRAGMENT_COLUMNS, num_fragments):
            p0, p1 = exp2_polynomial_pair(x0, x1, ex2_pattern.degree)
        else:
            p0, p1 = exp2_hardware(x0), exp2_hardware(x1)
        scores[column], scores[column + 1] = p0, p1
