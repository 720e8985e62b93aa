"""Exponents by which the dV kernel in mxfp8 chooses the scales of dS."""

from __future__ import annotations

import numpy as np

from fa4_hd256.kernels.blackwell.backward.mxfp8.ds import GROWTH, ROUND_UP, SIGNIFICAND_BITS


def test_growth_rounds_up_where_adding_to_the_bits_does():
    """Compare both for every significand, and in the octaves at either end of normal numbers."""
    significands = np.arange(1 << SIGNIFICAND_BITS, dtype=np.uint32)
    for exponent in (2, 127, 254):
        bits = significands | np.uint32(exponent << SIGNIFICAND_BITS)
        added = bits + np.uint32(ROUND_UP) >> SIGNIFICAND_BITS
        with np.errstate(over="ignore"):
            grown = bits.view(np.float32) * np.float32(GROWTH)
        # The upper half of the bits, as it goes over lanes.
        halves = grown.view(np.uint32) >> 16
        assert np.array_equal(halves >> 7, added)
