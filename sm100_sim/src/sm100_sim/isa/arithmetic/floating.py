"""Floating-point arithmetic (PTX ISA 9.7.3 to 9.7.5): f32, packed f32x2, half precisions, f64.

Round to nearest is the host's own IEEE arithmetic. Other roundings are exact: the result is formed
in double with the rounding error known (error-free transformations), rounded to odd, and then to
the target in the right direction. Results that are NaN keep the host's payload, except where an
instruction's definition turns on it (min, max, conversions): those give PTX's canonical NaN.

.ftz flushes a result that is subnormal when rounded with an unbounded exponent. One case departs
from that: with .rn on f32 the result has been rounded as a subnormal before, so exact values from
(1 - 2^-24) * 2^-126 to below (1 - 2^-25) * 2^-126 give 2^-126 here and zero on hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sm100_sim.isa.columns import ByModifier, Mix
from sm100_sim.isa.emitter import Emitter, splat
from sm100_sim.isa.table import computes, split_modifiers, unknown
from sm100_sim.ptx.parser import Instruction, Operand

ROUNDINGS = ("rn", "rz", "rm", "rp", "")
CANONICAL_NAN = 0x7FFFFFFF
_SIGN = 0x80000000
_HALF_TYPES = ("f16", "f16x2", "bf16", "bf16x2")
_FLOATS = ("f32", "f32x2", "f64", *_HALF_TYPES)


def flush(e: Emitter, value: str) -> str:
    """.ftz: subnormal f32 lanes become zeros of their sign."""
    bits = e.cast("bitcast", value, "float", "i32")
    exponent = e.binary("and", "i32", bits, splat("i32", 0x7F800000))
    small = e.compare("eq", "i32", exponent, splat("i32", 0))
    zero = e.binary("and", "i32", bits, splat("i32", _SIGN))
    return e.cast("bitcast", e.select(small, "i32", zero, bits), "i32", "float")


def saturate(e: Emitter, value: str) -> str:
    """.sat: clamp to [0, 1]; NaN gives +0."""
    zero, one = e.float_constant(0), e.float_constant(0x3F800000)
    above = e.select(e.compare("ogt", "float", value, zero), "float", value, zero)
    return e.select(e.compare("olt", "float", above, one), "float", above, one)


# Rounding in a direction.


def _two_sum(e: Emitter, a: str, b: str) -> tuple[str, str]:
    """Sum of doubles and its rounding error, exactly (Knuth)."""
    total = e.binary("fadd", "double", a, b)
    part = e.binary("fsub", "double", total, a)
    rest = e.binary("fsub", "double", a, e.binary("fsub", "double", total, part))
    return total, e.binary("fadd", "double", rest, e.binary("fsub", "double", b, part))


def _round_to_odd(e: Emitter, value: str, error: str) -> str:
    """The neighbour of value + error whose last bit is 1, unless it is exact."""
    bits = e.cast("bitcast", value, "double", "i64")
    zero = e.float_constant(0, "double")
    inexact = e.compare("one", "double", error, zero)
    even = e.compare("eq", "i64", e.binary("and", "i64", bits, splat("i64", 1)), splat("i64", 0))
    away = e.compare("ogt", "double", e.binary("fmul", "double", _sign_of(e, value), error), zero)
    step = e.select(away, "i64", splat("i64", 1), splat("i64", -1))
    moved = e.binary("add", "i64", bits, step)
    change = e.binary("and", "i1", inexact, even)
    return e.cast("bitcast", e.select(change, "i64", moved, bits), "i64", "double")


def _sign_of(e: Emitter, value: str) -> str:
    """+1.0 or -1.0."""
    bits = e.cast("bitcast", value, "double", "i64")
    sign = e.binary("and", "i64", bits, splat("i64", -(1 << 63)))
    return e.cast(
        "bitcast", e.binary("or", "i64", sign, splat("i64", 0x3FF0000000000000)), "i64", "double"
    )


def round_directed(e: Emitter, value: str, rounding: str) -> str:
    """Double lanes (exact, or rounded to odd) to f32 by "rn", "rz", "rm" or "rp"."""
    nearest = e.cast("fptrunc", value, "double", "float")
    if rounding == "rn":
        return nearest
    back = e.cast("fpext", nearest, "float", "double")
    bits = e.cast("bitcast", nearest, "float", "i32")
    negative = e.compare("slt", "i32", bits, splat("i32", 0))
    down = e.binary("sub", "i32", bits, splat("i32", 1))
    if rounding == "rz":
        magnitudes = [e.intrinsic("fabs", "double", v) for v in (back, value)]
        wrong = e.compare("ogt", "double", *magnitudes)
        moved = down
    else:
        up = e.binary("add", "i32", bits, splat("i32", 1))
        zero = e.compare(
            "eq", "i32", e.binary("shl", "i32", bits, splat("i32", 1)), splat("i32", 0)
        )
        if rounding == "rm":
            wrong = e.compare("ogt", "double", back, value)
            moved = e.select(negative, "i32", up, down)
            moved = e.select(zero, "i32", splat("i32", _SIGN | 1), moved)
        else:
            wrong = e.compare("olt", "double", back, value)
            moved = e.select(negative, "i32", down, up)
            moved = e.select(zero, "i32", splat("i32", 1), moved)
    return e.cast("bitcast", e.select(wrong, "i32", moved, bits), "i32", "float")


def _exact_sum(e: Emitter, a: str, b: str, rounding: str) -> str:
    """Sum of doubles rounded to odd, with the zero of the rounding direction."""
    total, error = _two_sum(e, a, b)
    odd = _round_to_odd(e, total, error)
    if rounding != "rm":
        return odd
    # x + (-x) is -0 when rounding down; only +0 + +0 stays +0.
    bits = [e.cast("bitcast", v, "double", "i64") for v in (a, b, odd)]
    zero = e.compare("oeq", "double", odd, e.float_constant(0, "double"))
    positive = e.compare("eq", "i64", e.binary("or", "i64", bits[0], bits[1]), splat("i64", 0))
    flip = e.binary("and", "i1", zero, e.binary("xor", "i1", positive, splat("i1", 1)))
    return e.select(flip, "double", e.float_constant(1 << 63, "double"), odd)


def _in_double(e: Emitter, operation: str, values: Sequence[str], rounding: str) -> str:
    """add, mul or fma of f32 lanes as double lanes, exact or rounded to odd."""
    wide = [e.cast("fpext", value, "float", "double") for value in values]
    if operation == "add":
        return _exact_sum(e, wide[0], wide[1], rounding)
    product = e.binary("fmul", "double", wide[0], wide[1])
    return product if operation == "mul" else _exact_sum(e, product, wide[2], rounding)


def round_to_odd_f32(e: Emitter, value: str) -> str:
    """Double lanes to f32 rounded to odd, from which any half precision rounds correctly."""
    cut = round_directed(e, value, "rz")
    exact = e.compare("oeq", "double", e.cast("fpext", cut, "float", "double"), value)
    bits = e.cast("bitcast", cut, "float", "i32")
    odd = e.binary("or", "i32", bits, splat("i32", 1))
    infinite = e.compare(
        "oeq", "float", e.intrinsic("fabs", "float", cut), e.float_constant(0x7F800000)
    )
    keep = e.binary("or", "i1", exact, infinite)
    nan = e.compare("uno", "float", cut, cut)
    keep = e.binary("or", "i1", keep, nan)
    return e.cast("bitcast", e.select(keep, "i32", bits, odd), "i32", "float")


def _f32_operation(
    e: Emitter, operation: str, values: list[str], rounding: str, ftz: str = "", sat: str = ""
) -> str:
    """add, mul or fma of f32 lanes with any rounding; "ftz" flushes the operands, too."""

    def steps(e: Emitter, *values: str) -> str:
        values = tuple(flush(e, v) for v in values) if ftz else values
        if rounding in ("rn", ""):
            result = (
                e.intrinsic("fma", "float", *values)
                if operation == "fma"
                else e.binary(f"f{operation}", "float", *values)
            )
            result = flush(e, result) if ftz else result
        else:
            wide = _in_double(e, operation, values, rounding)
            result = round_directed(e, wide, rounding)
            result = flush_rounded(e, wide, result, rounding) if ftz else result
        return saturate(e, result) if sat else result

    if rounding in ("rn", "") and not (ftz or sat):
        return steps(e, *values)
    name = "_".join(filter(None, (operation, rounding, ftz, sat)))
    return e.shared_function(name, steps, *values)


def flush_rounded(e: Emitter, wide: str, result: str, rounding: str) -> str:
    """.ftz of f32 lanes that `round_directed` made of double lanes.

    A lane is flushed if it would be below 2^-126 rounded to 24 bits with an unbounded exponent.
    """
    magnitude = e.intrinsic("fabs", "double", wide)
    smallest = e.float_constant(0x3810000000000000, "double")
    small = e.compare("olt", "double", magnitude, smallest)
    if rounding == "rn":
        # (1 - 2^-25) * 2^-126 is the tie that goes to 2^-126.
        small = e.compare(
            "olt", "double", magnitude, e.float_constant(0x380FFFFFF0000000, "double")
        )
    elif rounding != "rz":
        zero = e.float_constant(0, "double")
        away = e.compare("olt" if rounding == "rm" else "ogt", "double", wide, zero)
        # Rounded away from zero, only (1 - 2^-24) * 2^-126 and less stay below.
        below = e.compare(
            "ole", "double", magnitude, e.float_constant(0x380FFFFFE0000000, "double")
        )
        small = e.select(away, "i1", below, small)
    bits = e.cast("bitcast", result, "float", "i32")
    signed = e.cast("bitcast", e.binary("and", "i32", bits, splat("i32", _SIGN)), "i32", "float")
    return e.select(small, "float", signed, result)


# Half precision lanes.


def half_to_float(e: Emitter, bits: str, type_name: str) -> str:
    """i16 lanes holding f16 or bf16 to f32 lanes."""
    if type_name.startswith("bf16"):
        wide = e.binary("shl", "i32", e.cast("zext", bits, "i16", "i32"), splat("i32", 16))
        return e.cast("bitcast", wide, "i32", "float")
    return e.cast("fpext", e.cast("bitcast", bits, "i16", "half"), "half", "float")


def float_to_half(e: Emitter, value: str, type_name: str, rounding: str = "rn") -> str:
    """f32 lanes to i16 lanes holding f16 or bf16, rounded "rn" or "rz"; NaN becomes 0x7FFF."""
    nan = e.compare("uno", "float", value, value)
    if type_name.startswith("bf16"):
        bits = e.cast("bitcast", value, "float", "i32")
        if rounding == "rn":
            last = e.binary(
                "and", "i32", e.binary("lshr", "i32", bits, splat("i32", 16)), splat("i32", 1)
            )
            bits = e.binary("add", "i32", e.binary("add", "i32", bits, splat("i32", 0x7FFF)), last)
        half = e.cast("trunc", e.binary("lshr", "i32", bits, splat("i32", 16)), "i32", "i16")
    else:
        rounded = e.cast("fptrunc", value, "float", "half")
        half = e.cast("bitcast", rounded, "half", "i16")
        if rounding == "rz":
            back = e.intrinsic("fabs", "float", e.cast("fpext", rounded, "half", "float"))
            wrong = e.compare("ogt", "float", back, e.intrinsic("fabs", "float", value))
            half = e.select(wrong, "i16", e.binary("sub", "i16", half, splat("i16", 1)), half)
    return e.select(nan, "i16", splat("i16", 0x7FFF), half)


def split_pair(e: Emitter, op: Operand) -> tuple[str, str]:
    """Low and high i16 lanes of a 32-bit operand."""
    return split_word(e, e.get(op, "i32"))


def split_word(e: Emitter, value: str) -> tuple[str, str]:
    """Low and high i16 lanes of i32 lanes."""
    high = e.binary("lshr", "i32", value, splat("i32", 16))
    return e.cast("trunc", value, "i32", "i16"), e.cast("trunc", high, "i32", "i16")


def join_pair(e: Emitter, low: str, high: str) -> str:
    """i32 lanes from low and high i16 lanes."""
    upper = e.binary("shl", "i32", e.cast("zext", high, "i16", "i32"), splat("i32", 16))
    return e.binary("or", "i32", upper, e.cast("zext", low, "i16", "i32"))


def _half_lanes(e: Emitter, op: Operand, type_name: str) -> list[str]:
    """A half-precision operand as f32 lanes: one vector, or low and high of a packed pair."""
    return _lanes_of_word(e, e.get(op, "i32" if type_name.endswith("x2") else "i16"), type_name)


def _lanes_of_word(e: Emitter, word: str, type_name: str) -> list[str]:
    """Lanes of half precision, i16 or packed in i32, as f32 lanes: one vector, or low and high."""
    parts = split_word(e, word) if type_name.endswith("x2") else (word,)
    return [half_to_float(e, part, type_name) for part in parts]


def _set_half(e: Emitter, op: Operand, values: list[str]) -> None:
    if len(values) == 2:
        return e.set(op, "i32", join_pair(e, *values))
    e.set(op, "i16", values[0])


# Instructions.


def _apply(e: Emitter, i: Instruction, operation: str, negate_second: bool = False) -> None:
    """add, mul or fma for every float type and rounding."""
    if i.modifiers[-1] in ("f16", "bf16") and i.modifiers[-2:-1] == ("f32",):
        return _apply_mixed(e, i, operation, negate_second)
    rounding, ftz, sat, relu, type_name = split_modifiers(
        i, ROUNDINGS, ("ftz", ""), ("sat", ""), ("relu", ""), _FLOATS
    )
    destination, *sources = i.operands
    if relu and type_name not in _HALF_TYPES:
        raise unknown(i, ".relu is defined for half precisions")
    if type_name == "f64":
        return _apply_double(e, i, operation, negate_second, rounding)

    def compute(values: list[str]) -> str:
        if negate_second:
            values[1] = e.name_for(f"fneg <32 x float> {values[1]}")
        return _f32_operation(e, operation, values, rounding, ftz, sat)

    if type_name == "f32":
        return e.set(destination, "float", compute([e.get(op, "float") for op in sources]))
    if type_name == "f32x2":
        pairs = [e.halves(op, "float") for op in sources]
        low, high = (compute([pair[half] for pair in pairs]) for half in (0, 1))
        return e.set_halves(destination, "float", low, high)
    if rounding not in ("rn", "") or ftz and type_name.startswith("bf16"):
        raise unknown(i, "half precisions are implemented with .rn, .ftz with f16 only")
    kind = "i32" if type_name.endswith("x2") else "i16"
    options = bool(ftz), bool(sat), bool(relu)

    def compute_halves(body: Emitter, *words: str) -> str:
        lanes = [_lanes_of_word(body, word, type_name) for word in words]
        results = [
            _half_result(body, operation, list(values), negate_second, type_name, options)
            for values in zip(*lanes, strict=True)
        ]
        return join_pair(body, *results) if kind == "i32" else results[0]

    name = "_".join((operation, *("negated",) * negate_second, *i.modifiers))
    words = [e.get(op, kind) for op in sources]
    e.set(
        destination, kind, e.shared_function(name, compute_halves, *words, kind=kind, result=kind)
    )


def _apply_mixed(e: Emitter, i: Instruction, operation: str, negate_second: bool) -> None:
    """add, sub, fma{.rnd}{.sat}.f32.{f16,bf16}: the factors, or the first term, are half precision
    and widened exactly; the last operand and the result are f32 (PTX ISA 9.7.5)."""
    rounding, sat, _, type_name = split_modifiers(
        i, ROUNDINGS, ("sat", ""), ("f32",), ("f16", "bf16")
    )
    *narrow, last = i.operands[1:]
    values = [half_to_float(e, e.get(op, "i16"), type_name) for op in narrow]
    values.append(e.get(last, "float"))
    if negate_second:
        values[1] = e.name_for(f"fneg <32 x float> {values[1]}")
    e.set(i.operands[0], "float", _f32_operation(e, operation, values, rounding, sat=sat))


def _half_result(
    e: Emitter,
    operation: str,
    values: list[str],
    negate_second: bool,
    type_name: str,
    options: tuple[bool, bool, bool],
) -> str:
    ftz, sat, relu = options
    if ftz:
        values = [_flush_f16(e, value) for value in values]
    if negate_second:
        values[1] = e.name_for(f"fneg <32 x float> {values[1]}")
    result = round_to_odd_f32(e, _in_double(e, operation, values, "rn"))
    if sat:
        result = saturate(e, result)
    bits = float_to_half(e, result, type_name)
    if relu:
        # Also -0, and what rounds to it, becomes +0.
        positive = e.compare("ugt", "float", result, e.float_constant(0))
        bits = e.select(positive, "i16", bits, splat("i16", 0))
    if ftz:
        # Below 2^-14 * (1 - 2^-12) the result is subnormal when rounded to 11 bits.
        small = e.compare(
            "olt", "float", e.intrinsic("fabs", "float", result), e.float_constant(0x387FF000)
        )
        bits = e.select(small, "i16", e.binary("and", "i16", bits, splat("i16", 0x8000)), bits)
    return bits


def _flush_f16(e: Emitter, value: str) -> str:
    """f16 subnormals, held as f32, to zeros of their sign."""
    small = e.compare(
        "olt", "float", e.intrinsic("fabs", "float", value), e.float_constant(0x38800000)
    )
    zero = e.binary("fmul", "float", value, e.float_constant(0))
    return e.select(small, "float", zero, value)


def _apply_double(
    e: Emitter, i: Instruction, operation: str, negate_second: bool, rounding: str
) -> None:
    if rounding not in ("rn", ""):
        raise unknown(i, "f64 arithmetic is implemented with .rn")
    values = [e.get(op, "double") for op in i.operands[1:]]
    if negate_second:
        values[1] = e.name_for(f"fneg <32 x double> {values[1]}")
    result = (
        e.intrinsic("fma", "double", *values)
        if operation == "fma"
        else e.binary(f"f{operation}", "double", *values)
    )
    e.set(i.operands[0], "double", result)


def add_sub(e: Emitter, i: Instruction) -> None:
    """add, sub of any float type."""
    _apply(e, i, "add", negate_second=i.opcode == "sub")


def multiply(e: Emitter, i: Instruction) -> None:
    """mul of any float type."""
    _apply(e, i, "mul")


def fused(e: Emitter, i: Instruction) -> None:
    """fma, and mad of floats, which is the same on sm_20 and later."""
    _apply(e, i, "fma")


@computes(
    "fma",
    statistics=lambda i: (
        "fma"
        if "f32" in i.modifiers
        else {"f32x2": "fma.f32x2", "f64": "fma.f64"}.get(i.modifiers[-1], "fma.half")
    ),
    mix=ByModifier({"f32x2": Mix.PACKED}, None),
)
def fma(e: Emitter, i: Instruction) -> None:
    """fma{.rnd}{.ftz}{.sat}{.relu}.type d = a * b + c with one rounding."""
    _apply(e, i, "fma")


def divide(e: Emitter, i: Instruction) -> None:
    """div{.approx,.full,.rn,.rz,...}{.ftz}.f32 and .rn.f64: correctly rounded in every form, which
    lies within the bounds of .approx and .full (2 ulp).

    .approx multiplies with a reciprocal that is flushed: dividing by more than 2^126 gives zero,
    or NaN for an infinite dividend.
    """
    kind, ftz, type_name = split_modifiers(
        i, ("approx", "full", *ROUNDINGS), ("ftz", ""), ("f32", "f64")
    )
    if type_name == "f64":
        if kind != "rn":
            raise unknown(i, "f64 division is implemented with .rn")
        return e.set(
            i.operands[0],
            "double",
            e.binary("fdiv", "double", *(e.get(op, "double") for op in i.operands[1:3])),
        )
    a, b = (e.get(op, "float") for op in i.operands[1:3])
    if ftz:
        a, b = flush(e, a), flush(e, b)
    if kind in ("rz", "rm", "rp"):
        raise unknown(i, "division is implemented with .rn, .approx and .full")
    quotient = e.binary("fdiv", "float", a, b)
    if kind == "approx":
        large = e.compare(
            "ogt", "float", e.intrinsic("fabs", "float", b), e.float_constant(0x7E800000)
        )
        finite = e.compare(
            "olt", "float", e.intrinsic("fabs", "float", b), e.float_constant(0x7F800000)
        )
        zero = e.binary(
            "fmul", "float", a, e.intrinsic("copysign", "float", e.float_constant(0), b)
        )
        quotient = e.select(e.binary("and", "i1", large, finite), "float", zero, quotient)
    e.set(i.operands[0], "float", flush(e, quotient) if ftz else quotient)


def change_sign(e: Emitter, i: Instruction) -> None:
    """neg, abs of floats: the sign bit alone (and .ftz)."""
    ftz, type_name = split_modifiers(i, ("ftz", ""), _FLOATS)
    kind = {"f32": "i32", "f64": "i64", "f32x2": "i64", "f16x2": "i32", "bf16x2": "i32"}.get(
        type_name, "i16"
    )
    width = int(kind[1:])
    value = e.get(i.operands[1], kind)
    if ftz:
        if type_name != "f32":
            raise unknown(i, ".ftz is implemented for f32")
        value = e.cast("bitcast", flush(e, e.get(i.operands[1], "float")), "float", "i32")
    sign = {"f32x2": 1 << 63 | 1 << 31, "f16x2": 0x80008000, "bf16x2": 0x80008000}.get(
        type_name, 1 << (width - 1)
    )
    if i.opcode == "neg":
        return e.set(i.operands[0], kind, e.binary("xor", kind, value, splat(kind, sign)))
    e.set(i.operands[0], kind, e.binary("and", kind, value, splat(kind, ~sign)))


def larger(e: Emitter, opcode: str, kind: str, a: str, b: str, keep_nan: bool) -> str:
    """One min or max: a NaN loses against a number (or wins with .NaN), -0 < +0."""
    name = f"{opcode}_{kind}_nan" if keep_nan else f"{opcode}_{kind}"
    return e.shared_function(
        name, lambda e, a, b: _larger(e, opcode, kind, a, b, keep_nan), a, b, kind=kind, result=kind
    )


def _larger(e: Emitter, opcode: str, kind: str, a: str, b: str, keep_nan: bool) -> str:
    predicate = "ogt" if opcode == "max" else "olt"
    integer = {"float": "i32", "double": "i64"}[kind]
    value = e.select(e.compare(predicate, kind, a, b), kind, a, b)
    # Equal operands have equal bits unless they are zeros of either sign.
    bits = [e.cast("bitcast", v, kind, integer) for v in (a, b)]
    both = e.cast(
        "bitcast", e.binary("and" if opcode == "max" else "or", integer, *bits), integer, kind
    )
    value = e.select(e.compare("oeq", kind, a, b), kind, both, value)
    nan = e.float_constant(CANONICAL_NAN if kind == "float" else 0x7FFFFFFFFFFFFFFF, kind)
    if keep_nan:
        return e.select(e.compare("uno", kind, a, b), kind, nan, value)
    value = e.select(e.compare("uno", kind, b, b), kind, a, value)
    return e.select(e.compare("uno", kind, value, value), kind, nan, value)


def minimum_maximum(e: Emitter, i: Instruction) -> None:
    """min, max{.ftz}{.NaN}{.xorsign.abs}.type of two operands, or three f32 (9.7.3.11)."""
    ftz, nan, xorsign, absolute, type_name = split_modifiers(
        i, ("ftz", ""), ("NaN", ""), ("xorsign", ""), ("abs", ""), _FLOATS
    )
    if bool(xorsign) != bool(absolute) and xorsign or len(i.operands) == 4 and xorsign:
        raise unknown(i, "modifier combination is not implemented")
    kind = "double" if type_name == "f64" else "float"

    def compute(values: list[str]) -> str:
        values = [flush(e, v) for v in values] if ftz else values
        signs = None
        if absolute:
            bits = [e.cast("bitcast", v, "float", "i32") for v in values]
            signs = (
                e.binary("and", "i32", e.binary("xor", "i32", *bits[:2]), splat("i32", _SIGN))
                if xorsign
                else None
            )
            values = [e.intrinsic("fabs", kind, v) for v in values]
        result = values[0]
        for value in values[1:]:
            result = larger(e, i.opcode, kind, result, value, bool(nan))
        if signs is not None:
            unsigned = e.cast("bitcast", result, "float", "i32")
            signed = e.cast("bitcast", e.binary("or", "i32", unsigned, signs), "i32", "float")
            # A NaN result is canonical, whatever the signs.
            result = e.select(e.compare("uno", "float", result, result), "float", result, signed)
        return result

    _set_by_type(e, i, type_name, compute)


def _set_by_type(
    e: Emitter, i: Instruction, type_name: str, compute: Callable[[list[str]], str]
) -> None:
    """Apply an f32 (or f64) function whose result is one of its inputs to any float type."""
    destination, *sources = i.operands
    if type_name in ("f32", "f64"):
        kind = "float" if type_name == "f32" else "double"
        return e.set(destination, kind, compute([e.get(op, kind) for op in sources]))
    if type_name == "f32x2":
        pairs = [e.halves(op, "float") for op in sources]
        return e.set_halves(
            destination, "float", *(compute([pair[h] for pair in pairs]) for h in (0, 1))
        )
    lanes = [_half_lanes(e, op, type_name) for op in sources]
    _set_half(
        e,
        destination,
        [float_to_half(e, compute(list(values)), type_name) for values in zip(*lanes, strict=True)],
    )


@computes("copysign", statistics="integer")
def copy_sign(e: Emitter, i: Instruction) -> None:
    """copysign.type d, a, b: the sign of a on the magnitude of b."""
    (type_name,) = split_modifiers(i, ("f32", "f64"))
    kind = "i32" if type_name == "f32" else "i64"
    sign = 1 << (int(kind[1:]) - 1)
    a, b = (e.get(op, kind) for op in i.operands[1:3])
    e.set(
        i.operands[0],
        kind,
        e.binary(
            "or",
            kind,
            e.binary("and", kind, a, splat(kind, sign)),
            e.binary("and", kind, b, splat(kind, ~sign)),
        ),
    )


@computes("testp", statistics="integer")
def test_property(e: Emitter, i: Instruction) -> None:
    """testp.{finite,infinite,number,notanumber,normal,subnormal}.f32 p, a."""
    what, _ = split_modifiers(
        i, ("finite", "infinite", "number", "notanumber", "normal", "subnormal"), ("f32",)
    )
    magnitude = e.binary("and", "i32", e.get(i.operands[1], "i32"), splat("i32", 0x7FFFFFFF))
    infinity = splat("i32", 0x7F800000)
    if what in ("normal", "subnormal"):
        # Zeros count as normal.
        less_one = e.binary("sub", "i32", magnitude, splat("i32", 1))
        subnormal = e.compare("ult", "i32", less_one, splat("i32", 0x007FFFFF))
        if what == "normal":
            finite = e.compare("ult", "i32", magnitude, infinity)
            subnormal = e.binary(
                "and", "i1", finite, e.binary("xor", "i1", subnormal, splat("i1", 1))
            )
        return e.set(i.operands[0], "i1", subnormal)
    predicate = {"finite": "ult", "infinite": "eq", "number": "ule", "notanumber": "ugt"}[what]
    e.set(i.operands[0], "i1", e.compare(predicate, "i32", magnitude, infinity))
