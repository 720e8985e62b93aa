"""Exponents by which the dV kernel in mxfp8 chooses the scales of dS."""

from __future__ import annotations

import numpy as np

from fa4_hd256.kernels.blackwell.backward.mxfp8.ds import EXPONENT, ROUND_UP, SIGNIFICAND_BITS


def test_scales_are_the_least_that_bring_the_largest_magnitude_to_448():
    """Compare for every significand, and in the octaves at either end of those with a scale."""
    significands = np.arange(1 << SIGNIFICAND_BITS, dtype=np.uint32)
    for exponent in (EXPONENT, 127, 254):
        bits = significands | np.uint32(exponent << SIGNIFICAND_BITS)
        found = (bits + np.uint32(ROUND_UP) >> SIGNIFICAND_BITS).astype(np.int32) - EXPONENT
        scaled = np.ldexp(bits.view(np.float32).astype(np.float64), 127 - found)
        assert (scaled <= 448).all() and (scaled > 224).all()
