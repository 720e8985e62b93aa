"""The device's polynomial exp2 in numpy, bit for bit, and the pattern over a row of scores.

Float32 fma and directed rounding are emulated exactly.  A product of two float32 is exact in
float64; the sum with the addend is rounded to odd there, which keeps enough information for the
following rounding to float32 to be correct (S. Boldo, G. Melquiond, "Emulation of a FMA and
correctly rounded sums: proved algorithms using rounding to odd", IEEE ToC 2008: 53 >= 24 + 2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from .pattern import COEFFICIENTS, FRAGMENT_COLUMNS, Ex2Pattern

_FLOOR_MAGIC = np.float32(12582912.0)
_SMALLEST_EXPONENT = np.float32(-127.0)


def _sum_to_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b of float64 arrays rounded to odd: inexact results have an odd last bit."""
    with np.errstate(invalid="ignore", over="ignore"):
        total = a + b
        # TwoSum (Knuth): `error` is exactly what the rounding of `total` lost.
        b_part = total - a
        error = (a - (total - b_part)) + (b - b_part)
        even = (np.atleast_1d(total).view(np.int64) & 1).reshape(np.shape(total)) == 0
        inexact = np.isfinite(total) & np.isfinite(error) & (error != 0)
        towards = np.where(error > 0, np.inf, -np.inf)
        return np.where(inexact & even, np.nextafter(total, towards), total)


def fma(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> np.ndarray:
    """fma.rn.f32 (PTX ISA 9.7.3): a * b + c of float32 arrays with one rounding to nearest."""
    a, b, c = (np.asarray(value, np.float32).astype(np.float64) for value in (a, b, c))
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(_sum_to_odd(a * b, c)).astype(np.float32)


def add_round_down(a: ArrayLike, b: ArrayLike) -> np.ndarray:
    """add.rm.f32 (PTX ISA 9.7.3): a + b of float32 arrays rounded towards minus infinity."""
    a, b = (np.asarray(value, np.float32).astype(np.float64) for value in (a, b))
    exact = np.asarray(_sum_to_odd(a, b))
    with np.errstate(over="ignore"):
        nearest = exact.astype(np.float32)
    too_large = nearest.astype(np.float64) > exact
    return np.where(too_large, np.nextafter(nearest, np.float32(-np.inf)), nearest)


def horner(fraction: ArrayLike, coefficients: Sequence[float] | np.ndarray) -> np.ndarray:
    """c0 + c1 f + ... by float32 fma from the highest coefficient down."""
    fraction = np.asarray(fraction, np.float32)
    value = np.full_like(fraction, np.float32(coefficients[-1]))
    for coefficient in reversed(coefficients[:-1]):
        value = fma(value, fraction, np.float32(coefficient))
    return value


def exp2_polynomial(x: ArrayLike, degree: int = 3) -> np.ndarray:
    """2^x as `exp2.exp2_polynomial_pair` computes it; float32 in, float32 out, same shape."""
    x = np.asarray(x, np.float32)
    # max.f32 returns the other operand for NaN.
    x = np.fmax(x, _SMALLEST_EXPONENT)
    shifted = add_round_down(x, _FLOOR_MAGIC)
    fraction = x - (shifted - _FLOOR_MAGIC)
    value = horner(fraction, COEFFICIENTS[degree])
    exponent = np.ascontiguousarray(shifted).view(np.uint32) << np.uint32(23)
    return (np.ascontiguousarray(value).view(np.uint32) + exponent).view(np.float32)


def exponentiate(
    scores: ArrayLike,
    scale_log2: float,
    row_max: ArrayLike,
    pattern: Ex2Pattern,
    hardware_exp2: Callable[[np.ndarray], np.ndarray] = np.exp2,
) -> np.ndarray:
    """p of rows of scores as `OnlineSoftmax.exponentiate` computes it. scores: (..., columns)
    float32, columns a multiple of 32; row_max: (...) float32. Bit-exact where the polynomial is
    used; elsewhere as exact as `hardware_exp2` is to the instruction."""
    scores = np.asarray(scores, np.float32)
    scale = np.float32(scale_log2)
    row_max = np.asarray(row_max, np.float32)
    offset = -(row_max * scale)
    x = fma(scores, scale, offset[..., None])
    num_fragments = scores.shape[-1] // FRAGMENT_COLUMNS
    emulated = np.array(
        [
            pattern.is_emulated(fragment, column, num_fragments)
            for fragment in range(num_fragments)
            for column in range(FRAGMENT_COLUMNS)
        ]
    )
    return np.where(
        emulated, exp2_polynomial(x, pattern.degree), np.asarray(hardware_exp2(x), np.float32)
    )


def round_to_bfloat16(x: ArrayLike) -> np.ndarray:
    """cvt.rn.bf16.f32 (PTX ISA 9.7.9, cvt), as float32; NaN not allowed, ties to even."""
    bits = np.ascontiguousarray(np.asarray(x, np.float32)).view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)
