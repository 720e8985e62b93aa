"""The numpy twin: exact float32 rounding against rationals, and its values against 2^x."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa4_hd256.softmax_emu import HARDWARE_ONLY, POLYNOMIAL_ONLY, Ex2Pattern
from fa4_hd256.softmax_emu.fit import measure
from fa4_hd256.softmax_emu.online import LOWEST_MAXIMUM
from fa4_hd256.softmax_emu.pattern import COEFFICIENTS
from fa4_hd256.softmax_emu.reference_twin import (
    add_round_down,
    exp2_polynomial,
    exponentiate,
    fma,
    round_to_bfloat16,
)

finite = st.floats(
    width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**60), max_value=2.0**60
)


def _neighbours(value: np.float32) -> tuple[np.float32, np.float32]:
    low = np.nextafter(value, np.float32(-np.inf))
    return low, np.nextafter(value, np.float32(np.inf))


def _is_nearest_even(value: np.float32, exact: Fraction) -> bool:
    distance = abs(Fraction(float(value)) - exact)
    for other in _neighbours(value):
        other_distance = abs(Fraction(float(other)) - exact)
        odd = int(np.float32(value).view(np.uint32)) & 1
        if other_distance < distance or (other_distance == distance and odd):
            return False
    return True


@given(finite, finite, finite)
def test_fma_is_correctly_rounded(a, b, c):
    result = fma(a, b, c)[()]
    assert _is_nearest_even(result, Fraction(a) * Fraction(b) + Fraction(c))


def test_fma_where_double_rounding_fails():
    # 1 + 2^-24 is a tie in float32; the tiny rest decides, and float64 alone would drop it.
    a, b = np.float32(1 + 2**-23), np.float32(1 - 2**-23)
    for addend in (np.float32(2.0**40), np.float32(-(2.0**40)), np.float32(2.0**-60)):
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(addend))
        assert _is_nearest_even(fma(a, b, addend)[()], exact)
    tie, rest = np.float32(2.0**-24), np.float32(2.0**-70)
    assert fma(tie, 1 + np.float32(2.0**-23), np.float32(1)) == np.float32(1 + 2**-23)
    assert fma(rest, 1, np.float32(1)) == 1


@given(finite, finite)
def test_add_round_down_is_the_largest_float_below(a, b):
    exact = Fraction(a) + Fraction(b)
    result = np.float32(add_round_down(a, b)[()])
    assert Fraction(float(result)) <= exact < Fraction(float(_neighbours(result)[1]))


@pytest.mark.parametrize("degree", COEFFICIENTS)
def test_polynomial_against_exact_powers(degree):
    x = np.random.default_rng(degree).uniform(-126, 127.9, 1 << 16).astype(np.float32)
    x[:300] = np.arange(-150, 150, dtype=np.float32).clip(-126, 127)
    bound = measure(COEFFICIENTS[degree]).max_relative_error
    # Reducing the argument is exact but for fractions that round to 1.
    error = np.abs(exp2_polynomial(x, degree).astype(np.float64) / np.exp2(x.astype(float)) - 1)
    assert error.max() <= bound + 2.0**-23
    whole = np.arange(-126, 128, dtype=np.float32)
    assert (exp2_polynomial(whole, degree) == np.ldexp(np.float32(1), whole.astype(int))).all()


def test_special_arguments():
    small = np.array([-np.inf, -1e30, -1000, -127.5, -127, np.nan], np.float32)
    result = exp2_polynomial(small)
    assert (result.view(np.uint32) == 0).all(), "exactly +0"
    below_zero = np.nextafter(np.float32(0), np.float32(-1))
    assert exp2_polynomial([0.0, -0.0, below_zero]) == pytest.approx([1, 1, 1], rel=1e-4)
    largest = np.nextafter(np.float32(128), np.float32(0))
    assert exp2_polynomial(largest) == pytest.approx(np.exp2(np.float64(largest)), rel=1e-4)
    subnormal = exp2_polynomial(np.float32(-126.5))
    assert 0 <= subnormal <= 2.0**-126


def test_exponentiate_follows_the_pattern():
    rng = np.random.default_rng(1)
    scores = rng.normal(size=(4, 128)).astype(np.float32)
    scores[:, 5] = -np.inf
    scores[3] = -np.inf
    # A row without visible key keeps the value at which maxima start.
    row_max = np.maximum(scores.max(axis=1), np.float32(LOWEST_MAXIMUM))
    hardware = exponentiate(scores, 0.7, row_max, HARDWARE_ONLY)
    emulated = exponentiate(scores, 0.7, row_max, POLYNOMIAL_ONLY)
    pattern = Ex2Pattern(4, 3)
    columns = np.array([pattern.is_emulated(c // 32, c % 32, 4) for c in range(128)])
    mixed = exponentiate(scores, 0.7, row_max, pattern)
    assert (mixed == np.where(columns, emulated, hardware)).all()
    assert not np.isnan(mixed).any()
    assert (mixed[3] == 0).all() and (mixed[:, 5] == 0).all()
    assert emulated == pytest.approx(hardware, rel=1e-4)


def test_round_to_bfloat16_ties_to_even():
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8], np.float32)
    assert round_to_bfloat16(values).tolist() == [1, 1 + 2**-6, 1 + 2**-7, -1]
