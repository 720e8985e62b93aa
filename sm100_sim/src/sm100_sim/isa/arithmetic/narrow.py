"""cvt to and from formats of 8 bits and fewer, and its stochastic rounding (PTX ISA, "cvt").

A conversion to a narrow format works on the bits of an f32 lane: the significand with its hidden
bit is shifted to the result's last place, which for results below the smallest normal number lies
further up, and rounded there. Widening is exact: the code's bits are put in place as those of an
f32, and one multiplication by a power of two moves the exponent to its bias.

Codes: `sm100_sim.isa.minifloat`. NaN gives 0x7F in e4m3 and e5m2, 0xFF in ue8m0, and the greatest
finite value in e2m3, e3m2 and e2m1, which have no NaN; widened, it is 0x7FFF.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sm100_sim.isa.emitter import Emitter, splat
from sm100_sim.isa.table import unknown
from sm100_sim.ptx.parser import Instruction

from .floating import float_to_half, half_to_float, join_pair, split_pair


@dataclass(frozen=True, slots=True)
class Format:
    """A format with a sign: bits of its mantissa, bias, codes without sign, bits of its storage.

    ``greatest``: of the largest finite value; ``overflow``: of what lies above it unless
    .satfinite; ``nan``: what NaN becomes.
    """

    mantissa: int
    bias: int
    greatest: int
    nan: int
    storage: int
    width: int
    overflow: int = 0


_FORMATS = {
    "e4m3": Format(3, 7, 0x7E, 0x7F, 8, 8),
    "e5m2": Format(2, 15, 0x7B, 0x7F, 8, 8),
    "e2m3": Format(3, 1, 0x1F, 0x1F, 8, 6),
    "e3m2": Format(2, 3, 0x1F, 0x1F, 8, 6),
    "e2m1": Format(1, 1, 0x7, 0x7, 4, 4),
    "f16": Format(10, 15, 0x7BFF, 0x7FFF, 16, 16, 0x7C00),
    "bf16": Format(7, 127, 0x7F7F, 0x7FFF, 16, 16, 0x7F80),
}
_NARROW = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
PAIRS = tuple(f"{name}x2" for name in _NARROW)
QUADS = tuple(f"{name}x4" for name in _NARROW)
SCALES = "ue8m0x2"
#: A shift from which every f32 gives zero, whatever is added for rounding.
_NOTHING_LEFT = 45


def is_narrow(i: Instruction) -> bool:
    """Return True if a cvt converts to or from a narrow format, or rounds stochastically."""
    return "rs" in i.modifiers or any(m in (*PAIRS, *QUADS, SCALES) for m in i.modifiers)


def convert(e: Emitter, i: Instruction) -> None:
    """A cvt for which `is_narrow` holds."""
    *options, to, source = i.modifiers
    if to == SCALES or source == SCALES:
        return _convert_scales(e, i, options, to, source)
    if "rs" in options:
        return _stochastic(e, i, options, to, source)
    if source in PAIRS and to == "f16x2":
        _accept(i, options, ("rn", "relu"), ("rn",))
        return _widen(e, i, source[:-2], "relu" in options)
    if to not in PAIRS or source not in ("f32", "f16x2", "bf16x2"):
        raise unknown(i, "narrow formats convert in pairs from f32, f16x2 and bf16x2, and to f16x2")
    _accept(i, options, ("rn", "satfinite", "relu"), ("rn", "satfinite"))
    form, relu = _FORMATS[to[:-2]], "relu" in options

    def encode(body: Emitter, value: str) -> str:
        return _encode(body, value, form, relu, None)

    name = f"encode_{to}{'_relu' * relu}"
    high, low = (
        e.shared_function(name, encode, value, result="i32") for value in _source_pair(e, i, source)
    )
    _set_codes(e, i, form, [high, low])


def _accept(i: Instruction, options: list[str], allowed: tuple, needed: tuple) -> None:
    if len(set(options)) < len(options) or not set(needed) <= set(options) <= set(allowed):
        raise unknown(
            i,
            f"this conversion needs {', '.join('.' + n for n in needed)} and accepts "
            f"{', '.join('.' + a for a in allowed)}",
        )


def _source_pair(e: Emitter, i: Instruction, source: str) -> tuple[str, str]:
    """f32 lanes for the upper and the lower result."""
    if len(i.operands) != (3 if source == "f32" else 2):
        raise unknown(i, "a pair comes from two f32 operands or one packed one")
    if source == "f32":
        return e.get(i.operands[1], "float"), e.get(i.operands[2], "float")
    low, high = split_pair(e, i.operands[1])
    return half_to_float(e, high, source), half_to_float(e, low, source)


def _set_codes(e: Emitter, i: Instruction, form: Format, codes: list[str]) -> None:
    """Pack i32 lanes of codes, the first operand's in the uppermost place."""
    packed = codes[0]
    for code in codes[1:]:
        packed = e.binary(
            "or", "i32", e.binary("shl", "i32", packed, splat("i32", form.storage)), code
        )
    kind = {8: "i8", 16: "i16", 32: "i32"}[form.storage * len(codes)]
    e.set(i.operands[0], kind, e.cast("trunc", packed, "i32", kind))


def _encode(
    e: Emitter,
    value: str,
    form: Format,
    relu: bool,
    random: tuple[str, int] | None,
    satfinite: bool = True,
) -> str:
    """f32 lanes to i32 lanes of codes, rounded to nearest even, or with ``random`` bits.

    random: i64 lanes and their number of bits, added at the top of the bits that are cut off; a
    carry out of those rounds away from zero.
    """
    bits = e.cast("bitcast", value, "float", "i32")
    magnitude = e.binary("and", "i32", bits, splat("i32", 0x7FFFFFFF))
    exponent = e.binary("lshr", "i32", magnitude, splat("i32", 23))
    normal = e.compare("ne", "i32", exponent, splat("i32", 0))
    fraction = e.binary("and", "i32", magnitude, splat("i32", 0x7FFFFF))
    hidden = e.select(normal, "i32", splat("i32", 1 << 23), splat("i32", 0))
    significand = e.cast("zext", e.binary("or", "i32", fraction, hidden), "i32", "i64")
    smallest = splat("i32", 128 - form.bias)
    exponent = e.intrinsic("umax", "i32", exponent, splat("i32", 1))
    top = e.intrinsic("umax", "i32", exponent, smallest)
    shift = e.binary(
        "add", "i32", e.binary("sub", "i32", top, exponent), splat("i32", 23 - form.mantissa)
    )
    shift = e.intrinsic("umin", "i32", shift, splat("i32", _NOTHING_LEFT))
    rounded = _round(e, significand, e.cast("zext", shift, "i32", "i64"), random)
    above = e.binary(
        "shl", "i32", e.binary("sub", "i32", top, smallest), splat("i32", form.mantissa)
    )
    code = e.binary("add", "i32", above, e.cast("trunc", rounded, "i64", "i32"))
    code = e.intrinsic(
        "umin", "i32", code, splat("i32", form.greatest if satfinite else form.overflow)
    )
    negative = e.compare("slt", "i32", bits, splat("i32", 0))
    signed = e.binary("or", "i32", code, splat("i32", 1 << form.width - 1))
    code = e.select(negative, "i32", splat("i32", 0) if relu else signed, code)
    nan = e.compare("ugt", "i32", magnitude, splat("i32", 0x7F800000))
    return e.select(nan, "i32", splat("i32", form.nan), code)


def _round(e: Emitter, significand: str, shift: str, random: tuple[str, int] | None) -> str:
    """i64 lanes shifted right and rounded."""
    if random is not None:
        lanes, count = random
        added = e.binary("shl", "i64", lanes, e.binary("sub", "i64", shift, splat("i64", count)))
    else:
        last = e.binary("and", "i64", e.binary("lshr", "i64", significand, shift), splat("i64", 1))
        half = e.binary(
            "lshr", "i64", e.binary("shl", "i64", splat("i64", 1), shift), splat("i64", 1)
        )
        added = e.binary("add", "i64", e.binary("sub", "i64", half, splat("i64", 1)), last)
    return e.binary("lshr", "i64", e.binary("add", "i64", significand, added), shift)


def _widen(e: Emitter, i: Instruction, name: str, relu: bool) -> None:
    """cvt.rn{.relu}.f16x2 from a pair of narrow codes."""
    form = _FORMATS[name]
    kind = "i8" if form.storage == 4 else "i16"

    def widen(body: Emitter, packed: str) -> str:
        codes = (
            body.binary("lshr", "i32", packed, splat("i32", place)) for place in (0, form.storage)
        )
        return join_pair(body, *(_widened(body, code, form, relu) for code in codes))

    packed = e.cast("zext", e.get(i.operands[1], kind), kind, "i32")
    function = f"widen_{name}{'_relu' * relu}"
    value = e.shared_function(function, widen, packed, kind="i32", result="i32")
    e.set(i.operands[0], "i32", value)


def _widened(e: Emitter, code: str, form: Format, relu: bool) -> str:
    """i32 lanes, whose low bits are codes, to i16 lanes holding f16."""
    sign = e.binary("and", "i32", code, splat("i32", 1 << form.width - 1))
    magnitude = e.binary("and", "i32", code, splat("i32", (1 << form.width - 1) - 1))
    bits = e.binary("shl", "i32", magnitude, splat("i32", 23 - form.mantissa))
    scale = e.float_constant(254 - form.bias << 23)
    value = e.binary("fmul", "float", e.cast("bitcast", bits, "i32", "float"), scale)
    half = float_to_half(e, value, "f16")
    negative = e.compare("ne", "i32", sign, splat("i32", 0))
    signed = e.binary("or", "i16", half, splat("i16", 0x8000))
    half = e.select(negative, "i16", splat("i16", 0) if relu else signed, half)
    # Infinity, which e5m2 alone has, lies one above the greatest finite code.
    if form.nan != form.greatest:
        least = form.greatest + (2 if form.mantissa == 2 else 1)
        nan = e.compare("uge", "i32", magnitude, splat("i32", least))
        half = e.select(nan, "i16", splat("i16", 0x7FFF), half)
    return half


def _stochastic(e: Emitter, i: Instruction, options: list[str], to: str, source: str) -> None:
    """cvt.rs{.relu}{.satfinite}.{f16x2,bf16x2}.f32 d, a, b, rbits and .x4 d, {a, b, e, f}, rbits.

    In both, the upper half of rbits is for the first and the lower half for the last operands.
    f16 takes the low 13 bits of a half. In the .x4 forms two operands share 16 bits: a half for
    8- and 6-bit results; for e2m1 a byte of each half, the upper bytes for a and b. Of each two the
    first reads them in reverse order: the PTX ISA shows that as a figure alone, and measurements
    on a B200 that others published agree with it.
    """
    if source != "f32":
        raise unknown(i, "stochastic rounding converts from f32")
    if to in ("f16x2", "bf16x2"):
        _accept(i, options, ("rs", "relu", "satfinite"), ("rs",))
        if len(i.operands) != 4:
            raise unknown(i, "expected d, a, b and the random bits")
        form, count = _FORMATS[to[:-2]], 13 if to == "f16x2" else 16
        bits = e.get(i.operands[3], "i32")
        fields = [
            e.binary("and", "i32", part, splat("i32", (1 << count) - 1))
            for part in (e.binary("lshr", "i32", bits, splat("i32", 16)), bits)
        ]
        sources: Sequence[Any] = i.operands[1:3]
    else:
        _accept(i, options, ("rs", "relu", "satfinite"), ("rs", "satfinite"))
        if to not in QUADS or len(i.operands) != 3 or len(i.operands[1].items) != 4:
            raise unknown(i, "expected d, {a, b, e, f} and the random bits of a .x4 format")
        form, count, sources = _FORMATS[to[:-2]], 16, i.operands[1].items
        fields = _random_fields(e, e.get(i.operands[2], "i32"), form)
    codes = [
        _encode(
            e,
            e.get(op, "float"),
            form,
            "relu" in options,
            (e.cast("zext", field, "i32", "i64"), count),
            "satfinite" in options,
        )
        for op, field in zip(sources, fields, strict=True)
    ]
    _set_codes(e, i, form, codes)


def _random_fields(e: Emitter, bits: str, form: Format) -> list[str]:
    """The 16 random bits of a, b, e and f as i32 lanes."""
    if form.storage == 4:
        # Bytes 3, 1, 2, 0: then the two for a and b stand in the upper half, too.
        middle = e.binary(
            "and",
            "i32",
            e.binary("xor", "i32", bits, e.binary("lshr", "i32", bits, splat("i32", 8))),
            splat("i32", 0xFF00),
        )
        swap = e.binary("or", "i32", middle, e.binary("shl", "i32", middle, splat("i32", 8)))
        bits = e.binary("xor", "i32", bits, swap)
    fields = []
    for field in (
        e.binary("lshr", "i32", bits, splat("i32", 16)),
        e.binary("and", "i32", bits, splat("i32", 0xFFFF)),
    ):
        reverse = e.binary("lshr", "i32", e.intrinsic("bitreverse", "i32", field), splat("i32", 16))
        fields += [reverse, field]
    return fields


def _convert_scales(e: Emitter, i: Instruction, options: list[str], to: str, source: str) -> None:
    """cvt.{rz,rp}{.satfinite}.ue8m0x2.{f32,bf16x2} and cvt.rn.bf16x2.ue8m0x2."""
    if source == SCALES:
        if to != "bf16x2" or options != ["rn"]:
            raise unknown(i, "ue8m0x2 converts to bf16x2 with .rn")
        packed = e.cast("zext", e.get(i.operands[1], "i16"), "i16", "i32")
        halves = [_widen_scale(e, packed, place) for place in (0, 8)]
        return e.set(i.operands[0], "i32", join_pair(e, *halves))
    if source not in ("f32", "bf16x2") or options not in (
        ["rz"],
        ["rp"],
        ["rz", "satfinite"],
        ["rp", "satfinite"],
    ):
        raise unknown(i, "ue8m0x2 comes from f32 or bf16x2 with .rz or .rp and maybe .satfinite")
    codes = [
        _scale_code(e, value, options[0] == "rp", "satfinite" in options)
        for value in _source_pair(e, i, source)
    ]
    _set_codes(e, i, _FORMATS["e4m3"], codes)


def _scale_code(e: Emitter, value: str, up: bool, satfinite: bool) -> str:
    """The power of two at or next to the magnitude of f32 lanes, as its exponent plus 127."""
    bits = e.cast("bitcast", value, "float", "i32")
    magnitude = e.binary("and", "i32", bits, splat("i32", 0x7FFFFFFF))
    if up:
        # 2^-127, code 0, is the subnormal 0x400000.
        step = e.binary("add", "i32", magnitude, splat("i32", 0x7FFFFF))
        code = e.binary("lshr", "i32", step, splat("i32", 23))
        low = e.compare("ule", "i32", magnitude, splat("i32", 0x400000))
        code = e.select(low, "i32", splat("i32", 0), code)
    else:
        code = e.binary("lshr", "i32", magnitude, splat("i32", 23))
    code = e.intrinsic("umin", "i32", code, splat("i32", 254 if satfinite else 255))
    nan = e.compare("ugt", "i32", magnitude, splat("i32", 0x7F800000))
    return e.select(nan, "i32", splat("i32", 255), code)


def _widen_scale(e: Emitter, packed: str, place: int) -> str:
    """One byte of i32 lanes to the bits of a bf16."""
    code = e.binary(
        "and", "i32", e.binary("lshr", "i32", packed, splat("i32", place)), splat("i32", 255)
    )
    bits = e.binary("shl", "i32", code, splat("i32", 7))
    least = e.compare("eq", "i32", code, splat("i32", 0))
    bits = e.select(least, "i32", splat("i32", 0x40), bits)
    nan = e.compare("eq", "i32", code, splat("i32", 255))
    bits = e.select(nan, "i32", splat("i32", 0x7FFF), bits)
    return e.cast("trunc", bits, "i32", "i16")
