"""Approximate functions of the multi-function unit (PTX ISA 9.7.3.13 to 9.7.3.21).

The ISA bounds their errors but does not define their bits. Here: rcp, sqrt, rsqrt are correctly
rounded (or within 1 ulp); ex2 is a polynomial in f32 with relative error below 2^-23; lg2 is
evaluated in double, sin and cos too, after the hardware's reduction of the argument. Special values
are those of the ISA's tables, NaN results are PTX's canonical NaN.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

from sm100_sim.isa.columns import ByModifier, Mix
from sm100_sim.isa.emitter import Emitter, splat
from sm100_sim.isa.table import computes, split_modifiers, unknown
from sm100_sim.ptx.parser import Instruction

from .floating import (
    CANONICAL_NAN,
    float_to_half,
    flush,
    half_to_float,
    join_pair,
    round_directed,
    split_pair,
)

# 2^f on [-1/2, 1/2] as 1 + f * (c1 + f * (c2 + ...)): minimax in relative error, rounded to f32;
# error 1.6e-8 before the rounding of the evaluation.
_EX2 = (0x3F317218, 0x3E75FDEE, 0x3D635774, 0x3C1D96A6, 0x3AAF9F29, 0x3920FDDD)
_MAGIC = 0x4B400000  # 1.5 * 2^23: adding it rounds to an integer, which the low bits then hold
_PER_RADIAN = 0.15915493667125702  # 1 / (2 pi) in f32, 0x3E22F983
_HALF_TYPES = ("f16", "f16x2", "bf16", "bf16x2")


def _f64(value: float) -> int:
    return struct.unpack("<Q", struct.pack("<d", value))[0]


def _f32(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def _nan(e: Emitter, where: str, value: str) -> str:
    return e.select(where, "float", e.float_constant(CANONICAL_NAN), value)


def exp2(e: Emitter, x: str, ftz: bool) -> str:
    """2^x on f32 lanes; with ftz, subnormal results are +0, otherwise they are rounded once."""
    return e.shared_function("ex2_ftz" if ftz else "ex2", lambda e, x: _exp2(e, x, ftz), x)


def _exp2(e: Emitter, x: str, ftz: bool) -> str:
    low = -126.0 if ftz else -152.0
    above = e.compare("olt", "float", x, e.float_constant(_f32(128.0)))
    t = e.select(above, "float", x, e.float_constant(_f32(128.0)))
    t = e.select(
        e.compare("ogt", "float", t, e.float_constant(_f32(low))),
        "float",
        t,
        e.float_constant(_f32(low)),
    )
    magic = e.float_constant(_MAGIC)
    shifted = e.binary("fadd", "float", t, magic)
    f = e.binary("fsub", "float", t, e.binary("fsub", "float", shifted, magic))
    p = e.float_constant(_EX2[-1])
    for coefficient in (*_EX2[-2::-1], 0x3F800000):
        p = e.intrinsic("fma", "float", p, f, e.float_constant(coefficient))
    # The integer part stands in the low bits of the shifted value; the rest is shifted out.
    exponent = e.binary("shl", "i32", e.cast("bitcast", shifted, "float", "i32"), splat("i32", 23))
    bits = e.binary("add", "i32", e.cast("bitcast", p, "float", "i32"), exponent)
    result = e.cast("bitcast", bits, "i32", "float")
    tiny = e.compare("olt", "float", x, e.float_constant(_f32(-126.0)))
    if ftz:
        small = e.float_constant(0)
    else:
        raised = e.binary("add", "i32", bits, splat("i32", 64 << 23))
        small = e.binary(
            "fmul",
            "float",
            e.cast("bitcast", raised, "i32", "float"),
            e.float_constant(_f32(2.0**-64)),
        )
    result = e.select(tiny, "float", small, result)
    result = e.select(
        e.compare("oge", "float", x, e.float_constant(_f32(128.0))),
        "float",
        e.float_constant(0x7F800000),
        result,
    )
    return _nan(e, e.compare("uno", "float", x, x), result)


def _by_type(e: Emitter, i: Instruction, type_name: str, function: Callable[[str], str]) -> None:
    """Apply an f32 function to f32 or half-precision operands."""
    destination, source = i.operands
    if type_name == "f32":
        return e.set(destination, "float", function(e.get(source, "float")))
    parts = split_pair(e, source) if type_name.endswith("x2") else (e.get(source, "i16"),)
    results = [
        float_to_half(e, function(half_to_float(e, part, type_name)), type_name) for part in parts
    ]
    if len(results) == 2:
        return e.set(destination, "i32", join_pair(e, *results))
    e.set(destination, "i16", results[0])


_APPROXIMATE = ByModifier({"approx": Mix.SPECIAL}, None)


@computes("ex2", statistics="mufu.ex2", mix=Mix.EXP2)
def ex2(e: Emitter, i: Instruction) -> None:
    """ex2.approx{.ftz}.{f32,f16,f16x2,bf16,bf16x2}: relative error below 2^-22 (f32)."""
    _, ftz, type_name = split_modifiers(i, ("approx",), ("ftz", ""), ("f32", *_HALF_TYPES))
    _by_type(e, i, type_name, lambda x: exp2(e, x, bool(ftz)))


@computes("tanh", statistics="mufu.tanh", mix=_APPROXIMATE)
def tanh(e: Emitter, i: Instruction) -> None:
    """tanh.approx.{f32,f16,f16x2,bf16,bf16x2}: relative error below 2^-11."""
    _, type_name = split_modifiers(i, ("approx",), ("f32", *_HALF_TYPES))

    def function(e: Emitter, x: str) -> str:
        magnitude = e.intrinsic("fabs", "float", x)
        scaled = e.binary("fmul", "float", magnitude, e.float_constant(_f32(2.885390081777927)))
        power = exp2(e, scaled, True)
        one, two = e.float_constant(_f32(1.0)), e.float_constant(_f32(2.0))
        large = e.binary(
            "fsub",
            "float",
            one,
            e.binary("fdiv", "float", two, e.binary("fadd", "float", power, one)),
        )
        # Near zero the difference cancels: use the odd series there.
        square = e.binary("fmul", "float", magnitude, magnitude)
        series = e.float_constant(_f32(-17 / 315))
        for term in (2 / 15, -1 / 3, 1.0):
            series = e.intrinsic("fma", "float", series, square, e.float_constant(_f32(term)))
        small = e.binary("fmul", "float", series, magnitude)
        near = e.compare("olt", "float", magnitude, e.float_constant(_f32(0.25)))
        result = e.select(near, "float", small, large)
        return _nan(e, e.compare("uno", "float", x, x), e.intrinsic("copysign", "float", result, x))

    _by_type(e, i, type_name, lambda x: e.shared_function("tanh", function, x))


@computes("rcp", "sqrt", statistics=lambda i: f"mufu.{i.opcode}", mix=_APPROXIMATE)
def reciprocal_root(e: Emitter, i: Instruction) -> None:
    """rcp, sqrt{.approx,.rn}{.ftz}.f32 and .rn.f64: correctly rounded in every form."""
    mode, ftz, type_name = split_modifiers(
        i, ("approx", "rn", "rz", "rm", "rp"), ("ftz", ""), ("f32", "f64")
    )
    if mode not in ("approx", "rn") or type_name == "f64" and mode != "rn":
        raise unknown(i, "implemented are .approx and .rn for f32, .rn for f64")
    kind = "float" if type_name == "f32" else "double"

    def function(e: Emitter, x: str) -> str:
        x = flush(e, x) if ftz else x
        if i.opcode == "sqrt":
            result = e.intrinsic("sqrt", kind, x)
        else:
            one = e.float_constant(_f32(1.0) if kind == "float" else _f64(1.0), kind)
            result = e.binary("fdiv", kind, one, x)
        if kind == "double":
            return result
        result = flush(e, result) if ftz else result
        return _nan(e, e.compare("uno", "float", result, result), result)

    name = "_".join(filter(None, (i.opcode, ftz, kind)))
    e.set(
        i.operands[0],
        kind,
        e.shared_function(name, function, e.get(i.operands[1], kind), kind=kind, result=kind),
    )


@computes("rsqrt", statistics="mufu.rsqrt", mix=_APPROXIMATE)
def reciprocal_square_root(e: Emitter, i: Instruction) -> None:
    """rsqrt.approx{.ftz}.f32: rounded from double."""
    _, ftz, _ = split_modifiers(i, ("approx",), ("ftz", ""), ("f32",))
    x = e.get(i.operands[1], "float")
    x = flush(e, x) if ftz else x
    root = e.intrinsic("sqrt", "double", e.cast("fpext", x, "float", "double"))
    value = e.binary("fdiv", "double", e.float_constant(_f64(1.0), "double"), root)
    result = e.cast("fptrunc", value, "double", "float")
    e.set(i.operands[0], "float", _nan(e, e.compare("uno", "float", result, result), result))


@computes("lg2", statistics="mufu.lg2", mix=_APPROXIMATE)
def lg2(e: Emitter, i: Instruction) -> None:
    """lg2.approx{.ftz}.f32, rounded from double.

    x = m * 2^k with m in [sqrt(1/2), sqrt(2)); log2(m) = 2/ln(2) * atanh((m-1)/(m+1)) as a series
    to the 15th power, whose remainder is below 1e-14.
    """
    _, ftz, _ = split_modifiers(i, ("approx",), ("ftz", ""), ("f32",))
    x = e.get(i.operands[1], "float")
    x = flush(e, x) if ftz else x
    wide = e.cast("bitcast", e.cast("fpext", x, "float", "double"), "double", "i64")
    # Every f32, subnormal or not, is a normal double.
    offset = e.binary("sub", "i64", wide, splat("i64", _f64(0.5**0.5)))
    k = e.binary("ashr", "i64", offset, splat("i64", 52))
    mantissa = e.binary("sub", "i64", wide, e.binary("shl", "i64", k, splat("i64", 52)))
    m = e.cast("bitcast", mantissa, "i64", "double")
    one = e.float_constant(_f64(1.0), "double")
    t = e.binary(
        "fdiv", "double", e.binary("fsub", "double", m, one), e.binary("fadd", "double", m, one)
    )
    square = e.binary("fmul", "double", t, t)
    series = e.float_constant(_f64(1 / 15), "double")
    for power in (13, 11, 9, 7, 5, 3, 1):
        series = e.intrinsic(
            "fma", "double", series, square, e.float_constant(_f64(1 / power), "double")
        )
    scale = e.float_constant(_f64(2.8853900817779268), "double")
    fraction = e.binary("fmul", "double", e.binary("fmul", "double", series, t), scale)
    k32 = e.cast("trunc", k, "i64", "i32")
    total = e.binary("fadd", "double", e.cast("sitofp", k32, "i32", "double"), fraction)
    result = e.cast("fptrunc", total, "double", "float")
    zero, infinity = e.float_constant(0), e.float_constant(0x7F800000)
    result = e.select(
        e.compare("oeq", "float", x, zero), "float", e.float_constant(0xFF800000), result
    )
    result = e.select(e.compare("oeq", "float", x, infinity), "float", infinity, result)
    e.set(i.operands[0], "float", _nan(e, e.compare("ult", "float", x, zero), result))


@computes("sin", "cos", statistics=lambda i: f"mufu.{i.opcode}", mix=_APPROXIMATE)
def sine(e: Emitter, i: Instruction) -> None:
    """sin, cos.approx{.ftz}.f32 as the hardware does it, evaluated in double.

    The argument is first turned into revolutions in f32: x times 1/(2 pi), rounded towards zero.
    That rounding is most of the error, which grows with |x|; large |x| become whole revolutions.
    A quarter n of a revolution is split off; series to the 13th and 14th power do the rest.
    """
    _, ftz, _ = split_modifiers(i, ("approx",), ("ftz", ""), ("f32",))
    x = e.get(i.operands[1], "float")
    x = flush(e, x) if ftz else x
    wide = e.binary(
        "fmul",
        "double",
        e.cast("fpext", x, "float", "double"),
        e.float_constant(_f64(_PER_RADIAN), "double"),
    )
    turns = e.cast("fpext", round_directed(e, wide, "rz"), "float", "double")
    whole = e.intrinsic("roundeven", "double", turns)
    turns = e.binary("fsub", "double", turns, whole)
    n = e.intrinsic(
        "roundeven",
        "double",
        e.binary("fmul", "double", turns, e.float_constant(_f64(4.0), "double")),
    )
    rest = e.intrinsic("fma", "double", n, e.float_constant(_f64(-0.25), "double"), turns)
    r = e.binary("fmul", "double", rest, e.float_constant(_f64(2 * math.pi), "double"))
    quadrant = e.intrinsic("fptosi.sat", "double", n, result="i64")
    if i.opcode == "cos":
        quadrant = e.binary("add", "i64", quadrant, splat("i64", 1))
    square = e.binary("fmul", "double", r, r)
    sin_series = _series(e, square, [(-1) ** k / math.factorial(2 * k + 1) for k in range(7)])
    cos_series = _series(e, square, [(-1) ** k / math.factorial(2 * k) for k in range(8)])
    odd = e.compare("ne", "i64", e.binary("and", "i64", quadrant, splat("i64", 1)), splat("i64", 0))
    value = e.select(odd, "double", cos_series, e.binary("fmul", "double", sin_series, r))
    flip = e.compare(
        "ne", "i64", e.binary("and", "i64", quadrant, splat("i64", 2)), splat("i64", 0)
    )
    value = e.select(flip, "double", e.name_for(f"fneg <32 x double> {value}"), value)
    result = e.cast("fptrunc", value, "double", "float")
    if i.opcode == "sin":
        # Zeros keep the sign of the argument.
        zero = e.compare("oeq", "float", result, e.float_constant(0))
        result = e.select(zero, "float", e.intrinsic("copysign", "float", result, x), result)
    finite = e.compare(
        "olt", "float", e.intrinsic("fabs", "float", x), e.float_constant(0x7F800000)
    )
    e.set(
        i.operands[0], "float", e.select(finite, "float", result, e.float_constant(CANONICAL_NAN))
    )


def _series(e: Emitter, x: str, coefficients: list[float]) -> str:
    value = e.float_constant(_f64(coefficients[-1]), "double")
    for coefficient in coefficients[-2::-1]:
        value = e.intrinsic(
            "fma", "double", value, x, e.float_constant(_f64(coefficient), "double")
        )
    return value
