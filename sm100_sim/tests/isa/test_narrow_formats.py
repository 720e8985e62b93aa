"""Conversions to and from formats of 8 bits and fewer, tf32 saturation and stochastic rounding.

The references know a format as the ordered list of its values, worked out here from its definition
(OCP 8-bit floating point and microscaling specifications), and round by comparing distances in
float64, in which every value, midpoint and fraction of a step met here is exact.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from harness import compile_body, run_compiled

from sm100_sim.errors import UnknownInstruction
from sm100_sim.state.warp import Environment

LANES = 32
#: Exponent bits, mantissa bits, bias, codes that are no finite values, code of NaN, bits in memory.
FORMATS = {
    "e4m3": (4, 3, 7, 1, 0x7F, 8),
    "e5m2": (5, 2, 15, 4, 0x7F, 8),
    "e2m3": (2, 3, 1, 0, 0x1F, 8),
    "e3m2": (3, 2, 3, 0, 0x1F, 8),
    "e2m1": (2, 1, 1, 0, 0x7, 4),
}


def magnitudes(name: str) -> np.ndarray:
    """The finite values without a sign, by code, in float64."""
    exponent, mantissa, bias, special, _, _ = FORMATS[name]
    values = []
    for code in range((1 << exponent + mantissa) - special):
        e, m = code >> mantissa, code & (1 << mantissa) - 1
        values.append((m + (e > 0) * 2**mantissa) * 2.0 ** (max(e, 1) - bias - mantissa))
    return np.array(values)


def sign_bit(name: str) -> int:
    return 1 << FORMATS[name][0] + FORMATS[name][1]


def evaluate(instruction: str, declared: str, sources: dict[str, np.ndarray]) -> np.ndarray:
    """%d, uint32, after the instruction, for each row of the sources."""
    names = tuple(sources)
    compiled = compile_body(f".reg .b32 %d; {declared}\n{instruction};", ("%d", *names))
    environment = Environment(
        np.zeros((1, 64), np.uint8),
        np.zeros(1, np.uint32),
        np.zeros((0, 3), np.uint64),
        np.zeros(16, np.uint8),
    )
    count, parts = len(sources[names[0]]), []
    for start in range(0, count, LANES):
        rows = {
            name: np.resize(value[start : start + LANES], LANES).astype(np.uint32)
            for name, value in sources.items()
        }
        parts.append(run_compiled(compiled, rows, environment, {"%ntid.x": 32})["%d"])
    return np.concatenate(parts)[:count]


def from_pair(opcode: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Codes, uint32, of cvt from two float32 operands given as patterns."""
    width = "b8" if "e2m1" in opcode else "b16"
    text = f"{opcode} %n, %a, %b; cvt.u32.u{width[1:]} %d, %n"
    return evaluate(text, f".reg .f32 %a, %b; .reg .{width} %n;", {"%a": a, "%b": b})


def step(name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Code at or below each magnitude, and how far it is to the next code, from 0 to 1.

    Above the greatest value the fraction is 0.
    """
    table = magnitudes(name)
    code = np.searchsorted(table, np.minimum(x, table[-1]), side="right") - 1
    upper = np.minimum(code + 1, len(table) - 1)
    gap = np.where(upper > code, table[upper] - table[code], 1)
    return code, np.where(upper > code, (np.minimum(x, table[-1]) - table[code]) / gap, 0)


def signed(name: str, code: np.ndarray, x: np.ndarray, relu: bool) -> np.ndarray:
    """Codes with the sign of x, 0 for negative ones with .relu, and what NaN gives."""
    negative = np.signbit(x)
    code = np.where(negative, 0 if relu else code | sign_bit(name), code)
    return np.where(np.isnan(x), FORMATS[name][4], code).astype(np.uint32)


def nearest(name: str, x: np.ndarray, relu: bool = False) -> np.ndarray:
    """Codes of float32 or float64 x, rounded to nearest even, saturated."""
    with np.errstate(invalid="ignore"):
        x = x.astype(np.float64)
    code, fraction = step(name, np.nan_to_num(np.abs(x), nan=0, posinf=1e300))
    up = (fraction > 0.5) | (fraction == 0.5) & (code & 1 == 1)
    return signed(name, code + up, x, relu)


def telling_floats(name: str) -> np.ndarray:
    """float32 at and next to every value and midpoint, both signs, and the special ones."""
    table = magnitudes(name)
    base = np.concatenate((table, (table[1:] + table[:-1]) / 2, [table[-1] * 1.25, 1e30]))
    base = base.astype(np.float32)
    near = np.concatenate(
        (base, np.nextafter(base, np.float32(np.inf)), np.nextafter(base, np.float32(0)))
    )
    special = np.array(
        [0x7F800000, 0x7FC00000, 0x7F800001, 0x00000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF],
        np.uint32,
    )
    bits = np.concatenate((near.view(np.uint32), special))
    return np.concatenate((bits, bits | 0x80000000)).astype(np.uint32)


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("name", FORMATS)
def test_pairs_of_floats_round_to_nearest_and_saturate(name, relu):
    a = telling_floats(name)
    b = np.roll(a, 7)
    got = from_pair(f"cvt.rn.satfinite{relu}.{name}x2.f32", a, b)
    high, low = (nearest(name, bits.view(np.float32), bool(relu)) for bits in (a, b))
    np.testing.assert_array_equal(got, high << FORMATS[name][5] | low)


@pytest.mark.parametrize("source", ["f16", "bf16"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_half_precision_value_converts(name, source):
    halves = np.arange(1 << 16, dtype=np.uint32)
    packed = halves[::2] | halves[1::2] << 16
    width = "b8" if name == "e2m1" else "b16"
    got = evaluate(
        f"cvt.rn.satfinite.{name}x2.{source}x2 %n, %s; cvt.u32.u{width[1:]} %d, %n",
        f".reg .b32 %s; .reg .{width} %n;",
        {"%s": packed},
    )
    if source == "f16":
        values = halves.astype(np.uint16).view(np.float16).astype(np.float64)
    else:
        values = (halves << 16).astype(np.uint32).view(np.float32)
    codes = nearest(name, values)
    np.testing.assert_array_equal(got, codes[1::2] << FORMATS[name][5] | codes[::2])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_torch_agrees_within_the_range(dtype):
    name = "e4m3" if dtype is torch.float8_e4m3fn else "e5m2"
    a = telling_floats(name)
    a = a[np.abs(np.nan_to_num(a.view(np.float32), nan=np.inf)) <= magnitudes(name)[-1]]
    codes = torch.from_numpy(a.view(np.float32)).to(dtype).view(torch.uint8).numpy()
    got = from_pair(f"cvt.rn.satfinite.{name}x2.f32", a, a)
    np.testing.assert_array_equal(got & 0xFF, codes)


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_narrow_value_widens(name, relu):
    storage = FORMATS[name][5]
    codes = np.arange(2 * sign_bit(name), dtype=np.uint32)
    packed = codes[::-1] << storage | codes
    width = "b8" if name == "e2m1" else "b16"
    got = evaluate(
        f"cvt.u{width[1:]}.u32 %n, %s; cvt.rn{relu}.f16x2.{name}x2 %d, %n",
        f".reg .b32 %s; .reg .{width} %n;",
        {"%s": packed},
    )
    table = magnitudes(name)
    table = np.append(table, [np.inf] * (name == "e5m2"))
    table = np.append(table, [np.nan] * (sign_bit(name) - len(table)))
    half = table.astype(np.float16).view(np.uint16).astype(np.uint32)
    both = np.concatenate((half, np.zeros_like(half) if relu else half | 0x8000))
    both[np.isnan(np.tile(table, 2))] = 0x7FFF
    np.testing.assert_array_equal(got, both[codes[::-1]] << 16 | both[codes])


def scale_codes(x: np.ndarray, up: bool, satfinite: bool) -> np.ndarray:
    """ue8m0 codes: the greatest power of two not above |x|, or the least not below."""
    with np.errstate(invalid="ignore"):
        x = np.abs(x.astype(np.float64))
    powers = 2.0 ** np.arange(-127, 128)
    if up:
        code = np.searchsorted(powers, x, side="left")
    else:
        code = np.maximum(np.searchsorted(powers, x, side="right") - 1, 0)
        code = np.where(np.isinf(x), 255, code)
    return np.where(np.isnan(x), 255, np.minimum(code, 254 if satfinite else 255)).astype(np.uint32)


@pytest.mark.parametrize("satfinite", ["", ".satfinite"])
@pytest.mark.parametrize("rounding", ["rz", "rp"])
def test_scales_are_powers_of_two(rounding, satfinite):
    halves = np.arange(1 << 16, dtype=np.uint32)
    values = (halves << 16).view(np.float32)
    want = scale_codes(values, rounding == "rp", bool(satfinite))
    got = evaluate(
        f"cvt.{rounding}{satfinite}.ue8m0x2.bf16x2 %n, %s; cvt.u32.u16 %d, %n",
        ".reg .b32 %s; .reg .b16 %n;",
        {"%s": halves[::2] | halves[1::2] << 16},
    )
    np.testing.assert_array_equal(got, want[1::2] << 8 | want[::2])
    base = np.arange(1 << 9, dtype=np.uint32) << 23
    near = np.concatenate([base + np.uint32(offset) for offset in (0, 1, 0xFFFFFFFF, 1 << 22)])
    near = np.append(near, np.array([0x400000, 0x400001, 0x3FFFFF], np.uint32))
    got = from_pair(f"cvt.{rounding}{satfinite}.ue8m0x2.f32", near, np.roll(near, 1))
    want = scale_codes(near.view(np.float32), rounding == "rp", bool(satfinite))
    np.testing.assert_array_equal(got, want << 8 | np.roll(want, 1))


def test_every_scale_widens():
    codes = np.arange(256, dtype=np.uint32)
    got = evaluate(
        "cvt.u16.u32 %n, %s; cvt.rn.bf16x2.ue8m0x2 %d, %n",
        ".reg .b32 %s; .reg .b16 %n;",
        {"%s": codes[::-1] << 8 | codes},
    )
    want = (2.0 ** np.arange(-127, 129)).astype(np.float32).view(np.uint32) >> 16
    want[255] = 0x7FFF
    np.testing.assert_array_equal(got, want[codes[::-1]] << 16 | want[codes])


def random_fields(rbits: np.ndarray, name: str) -> list[np.ndarray]:
    """16-bit random numbers of a, b, e, f by listing the bits of rbits, most significant first."""
    high, low = list(range(31, 15, -1)), list(range(15, -1, -1))
    if name == "e2m1":
        high, low = high[:8] + low[:8], high[8:] + low[8:]
    orders = (high[::-1], high, low[::-1], low)
    return [
        sum((rbits >> b & 1) << 15 - place for place, b in enumerate(order)) for order in orders
    ]


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("name", FORMATS)
def test_four_floats_round_stochastically(name, relu):
    rng = np.random.default_rng(3)
    x = telling_floats(name)
    x = np.concatenate((x, rng.choice(x, 640) ^ rng.integers(0, 1 << 22, 640, dtype=np.uint32)))
    rbits = rng.integers(0, 1 << 32, len(x), dtype=np.uint32)
    rbits[::5], rbits[1::5] = 0, 0xFFFFFFFF
    inputs = {f"%{letter}": np.roll(x, 3 * n) for n, letter in enumerate("abef")}
    width = "b16" if name == "e2m1" else "b32"
    text = f"cvt.rs{relu}.satfinite.{name}x4.f32 %n, {{%a, %b, %e, %f}}, %r; " + (
        "cvt.u32.u16 %d, %n" if name == "e2m1" else "mov.b32 %d, %n"
    )
    got = evaluate(
        text, f".reg .f32 %a, %b, %e, %f; .reg .b32 %r; .reg .{width} %n;", {**inputs, "%r": rbits}
    )
    want = np.zeros(len(x), np.uint32)
    for bits, field in zip(inputs.values(), random_fields(rbits, name), strict=True):
        value = bits.view(np.float32).astype(np.float64)
        code, fraction = step(name, np.nan_to_num(np.abs(value), nan=0, posinf=1e300))
        up = fraction + field / 65536 >= 1
        want = want << FORMATS[name][5] | signed(name, code + up, value, bool(relu))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("satfinite", ["", ".satfinite"])
@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_two_floats_round_stochastically_to_halves(name, satfinite):
    rng = np.random.default_rng(4)
    count, cut = (13, 10) if name == "f16" else (16, 7)
    bias = 15 if name == "f16" else 127
    x = rng.integers(0, 1 << 32, 1024, dtype=np.uint32)
    x[::2] = (
        (rng.normal(size=512) * 10.0 ** rng.integers(-9, 6, 512)).astype(np.float32).view(np.uint32)
    )
    x[:4] = 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF
    y, rbits = np.roll(x, 5), rng.integers(0, 1 << 32, 1024, dtype=np.uint32)
    got = evaluate(
        f"cvt.rs{satfinite}.{name}x2.f32 %d, %a, %b, %r",
        ".reg .f32 %a, %b; .reg .b32 %r;",
        {"%a": x, "%b": y, "%r": rbits},
    )
    want = []
    for bits, field in ((x, rbits >> 16), (y, rbits)):
        value = bits.view(np.float32).astype(np.float64)
        exponent = np.maximum(np.frexp(np.where(np.isfinite(value), value, 0))[1] - 1, 1 - bias)
        unit = 2.0 ** (exponent - cut)
        with np.errstate(all="ignore"):
            low = np.floor(np.abs(value) / unit)
            up = np.abs(value) / unit - low + (field & (1 << count) - 1) / 2.0**count >= 1
            result = (low + up) * unit
        most = 65504.0 if name == "f16" else 2.0**127 * (2 - 2.0**-7)
        result = np.where(np.abs(value) == np.inf, np.inf, result)
        result = np.where(result > most, most if satfinite else np.inf, result)
        if name == "f16":
            code = result.astype(np.float16).view(np.uint16).astype(np.uint32)
        else:
            code = result.astype(np.float32).view(np.uint32) >> 16
        code = np.where(np.signbit(value), code | 0x8000, code)
        want.append(np.where(np.isnan(value), 0x7FFF, code).astype(np.uint32))
    np.testing.assert_array_equal(got, want[0] << 16 | want[1])


@pytest.mark.parametrize("rounding", ["rn", "rna", "rz"])
def test_tf32_saturates(rounding):
    x = np.array(
        [
            0x7F7FFFFF,
            0xFF7FFFFF,
            0x7F800000,
            0xFF800000,
            0x7FC00000,
            0x7F7FEFFF,
            0x3F801000,
            0x3F803000,
            0xBF801001,
            0,
        ],
        np.uint32,
    )
    got = evaluate(f"cvt.{rounding}.satfinite.tf32.f32 %d, %a", ".reg .f32 %a;", {"%a": x})
    top = 0x7F7FE000
    ties = {
        "rn": (0x3F800000, 0x3F804000, 0xBF802000),
        "rna": (0x3F802000, 0x3F804000, 0xBF802000),
        "rz": (0x3F800000, 0x3F802000, 0xBF800000),
    }[rounding]
    want = [top, top | 1 << 31, top, top | 1 << 31, 0x7FFFE000, top, *ties, 0]
    np.testing.assert_array_equal(got, np.array(want, np.uint32))


@pytest.mark.parametrize(
    "opcode, operands",
    [
        ("cvt.rn.e4m3x2.f32", "%n, %a, %a"),
        ("cvt.rz.satfinite.e4m3x2.f32", "%n, %a, %a"),
        ("cvt.rs.e4m3x4.f32", "%d, {%a, %a, %a, %a}, %d"),
        ("cvt.rn.ue8m0x2.f32", "%n, %a, %a"),
        ("cvt.rn.satfinite.e4m3x2.f16x2", "%n, %d, %d"),
        ("cvt.rn.satfinite.s2f6x2.f32", "%n, %a, %a"),
        ("cvt.rna.relu.tf32.f32", "%d, %a"),
        ("cvt.rn.bf16x2.e4m3x2", "%d, %n"),
    ],
)
def test_other_forms_are_errors(opcode, operands):
    with pytest.raises(UnknownInstruction, match=opcode):
        compile_body(f".reg .f32 %a; .reg .b32 %d; .reg .b16 %n; {opcode} {operands};")
