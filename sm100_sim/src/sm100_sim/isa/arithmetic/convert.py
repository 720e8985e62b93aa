"""cvt: conversions between number formats (PTX ISA 9.7.9.22)."""

from __future__ import annotations

from sm100_sim.isa.columns import ByModifier, Mix
from sm100_sim.isa.emitter import Emitter, splat
from sm100_sim.isa.table import computes, split_modifiers, unknown
from sm100_sim.ptx.parser import Instruction

from . import narrow
from .floating import (
    CANONICAL_NAN,
    float_to_half,
    flush,
    flush_rounded,
    half_to_float,
    join_pair,
    round_directed,
    round_to_odd_f32,
    saturate,
)

_INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
_FLOATS = ("f16", "bf16", "f32", "f64")
_PACKED = ("f16x2", "bf16x2")
_ROUNDINGS = ("rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "rna", "")
_TO_INTEGRAL = {"rni": "roundeven", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


@computes(
    "cvt",
    statistics="cvt",
    addressing=True,
    mix=ByModifier(dict.fromkeys(("bf16x2", "f16x2", "e4m3x2", "e5m2x2"), Mix.NARROW), None),
)
def convert(e: Emitter, i: Instruction) -> None:
    """cvt{.rounding}{.ftz}{.relu}{.satfinite}{.sat}.dtype.atype d, a{, b}."""
    if narrow.is_narrow(i):
        return narrow.convert(e, i)
    if i.modifiers[-2:-1] == ("tf32",):
        return _to_tf32(e, i)
    rounding, ftz, relu, satfinite, sat, to, source = split_modifiers(
        i,
        _ROUNDINGS,
        ("ftz", ""),
        ("relu", ""),
        ("satfinite", ""),
        ("sat", ""),
        (*_INTEGERS, *_FLOATS, *_PACKED),
        (*_INTEGERS, *_FLOATS),
    )
    if to in _PACKED:
        return _to_packed(e, i, rounding, bool(relu), bool(satfinite), to, source)
    if to in _INTEGERS:
        if relu or satfinite:
            raise unknown(i, "integers have no .relu or .satfinite")
        if source in _INTEGERS:
            return _integer_to_integer(e, i, bool(sat), to, source)
        return _float_to_integer(e, i, rounding, bool(ftz), to, source)
    if source in _INTEGERS:
        return _integer_to_float(e, i, rounding, bool(sat), to, source)
    _float_to_float(e, i, (rounding, bool(ftz), bool(relu), bool(satfinite), bool(sat)), to, source)


def _integer_to_integer(e: Emitter, i: Instruction, sat: bool, to: str, source: str) -> None:
    width, source_width = int(to[1:]), int(source[1:])
    value = e.get(i.operands[1], f"i{source_width}")
    if sat:
        value, source_width = _clamp_integer(e, value, to, source), 64
    if width < source_width:
        value = e.cast("trunc", value, f"i{source_width}", f"i{width}")
    elif width > source_width:
        value = e.cast(
            "sext" if source[0] == "s" else "zext", value, f"i{source_width}", f"i{width}"
        )
    _set_integer(e, i, to, value)


def _clamp_integer(e: Emitter, value: str, to: str, source: str) -> str:
    """Source lanes as i64, clamped to the range of ``to``."""
    signed = source[0] == "s"
    wide = e.cast("sext" if signed else "zext", value, f"i{source[1:]}", "i64")
    bits = int(to[1:])
    least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if to[0] == "s" else (0, (1 << bits) - 1)
    if signed:
        wide = e.intrinsic("smax", "i64", wide, splat("i64", least))
        # An s64 never exceeds u64.
        return wide if bits == 64 else e.intrinsic("smin", "i64", wide, splat("i64", most))
    return e.intrinsic("umin", "i64", wide, splat("i64", most))


def _set_integer(e: Emitter, i: Instruction, to: str, value: str) -> None:
    """Destinations wider than the type are sign- or zero-extended to the register."""
    kind, destination = f"i{to[1:]}", i.operands[0]
    if destination.kind == "reg" and to[0] == "s":
        register = destination.register
        width = {"r64": 64}.get(register.file, 16 if register.type.endswith("16") else 32)
        if width > int(to[1:]):
            value, kind = e.cast("sext", value, kind, f"i{width}"), f"i{width}"
    e.set(destination, kind, value)


def _source_float(e: Emitter, i: Instruction, source: str, ftz: bool) -> tuple[str, str]:
    """Kind and lanes of the source, half precisions widened to float."""
    if source == "f64":
        return "double", e.get(i.operands[1], "double")
    if source in ("f16", "bf16"):
        return "float", half_to_float(e, e.get(i.operands[1], "i16"), source)
    value = e.get(i.operands[1], "float")
    return "float", flush(e, value) if ftz else value


def _float_to_integer(
    e: Emitter, i: Instruction, rounding: str, ftz: bool, to: str, source: str
) -> None:
    """Rounded as the modifier says, clamped to the type (9.7.9.22, notes).

    NaN gives 0, but the type's top bit alone if the source is f64 or the result has 64 bits.
    """
    if rounding not in _TO_INTEGRAL:
        raise unknown(i, "a conversion to integer needs .rni, .rzi, .rmi or .rpi")
    kind, value = _source_float(e, i, source, ftz)
    nan = e.compare("uno", kind, value, value)
    value = e.intrinsic(_TO_INTEGRAL[rounding], kind, value)
    name = "fptosi.sat" if to[0] == "s" else "fptoui.sat"
    width = max(int(to[1:]), 32)
    result = e.intrinsic(name, kind, value, result=f"i{width}")
    if int(to[1:]) < 32:
        result = _clamp_integer(e, result, to, f"{to[0]}32")
        result = e.cast("trunc", result, "i64", f"i{to[1:]}")
    if kind == "double" or to[1:] == "64":
        top = splat(f"i{to[1:]}", 1 << int(to[1:]) - 1)
        result = e.select(nan, f"i{to[1:]}", top, result)
    _set_integer(e, i, to, result)


def _integer_to_float(
    e: Emitter, i: Instruction, rounding: str, sat: bool, to: str, source: str
) -> None:
    kind = f"i{source[1:]}"
    value = e.get(i.operands[1], kind)
    operation = "sitofp" if source[0] == "s" else "uitofp"
    if to == "f64":
        if rounding not in ("rn", "") or sat:
            raise unknown(i, "conversions to f64 are implemented with .rn")
        return e.set(i.operands[0], "double", e.cast(operation, value, kind, "double"))
    if kind == "i64" and (rounding != "rn" or to != "f32"):
        raise unknown(i, "64-bit integers convert to f32 with .rn only")
    if kind == "i64":
        result = e.cast(operation, value, kind, "float")
    else:
        # Exact in double, so every rounding starts from the true value.
        result = _round_double(e, i, e.cast(operation, value, kind, "double"), rounding, to)
        if to != "f32":
            return e.set(i.operands[0], "i16", result)
    e.set(i.operands[0], "float", saturate(e, result) if sat else result)


def _round_double(e: Emitter, i: Instruction, value: str, rounding: str, to: str) -> str:
    """Exact double lanes to f32, or to the bits of a half precision (from f32 rounded to odd)."""
    if to == "f32":
        return round_directed(e, value, rounding or "rn")
    if rounding not in ("rn", "rz"):
        raise unknown(i, "half precisions round with .rn and .rz")
    return float_to_half(e, round_to_odd_f32(e, value), to, rounding)


def _float_to_float(e: Emitter, i: Instruction, options: tuple, to: str, source: str) -> None:
    rounding, ftz, relu, satfinite, sat = options
    if rounding in _TO_INTEGRAL:
        return _to_integral(e, i, rounding, ftz, sat, to, source)
    kind, value = _source_float(e, i, source, ftz)
    if to == "f64":
        if sat or relu or satfinite:
            raise unknown(i, "conversions to f64 take no .sat, .relu or .satfinite")
        return e.set(i.operands[0], "double", e.cast("fpext", value, kind, "double"))
    if to == "f32":
        if relu or satfinite:
            raise unknown(i, "f32 has no .relu or .satfinite")
        if kind == "double":
            wide, value = value, round_directed(e, value, rounding or "rn")
            value = flush_rounded(e, wide, value, rounding or "rn") if ftz else value
        return e.set(i.operands[0], "float", saturate(e, value) if sat else value)
    if kind == "double":
        if relu or satfinite or sat:
            raise unknown(i, "f64 converts to half precisions without .relu, .satfinite, .sat")
        return e.set(i.operands[0], "i16", _round_double(e, i, value, rounding, to))
    if sat:
        value = saturate(e, value)
    e.set(i.operands[0], "i16", _to_half(e, i, value, rounding, relu, satfinite, to))


def _to_half(
    e: Emitter, i: Instruction, value: str, rounding: str, relu: bool, satfinite: bool, to: str
) -> str:
    """f32 lanes to the bits of f16 or bf16, with .relu (negative to +0) and .satfinite."""
    if rounding not in ("rn", "rz"):
        raise unknown(i, "half precisions round with .rn and .rz")
    if relu:
        positive = e.compare("uge", "float", value, e.float_constant(0))
        nonzero = e.compare("une", "float", value, e.float_constant(0))
        value = e.select(
            e.binary("and", "i1", positive, nonzero), "float", value, e.float_constant(0)
        )
    bits = float_to_half(e, value, to, rounding)
    if satfinite:
        infinity = 0x7C00 if to == "f16" else 0x7F80
        magnitude = e.binary("and", "i16", bits, splat("i16", 0x7FFF))
        overflow = e.compare("eq", "i16", magnitude, splat("i16", infinity))
        sign = e.binary("and", "i16", bits, splat("i16", 0x8000))
        finite = e.binary("or", "i16", sign, splat("i16", infinity - 1))
        bits = e.select(overflow, "i16", finite, bits)
    return bits


def _to_integral(
    e: Emitter, i: Instruction, rounding: str, ftz: bool, sat: bool, to: str, source: str
) -> None:
    """cvt.{rni,rzi,rmi,rpi}.f.f: to an integral value of the same type."""
    if to != source or to == "bf16":
        raise unknown(i, "rounding to an integral value keeps the type, f16, f32 or f64")
    kind, value = _source_float(e, i, source, ftz)
    value = e.intrinsic(_TO_INTEGRAL[rounding], kind, value)
    if sat:
        value = saturate(e, value)
    if to == "f16":
        return e.set(i.operands[0], "i16", float_to_half(e, value, to))
    e.set(i.operands[0], kind, value)


def _to_packed(
    e: Emitter, i: Instruction, rounding: str, relu: bool, satfinite: bool, to: str, source: str
) -> None:
    """cvt.{rn,rz}{.relu}{.satfinite}.{f16x2,bf16x2}.f32 d, a, b: a goes to the upper half."""
    if source != "f32" or len(i.operands) != 3:
        raise unknown(i, "packed conversions are implemented from two f32")

    def function(e: Emitter, high: str, low: str) -> str:
        halves = (
            _to_half(e, i, value, rounding, relu, satfinite, to[:-2]) for value in (low, high)
        )
        return join_pair(e, *halves)

    parts = "cvt", rounding, "relu" if relu else "", "satfinite" if satfinite else "", to
    name = "_".join(filter(None, parts))
    e.set(
        i.operands[0],
        "i32",
        e.shared_function(
            name, function, *(e.get(op, "float") for op in i.operands[1:3]), result="i32"
        ),
    )


def _to_tf32(e: Emitter, i: Instruction) -> None:
    """cvt.{rn,rz}{.satfinite}{.relu}.tf32.f32 and cvt.rna{.satfinite}: 10 mantissa bits."""
    rounding, satfinite, relu, _, _ = split_modifiers(
        i, ("rn", "rna", "rz"), ("satfinite", ""), ("relu", ""), ("tf32",), ("f32",)
    )
    if relu and rounding == "rna":
        raise unknown(i, ".rna takes no .relu")
    value = e.get(i.operands[1], "float")
    bits = e.cast("bitcast", value, "float", "i32")
    nan = e.compare("uno", "float", value, value)
    if relu:
        positive = e.compare("ogt", "float", value, e.float_constant(0))
        bits = e.select(positive, "i32", bits, splat("i32", 0))
    rounded = bits
    if rounding == "rn":
        last = e.binary(
            "and", "i32", e.binary("lshr", "i32", bits, splat("i32", 13)), splat("i32", 1)
        )
        rounded = e.binary("add", "i32", e.binary("add", "i32", bits, splat("i32", 0xFFF)), last)
    elif rounding == "rna":
        rounded = e.binary("add", "i32", bits, splat("i32", 0x1000))
    # Infinity and NaN must not be carried into. .rna cuts them, which may turn NaN into infinity.
    magnitude = e.binary("and", "i32", bits, splat("i32", 0x7FFFFFFF))
    finite = e.compare("ult", "i32", magnitude, splat("i32", 0x7F800000))
    bits = e.binary("and", "i32", e.select(finite, "i32", rounded, bits), splat("i32", 0xFFFFE000))
    if satfinite:
        magnitude = e.binary("and", "i32", bits, splat("i32", 0x7FFFFFFF))
        sign = e.binary("and", "i32", bits, splat("i32", 0x80000000))
        finite = e.intrinsic("umin", "i32", magnitude, splat("i32", 0x7F7FE000))
        bits = e.binary("or", "i32", sign, finite)
    if rounding != "rna" or satfinite:
        bits = e.select(nan, "i32", splat("i32", CANONICAL_NAN & 0xFFFFE000), bits)
    e.set(i.operands[0], "i32", bits)
