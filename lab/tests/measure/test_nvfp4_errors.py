"""Errors of attention by the format of the cache."""

from __future__ import annotations

import pytest

from lab.measure.nvfp4 import KINDS, errors


@pytest.mark.parametrize("kind", KINDS)
def test_errors_follow_from_the_bits_of_a_format(kind):
    """K by the bits of a significand: 8, 4, and about 2 with a scale near the elements."""
    found = errors(kind)
    assert found["bf16"][1] < 2**-9 < found["e4m3"][1] < 2**-5 < found["NVFP4"][1] < 2**-3
    assert found["bf16"][0] < found["e4m3"][0] < found["NVFP4"][0] < 0.25
