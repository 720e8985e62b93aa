"""Inline instructions on floats against independent formulas, on random and special values.

Roundings are computed in exact fractions; approximate functions are held against float64 within
the error that the PTX ISA states.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from single_instructions import both, evaluate, float_words, words


def as_float(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, np.uint32).view(np.float32)


def same_float(got: np.ndarray, want: np.ndarray) -> None:
    """Bitwise equality, all NaNs alike."""
    got, want = np.asarray(got, np.uint32), np.asarray(want, np.float32).view(np.uint32)
    nan = np.isnan(as_float(got)) & np.isnan(as_float(want))
    wrong = np.flatnonzero((got != want) & ~nan)
    assert not wrong.size, (wrong[0], hex(got[wrong[0]]), hex(want[wrong[0]]))


def flushed(values: np.ndarray) -> np.ndarray:
    values = np.array(values, np.float32)
    small = np.abs(values) < np.float32(2.0**-126)
    return np.where(small, np.copysign(np.float32(0), values), values).astype(np.float32)


@np.errstate(all="ignore")
def rounded(exact: Fraction, mode: str, zero_sign: int) -> np.float32:
    """An exact value to float32 by rn, rz, rm or rp."""
    if exact == 0:
        return np.float32(-0.0 if zero_sign else 0.0)
    # The neighbour below in magnitude: cut to 24 bits, or to the subnormal spacing.
    magnitude = abs(exact)
    exponent = max(magnitude.numerator.bit_length() - magnitude.denominator.bit_length() - 25, -149)
    while magnitude / Fraction(2) ** exponent >= 1 << 24:
        exponent += 1
    scaled = magnitude / Fraction(2) ** exponent
    low = int(scaled)
    rest = scaled - low
    up = {
        "rz": False,
        "rm": exact < 0,
        "rp": exact > 0,
        "rn": rest > Fraction(1, 2) or rest == Fraction(1, 2) and low & 1,
    }[mode] and rest != 0
    value = (low + int(up)) * Fraction(2) ** exponent
    if value >= Fraction(2) ** 128:
        away = {"rz": False, "rm": exact < 0, "rp": exact > 0, "rn": True}[mode]
        value = np.float32(np.inf) if away else np.finfo(np.float32).max
    else:
        value = np.float32(float(value))
    return np.float32(-value if exact < 0 else value)


@np.errstate(all="ignore")
def reference(operation: str, mode: str, values: list[np.float32]) -> np.float32:
    a, b, c = (*values, np.float32(0))[:3] if operation != "fma" else values
    exact = {
        "add": lambda: np.float64(a) + b,
        "mul": lambda: np.float64(a) * b,
        "fma": lambda: np.float64(a) * b + c,
    }[operation]()
    if not all(np.isfinite(v) for v in values):
        return np.float32(exact)
    fa, fb, fc = Fraction(float(a)), Fraction(float(b)), Fraction(float(c))
    value = {"add": fa + fb, "mul": fa * fb, "fma": fa * fb + fc}[operation]
    negative = [bool(np.signbit(v)) for v in values]
    if operation == "mul":
        return rounded(value, mode, negative[0] ^ negative[1])
    terms = negative if operation == "add" else [negative[0] ^ negative[1], negative[2]]
    zero_sign = all(terms) or (mode == "rm" and any(terms))
    if value == 0 and not any(Fraction(float(v)) for v in values):
        return rounded(value, mode, zero_sign)
    # An exact cancellation of nonzero terms: +0, or -0 when rounding down.
    cancels = {"add": fa != 0, "fma": fa * fb != 0}[operation]
    return rounded(value, mode, mode == "rm" if value == 0 and cancels else zero_sign)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("operation", ["add", "mul", "fma"])
def test_f32_rounding(operation, mode):
    count = 3 if operation == "fma" else 2
    sources = [float_words(10 * count + n) for n in range(count)]
    # Near cancellation, for every rounding: the last operand undoes the rest, almost.
    with np.errstate(all="ignore"):
        product = as_float(sources[0]) * (as_float(sources[1]) if operation == "fma" else 1)
    sources[-1][::5] = (-product[::5]).view(np.uint32) if operation != "mul" else sources[-1][::5]
    operands = ", ".join(f"%s{n}" for n in range(count))
    got = evaluate(f"{operation}.{mode}.f32 %d, {operands}", sources, [32] * count)
    want = [
        reference(operation, mode, [as_float(s[row : row + 1])[0] for s in sources])
        for row in range(len(got))
    ]
    same_float(got, want)


@pytest.mark.parametrize(
    "operation,mode",
    [("add", "rn"), ("add", "rm"), ("mul", "rn"), ("fma", "rn"), ("sub", "rn"), ("fma", "rz")],
)
def test_f32x2_does_each_half_like_f32(operation, mode):
    count = 3 if operation == "fma" else 2
    halves = [[float_words(50 + 2 * n), float_words(51 + 2 * n)] for n in range(count)]
    packed = [
        low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32) for low, high in halves
    ]
    operands = ", ".join(f"%s{n}" for n in range(count))
    for ftz in ("", ".ftz"):
        got = evaluate(f"{operation}.{mode}{ftz}.f32x2 %d, {operands}", packed, [64] * count, 64)
        for half in (0, 1):
            single = evaluate(
                f"{operation}.{mode}{ftz}.f32 %d, {operands}",
                [pair[half] for pair in halves],
                [32] * count,
            )
            part = (got >> np.uint64(32 * half)).astype(np.uint32)
            same_float(part, as_float(single))


@np.errstate(all="ignore")
def test_ftz_and_sat():
    a, b, c = float_words(70), float_words(71), float_words(72)
    fa, fb = flushed(as_float(a)), flushed(as_float(b))
    same_float(evaluate("add.ftz.f32 %d, %s0, %s1", [a, b], [32] * 2), flushed(fa + fb))
    same_float(evaluate("mul.ftz.f32 %d, %s0, %s1", [a, b], [32] * 2), flushed(fa * fb))
    want = as_float(a) + as_float(b)
    want = np.where(np.isnan(want), 0, np.clip(want, 0, 1)).astype(np.float32) + np.float32(0)
    same_float(evaluate("add.sat.f32 %d, %s0, %s1", [a, b], [32] * 2), want)
    same_float(evaluate("sub.f32 %d, %s0, %s1", [a, c], [32] * 2), as_float(a) - as_float(c))
    same_float(evaluate("neg.f32 %d, %s0", [a], [32]), -as_float(a))
    same_float(evaluate("abs.ftz.f32 %d, %s0", [a], [32]), np.abs(fa))
    same_float(evaluate("div.rn.f32 %d, %s0, %s1", [a, b], [32] * 2), as_float(a) / as_float(b))
    same_float(evaluate("sqrt.rn.f32 %d, %s0", [a], [32]), np.sqrt(as_float(a)))


def _extreme(values, larger: bool, keep_nan: bool):
    """PTX min or max of Python float32 values."""
    numbers = [v for v in values if not np.isnan(v)]
    if not numbers or keep_nan and len(numbers) < len(values):
        return np.float32(np.nan)
    return sorted(numbers, key=lambda v: (v, not np.signbit(v)))[-1 if larger else 0]


@pytest.mark.parametrize("count", [2, 3])
def test_min_max(count):
    sources = [float_words(80 + n) for n in range(count)]
    operands = ", ".join(f"%s{n}" for n in range(count))
    rows = list(zip(*(as_float(s) for s in sources), strict=True))
    for name in ("min", "max"):
        for modifier in ("", ".NaN"):
            got = evaluate(f"{name}{modifier}.f32 %d, {operands}", sources, [32] * count)
            same_float(got, [_extreme(row, name == "max", bool(modifier)) for row in rows])
    got = evaluate(f"max.ftz.f32 %d, {operands}", sources, [32] * count)
    same_float(got, [_extreme(flushed(np.array(row)), True, False) for row in rows])
    assert (got[np.isnan(as_float(got))] == 0x7FFFFFFF).all()


def test_max_xorsign_abs():
    a, b = float_words(90), float_words(91)
    got = evaluate("max.xorsign.abs.f32 %d, %s0, %s1", [a, b], [32] * 2)
    want = [
        np.copysign(
            _extreme([abs(x), abs(y)], True, False),
            np.float32(-1) if np.signbit(x) != np.signbit(y) else np.float32(1),
        )
        for x, y in zip(as_float(a), as_float(b), strict=True)
    ]
    same_float(got, want)


@np.errstate(all="ignore")
def test_float_comparisons():
    a, b = float_words(100), float_words(101)
    x, y = as_float(a), as_float(b)
    unordered = np.isnan(x) | np.isnan(y)
    ordered = {"eq": x == y, "ne": x != y, "lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y}
    for name, holds in ordered.items():
        got = evaluate(f"setp.{name}.f32 %d, %s0, %s1", [a, b], [32] * 2, 1)
        assert (got == (holds & ~unordered)).all(), name
        got = evaluate(f"setp.{name}u.f32 %d, %s0, %s1", [a, b], [32] * 2, 1)
        assert (got == (holds | unordered)).all(), name
    assert (evaluate("setp.nan.f32 %d, %s0, %s1", [a, b], [32] * 2, 1) == unordered).all()
    assert (evaluate("setp.num.f32 %d, %s0, %s1", [a, b], [32] * 2, 1) == ~unordered).all()


# Conversions.


def half_reference(values: np.ndarray, kind: str, mode: str) -> np.ndarray:
    """float32 patterns to f16 or bf16 patterns, rounded by hand; NaN is 0x7FFF."""
    result = []
    for value in as_float(values):
        if np.isnan(value):
            result.append(0x7FFF)
            continue
        sign, magnitude = (0x8000 if np.signbit(value) else 0), abs(float(value))
        mantissa, bias, top = (10, 15, 0x7C00) if kind == "f16" else (7, 127, 0x7F80)
        if np.isinf(magnitude):
            result.append(sign | top)
            continue
        exponent = max(int(np.frexp(magnitude)[1]) - 1, 1 - bias) if magnitude else 1 - bias
        units = Fraction(magnitude) / Fraction(2) ** (exponent - mantissa)
        low, rest = int(units), units - int(units)
        up = mode == "rn" and (rest > Fraction(1, 2) or rest == Fraction(1, 2) and low & 1)
        bits = ((exponent + bias - 1) << mantissa) + low + int(up)
        result.append(sign | min(bits, top if mode == "rn" else top - 1))
    return np.array(result, np.uint32)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("mode", ["rn", "rz"])
def test_float_to_half(kind, mode):
    a, b = float_words(110), float_words(111)
    a[::4] = (np.linspace(-70000, 70000, len(a[::4]), dtype=np.float32)).view(np.uint32)
    b[::4] = np.float32(2.0**-16).view(np.uint32) + np.arange(len(b[::4]), dtype=np.uint32)
    want = [half_reference(v, kind, mode) for v in (a, b)]
    assert (evaluate(f"cvt.{mode}.{kind}.f32 %d, %s0", [a], [32], 16) == want[0]).all()
    got = evaluate(f"cvt.{mode}.{kind}x2.f32 %d, %s0, %s1", [a, b], [32] * 2)
    assert (got == (want[0] << 16 | want[1])).all()
    relu = evaluate(f"cvt.{mode}.relu.{kind}x2.f32 %d, %s0, %s1", [a, b], [32] * 2)
    negative = (want[0] >= 0x8000) & (want[0] != 0x7FFF)
    assert ((relu >> 16) == np.where(negative, 0, want[0])).all()


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_half_factors_of_a_float_sum(kind):
    """fma.f32.bf16 and its like: every product and sum here is exact in float64, then rounded."""
    a, b, c = (np.random.default_rng(n).normal(size=64).astype(np.float32) for n in range(3))
    a, b = (v.astype(np.float16).astype(np.float32) for v in (a, b))
    if kind == "bf16":
        a, b = (as_float(v.view(np.uint32) & 0xFFFF0000) for v in (a, b))
    halves = [
        v.view(np.uint32) >> 16 if kind == "bf16" else v.astype(np.float16).view(np.uint16)
        for v in (a, b)
    ]
    halves = [v.astype(np.uint32) for v in halves]
    floats = c.view(np.uint32)
    got = evaluate(f"fma.rn.f32.{kind} %d, %s0, %s1, %s2", [*halves, floats], [16, 16, 32])
    same_float(got, (a.astype(np.float64) * b + c).astype(np.float32))
    got = evaluate(f"add.rn.f32.{kind} %d, %s0, %s1", [halves[0], floats], [16, 32])
    same_float(got, (a.astype(np.float64) + c).astype(np.float32))


def test_half_to_float_and_half_arithmetic():
    halves = np.arange(0, 65536, 97, dtype=np.uint32)[:640]
    got = evaluate("cvt.f32.f16 %d, %s0", [halves], [16])
    same_float(got, halves.astype(np.uint16).view(np.float16).astype(np.float32))
    got = evaluate("cvt.f32.bf16 %d, %s0", [halves], [16])
    same_float(got, as_float(halves << 16))
    rng = np.random.default_rng(3)
    a, b, c = (rng.integers(0, 65536, 128, dtype=np.uint32) for _ in range(3))
    with np.errstate(all="ignore"):
        x, y = (v.astype(np.uint16).view(np.float16) for v in (a, b))
        for name, want in (("add", x + y), ("mul", x * y), ("sub", x - y)):
            got = evaluate(f"{name}.f16 %d, %s0, %s1", [a, b], [16] * 2, 16)
            finite = ~np.isnan(want)
            assert (got[finite] == want.view(np.uint16)[finite]).all(), name
    floats = [as_float(v << 16) for v in (a, b, c)]
    rows = [reference("fma", "rz", list(row)) for row in zip(*floats, strict=True)]
    exact = [None if not np.isfinite(r) else r for r in rows]
    got = evaluate("fma.rn.bf16x2 %d, %s0, %s1, %s2", [v | v << 16 for v in (a, b, c)], [32] * 3)
    for row, value in enumerate(exact):
        if value is None:
            continue
        fraction = Fraction(float(floats[0][row])) * Fraction(float(floats[1][row])) + Fraction(
            float(floats[2][row])
        )
        want = _nearest_bf16(fraction)
        if want is not None and fraction != 0:
            assert got[row] & 0xFFFF == want and got[row] >> 16 == want


def _nearest_bf16(value: Fraction) -> int | None:
    """Nearest bf16 pattern of an exact value, ties to even; None near overflow."""
    magnitude = abs(value)
    if magnitude >= Fraction(2) ** 127 or magnitude == 0:
        return None
    exponent = -126
    while exponent < 127 and magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    units = magnitude / Fraction(2) ** (exponent - 7)
    low, rest = int(units), units - int(units)
    up = rest > Fraction(1, 2) or rest == Fraction(1, 2) and low & 1
    return (0x8000 if value < 0 else 0) | ((exponent + 126) << 7) + low + int(up)


@np.errstate(all="ignore")
def test_float_to_integer():
    a = float_words(120)
    a[::2] = np.linspace(-3e9, 5e9, len(a[::2]), dtype=np.float32).view(np.uint32)
    a[1::4] = (np.arange(len(a[1::4]), dtype=np.float32) / 2 - 7).view(np.uint32)
    wide = as_float(a).astype(np.float64)
    modes = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    for mode, function in modes.items():
        for name, low, high in (
            ("s32", -(2**31), 2**31 - 1),
            ("u32", 0, 2**32 - 1),
            ("s16", -(2**15), 2**15 - 1),
        ):
            want = np.clip(np.where(np.isnan(wide), 0, function(wide)), low, high)
            bits = int(name[1:])
            got = evaluate(f"cvt.{mode}.{name}.f32 %d, %s0", [a], [32], bits)
            assert (got == want.astype(np.int64) % (1 << bits)).all(), (mode, name)
        same_float(evaluate(f"cvt.{mode}.f32.f32 %d, %s0", [a], [32]), function(as_float(a)))


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_integer_to_float(mode):
    a = words(32, 130)
    for name, value in both(32):
        want = [rounded(Fraction(value(int(v))), mode, 0) for v in a]
        same_float(evaluate(f"cvt.{mode}.f32.{name} %d, %s0", [a], [32]), want)


# Approximate functions.


def sweep(low: float, high: float, count: int = 4096) -> np.ndarray:
    return np.linspace(low, high, count, dtype=np.float32)


def apply(instruction: str, values: np.ndarray) -> np.ndarray:
    return as_float(evaluate(f"{instruction} %d, %s0", [values.view(np.uint32)], [32]))


def test_ex2():
    x = sweep(-126, 127.99)
    error = apply("ex2.approx.ftz.f32", x) / np.exp2(x.astype(np.float64)) - 1
    assert np.abs(error).max() < 2.0**-22
    special = np.array(
        [-np.inf, np.inf, 0, -0.0, 128, -126, -126.00001, -150, 1, -1, 127, 1e30, -1e30, 1e-40]
        + [0] * 18,
        np.float32,
    )
    want = np.array(
        [0, np.inf, 1, 1, np.inf, 2.0**-126, 0, 0, 2, 0.5, 2.0**127, np.inf, 0, 1] + [1] * 18,
        np.float32,
    )
    same_float(apply("ex2.approx.ftz.f32", special).view(np.uint32), want)
    assert not np.signbit(apply("ex2.approx.ftz.f32", special)).any()
    assert np.isnan(apply("ex2.approx.ftz.f32", np.full(32, np.nan, np.float32))).all()
    low = sweep(-149, -126, 1024)
    got = apply("ex2.approx.f32", low).astype(np.float64)
    assert np.abs(got - np.exp2(low.astype(np.float64))).max() <= 2.0**-149
    assert (apply("ex2.approx.f32", np.full(32, -151, np.float32)) == 0).all()


@np.errstate(all="ignore")
def test_logarithm_and_reciprocals():
    x = np.exp2(sweep(-126, 127)).astype(np.float32)
    exact = np.log2(x.astype(np.float64))
    got = apply("lg2.approx.ftz.f32", x)
    near = (x > 0.5) & (x < 2)
    assert np.abs(got - exact)[near].max() < 2.0**-22
    assert np.abs(got / exact - 1)[~near].max() < 2.0**-22
    special = np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 2.0**-149] + [1] * 24, np.float32)
    want = [-np.inf, -np.inf, 0, np.nan, np.inf, np.nan, np.nan, -149] + [0] * 24
    same_float(apply("lg2.approx.f32", special).view(np.uint32), want)
    assert np.isneginf(apply("lg2.approx.ftz.f32", special)[7])
    same_float(apply("rcp.approx.ftz.f32", x).view(np.uint32), flushed(1 / x))
    assert (
        np.abs(apply("rsqrt.approx.ftz.f32", x) * np.sqrt(x.astype(np.float64)) - 1).max()
        < 2.0**-22
    )
    zeros = np.array([0, -0.0, np.inf, -np.inf] * 8, np.float32)
    same_float(apply("rcp.approx.ftz.f32", zeros).view(np.uint32), 1 / zeros)
    same_float(apply("rsqrt.approx.f32", zeros).view(np.uint32), [np.inf, -np.inf, 0, np.nan] * 8)


@np.errstate(all="ignore")
def test_trigonometry():
    x = sweep(-np.pi, np.pi)
    wide = x.astype(np.float64)
    assert np.abs(apply("sin.approx.f32", x) - np.sin(wide)).max() < 2.0**-20.5
    assert np.abs(apply("cos.approx.f32", x) - np.cos(wide)).max() < 2.0**-20.5
    x = np.concatenate((sweep(-10, 10), sweep(-1e-3, 1e-3)))
    exact = np.tanh(x.astype(np.float64))
    got = apply("tanh.approx.f32", x)
    assert np.abs(got - exact).max() < 2.0**-20
    assert np.abs(got / exact - 1)[exact != 0].max() < 2.0**-11
    assert np.isnan(apply("sin.approx.f32", np.full(32, np.inf, np.float32))).all()


# Missing instructions are refused, by name.
