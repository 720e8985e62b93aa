"""Integer and logic instructions (PTX ISA 9.7.1, 9.7.2, 9.7.8), and opcodes shared with floats.

An opcode such as ``add`` covers integers and floats: the emit function looks at the type, which
is the last modifier, and hands floats to ``floating``. Importing this module registers every
inline instruction of the package.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

from sm100_sim.isa.columns import ByModifier, Mix
from sm100_sim.isa.emitter import Emitter, splat
from sm100_sim.isa.table import computes, split_modifiers, unknown
from sm100_sim.ptx.parser import Instruction

from . import floating

INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
BITS = ("b16", "b32", "b64")
_MASK_BITS = {"i16": 16, "i32": 32, "i64": 64}


def kind_of(type_name: str) -> str:
    """LLVM lane type of an integer or bit type."""
    return f"i{type_name[1:]}"


def pipe(instruction: Instruction) -> str:
    """Statistics class by operand type: f32 operations run on the FMA pipe."""
    names = {
        "f32": "fma",
        "f32x2": "fma.f32x2",
        "f64": "fma.f64",
        "f16": "fma.half",
        "f16x2": "fma.half",
        "bf16": "fma.half",
        "bf16x2": "fma.half",
    }
    return names.get(instruction.modifiers[-1], "integer")


def is_float(instruction: Instruction) -> bool:
    return bool(instruction.modifiers) and "f" in instruction.modifiers[-1]


@computes(
    "add", "sub", statistics=pipe, addressing=True, mix=ByModifier({"f32x2": Mix.PACKED_SUM}, None)
)
def add_sub(e: Emitter, i: Instruction) -> None:
    """add, sub{.sat}{.cc}.type: d = a +- b, modulo the width unless .sat.s32."""
    if is_float(i):
        return floating.add_sub(e, i)
    saturating, carry_out, type_name = split_modifiers(
        i, ("sat", ""), ("cc", ""), (*INTEGERS, *BITS)
    )
    destination, *sources = i.operands
    if carry_out:
        return _add_with_carry(e, i, type_name, carry_in=False, carry_out=True)
    kind = kind_of(type_name)
    a, b = (e.get(op, kind) for op in sources)
    if saturating:
        if type_name != "s32":
            raise unknown(i, ".sat is defined for .s32 alone")
        return e.set(destination, kind, e.intrinsic(f"s{i.opcode}.sat", kind, a, b))
    e.set(destination, kind, e.binary(i.opcode, kind, a, b))


@computes("addc", "subc", statistics="integer")
def add_carry(e: Emitter, i: Instruction) -> None:
    """addc, subc{.cc}.type: add or subtract with the carry of the preceding .cc instruction."""
    carry_out, type_name = split_modifiers(i, ("cc", ""), (*INTEGERS, *BITS))
    _add_with_carry(e, i, type_name, carry_in=True, carry_out=bool(carry_out))


def _add_with_carry(
    e: Emitter, i: Instruction, type_name: str, carry_in: bool, carry_out: bool
) -> None:
    if e.guard is not None or (carry_in and e.carry is None):
        raise unknown(i, "carry chains must stand unguarded in one basic block")
    kind, operation = kind_of(type_name), i.opcode[:3]
    a, b = (e.get(op, kind) for op in i.operands[1:3])
    result = e.binary(operation, kind, a, b)
    overflow = (
        e.compare("ult", kind, result, a) if operation == "add" else e.compare("ult", kind, a, b)
    )
    if carry_in and e.carry is not None:
        carry = e.cast("zext", e.carry, "i1", kind)
        before, result = result, e.binary(operation, kind, result, carry)
        second = (
            e.compare("ult", kind, result, before)
            if operation == "add"
            else e.compare("ult", kind, before, carry)
        )
        overflow = e.binary("or", "i1", overflow, second)
    e.carry = overflow if carry_out else None
    e.set(i.operands[0], kind, result)


@computes("mul", statistics=pipe, addressing=True, mix=ByModifier({"f32x2": Mix.PACKED}, None))
def multiply(e: Emitter, i: Instruction) -> None:
    """mul{.lo,.hi,.wide}.type."""
    if is_float(i):
        return floating.multiply(e, i)
    part, type_name = split_modifiers(i, ("lo", "hi", "wide"), INTEGERS)
    _set_product(e, i, part, type_name, None)


@computes("mad", statistics=pipe, addressing=True)
def multiply_add(e: Emitter, i: Instruction) -> None:
    """mad{.lo,.hi,.wide}.type d = a * b + c."""
    if is_float(i):
        return floating.fused(e, i)
    part, type_name = split_modifiers(i, ("lo", "hi", "wide"), INTEGERS)
    _set_product(e, i, part, type_name, i.operands[3])


def _set_product(e: Emitter, i: Instruction, part: str, type_name: str, addend) -> None:
    a, b = i.operands[1:3]
    kind, value = _product(e, i, part, type_name, a, b)
    if addend is not None:
        value = e.binary("add", kind, value, e.get(addend, kind))
    e.set(i.operands[0], kind, value)


def _product(e: Emitter, i: Instruction, part: str, type_name: str, a, b) -> tuple[str, str]:
    kind = kind_of(type_name)
    values = [e.get(op, kind) for op in (a, b)]
    if part == "lo":
        return kind, e.binary("mul", kind, *values)
    bits = _MASK_BITS[kind]
    wide = f"i{2 * bits}"
    extend = "sext" if type_name[0] == "s" else "zext"
    full = e.binary("mul", wide, *(e.cast(extend, value, kind, wide) for value in values))
    if part == "wide":
        if bits == 64:
            raise unknown(i, "mul.wide takes 16- and 32-bit factors")
        return wide, full
    high = e.name_for(f"lshr <32 x {wide}> {full}, splat ({wide} {bits})")
    return kind, e.cast("trunc", high, wide, kind)


@computes("mul24", "mad24", statistics="integer")
def multiply24(e: Emitter, i: Instruction) -> None:
    """mul24, mad24.{lo,hi}.type: products of the low 24 bits; .lo low 32, .hi bits 16 to 47."""
    part, type_name = split_modifiers(i, ("lo", "hi"), ("u32", "s32"))
    shift = "ashr" if type_name == "s32" else "lshr"
    extend = "sext" if type_name == "s32" else "zext"
    factors = []
    for op in i.operands[1:3]:
        low = e.binary("shl", "i32", e.get(op, "i32"), splat("i32", 8))
        factors.append(e.cast(extend, e.binary(shift, "i32", low, splat("i32", 8)), "i32", "i64"))
    full = e.binary("mul", "i64", *factors)
    if part == "hi":
        full = e.binary(shift, "i64", full, splat("i64", 16))
    value = e.cast("trunc", full, "i64", "i32")
    if i.opcode == "mad24":
        value = e.binary("add", "i32", value, e.get(i.operands[3], "i32"))
    e.set(i.operands[0], "i32", value)


@computes("sad", statistics="integer")
def absolute_difference(e: Emitter, i: Instruction) -> None:
    """sad.type d = c + |a - b|."""
    (type_name,) = split_modifiers(i, INTEGERS)
    kind, sign = kind_of(type_name), type_name[0]
    a, b, c = (e.get(op, kind) for op in i.operands[1:4])
    larger = e.intrinsic(f"{sign}max", kind, a, b)
    smaller = e.intrinsic(f"{sign}min", kind, a, b)
    e.set(i.operands[0], kind, e.binary("add", kind, e.binary("sub", kind, larger, smaller), c))


@computes("div", statistics=lambda i: "mufu.rcp" if is_float(i) else "integer.div")
def divide(e: Emitter, i: Instruction) -> None:
    """div.type; a division by zero gives all ones, as the hardware's routine does."""
    if is_float(i):
        return floating.divide(e, i)
    _set_quotient(e, i, "div")


@computes("rem", statistics="integer.div")
def remainder(e: Emitter, i: Instruction) -> None:
    """rem.type: the remainder has the dividend's sign; by zero it is all ones, as on hardware."""
    _set_quotient(e, i, "rem")


def _set_quotient(e: Emitter, i: Instruction, what: str) -> None:
    (type_name,) = split_modifiers(i, INTEGERS)
    kind, sign = kind_of(type_name), type_name[0]
    a, b = (e.get(op, kind) for op in i.operands[1:3])
    zero = e.compare("eq", kind, b, splat(kind, 0))
    divisor = e.select(zero, kind, splat(kind, 1), b)
    if kind == "i64":
        quotient = _quotient64(e, sign, a, divisor)
    else:
        # Exact: a quotient of 32-bit integers is never closer to the next integer than 2**-32
        # relative, far more than the rounding error of a double.
        to_float, from_float = ("sitofp", "fptosi") if sign == "s" else ("uitofp", "fptoui")
        ratio = e.binary(
            "fdiv",
            "double",
            e.cast(to_float, a, kind, "double"),
            e.cast(to_float, divisor, kind, "double"),
        )
        quotient = e.cast("trunc", e.cast(from_float, ratio, "double", "i64"), "i64", kind)
    if what == "rem":
        product = e.binary("mul", kind, quotient, divisor)
        rest = e.binary("sub", kind, a, product)
        return e.set(i.operands[0], kind, e.select(zero, kind, splat(kind, -1), rest))
    e.set(i.operands[0], kind, e.select(zero, kind, splat(kind, -1), quotient))


def _quotient64(e: Emitter, sign: str, a: str, b: str) -> str:
    if sign == "u":
        return e.binary("udiv", "i64", a, b)
    # The one overflow, the least integer over -1, must not reach the divide instruction.
    minus_one = e.compare("eq", "i64", b, splat("i64", -1))
    quotient = e.binary("sdiv", "i64", a, e.select(minus_one, "i64", splat("i64", 1), b))
    return e.select(minus_one, "i64", e.binary("sub", "i64", splat("i64", 0), a), quotient)


@computes("neg", "abs", statistics=pipe)
def negate(e: Emitter, i: Instruction) -> None:
    """neg, abs of signed integers (the least integer stays itself)."""
    if is_float(i):
        return floating.change_sign(e, i)
    (type_name,) = split_modifiers(i, ("s16", "s32", "s64"))
    kind = kind_of(type_name)
    value = e.get(i.operands[1], kind)
    if i.opcode == "abs":
        return e.set(i.operands[0], kind, e.intrinsic("abs", kind, value, extra="i1 false"))
    e.set(i.operands[0], kind, e.binary("sub", kind, splat(kind, 0), value))


@computes("min", "max", statistics=lambda i: "minmax" if is_float(i) else "integer")
def minimum_maximum(e: Emitter, i: Instruction) -> None:
    """min, max{.relu}.type of two operands (three for f32)."""
    if is_float(i):
        return floating.minimum_maximum(e, i)
    relu, type_name = split_modifiers(i, ("relu", ""), INTEGERS)
    kind = kind_of(type_name)
    value = e.intrinsic(
        f"{type_name[0]}{i.opcode}", kind, *(e.get(op, kind) for op in i.operands[1:])
    )
    if relu:
        value = e.intrinsic("smax", kind, value, splat(kind, 0))
    e.set(i.operands[0], kind, value)


def _fold_logic(operation: Callable[[int, int], int]) -> Callable:
    def fold(modifiers: tuple[str, ...], sources: list[int | None]) -> int | None:
        if len(sources) != 2 or sources[0] is None or sources[1] is None:
            return None
        return operation(sources[0], sources[1])

    return fold


@computes("and", statistics="integer", addressing=True, fold=_fold_logic(operator.and_))
@computes("or", statistics="integer", addressing=True, fold=_fold_logic(operator.or_))
@computes("xor", statistics="integer", addressing=True, fold=_fold_logic(operator.xor))
def logic(e: Emitter, i: Instruction) -> None:
    """Emit and, or, xor of bits or predicates."""
    (type_name,) = split_modifiers(i, (*BITS, "pred"))
    kind = "i1" if type_name == "pred" else kind_of(type_name)
    e.set(
        i.operands[0], kind, e.binary(i.opcode, kind, *(e.get(op, kind) for op in i.operands[1:3]))
    )


def _fold_complement(modifiers: tuple[str, ...], sources: list[int | None]) -> int | None:
    return None if modifiers != ("pred",) or sources[0] is None else int(not sources[0])


@computes("not", statistics="integer", fold=_fold_complement)
@computes("cnot", statistics="integer")
def complement(e: Emitter, i: Instruction) -> None:
    """Emit not (every bit) or cnot (1 if zero, else 0)."""
    (type_name,) = split_modifiers(i, (*BITS, "pred"))
    kind = "i1" if type_name == "pred" else kind_of(type_name)
    value = e.get(i.operands[1], kind)
    if i.opcode == "cnot":
        zero = e.compare("eq", kind, value, splat(kind, 0))
        return e.set(i.operands[0], kind, e.cast("zext", zero, "i1", kind))
    e.set(i.operands[0], kind, e.binary("xor", kind, value, splat(kind, -1)))


@computes("lop3", statistics="integer")
def logic3(e: Emitter, i: Instruction) -> None:
    """lop3.b32 d, a, b, c, table: bit 4a+2b+c of the table for every bit position."""
    split_modifiers(i, ("b32",))
    a, b, c = (e.get(op, "i32") for op in i.operands[1:4])
    table = i.operands[4].value

    def pick(value: int) -> str:
        """The function of c alone that two table bits (c = 0, c = 1) describe."""
        return {
            0: splat("i32", 0),
            1: e.binary("xor", "i32", c, splat("i32", -1)),
            2: c,
            3: splat("i32", -1),
        }[value]

    def choose(condition: str, yes: str, no: str) -> str:
        difference = e.binary("and", "i32", e.binary("xor", "i32", yes, no), condition)
        return e.binary("xor", "i32", difference, no)

    rows = [pick(table >> (2 * row) & 3) for row in range(4)]
    low, high = choose(b, rows[1], rows[0]), choose(b, rows[3], rows[2])
    e.set(i.operands[0], "i32", choose(a, high, low))


@computes("shl", "shr", statistics="integer", addressing=True)
def shift(e: Emitter, i: Instruction) -> None:
    """shl, shr: amounts beyond the width shift everything out (9.7.8.7)."""
    types = BITS if i.opcode == "shl" else (*BITS, *INTEGERS)
    (type_name,) = split_modifiers(i, types)
    kind = kind_of(type_name)
    bits = _MASK_BITS[kind]
    value = e.get(i.operands[1], kind)
    operation = {"shl": "shl", "shr": "ashr" if type_name[0] == "s" else "lshr"}[i.opcode]
    if i.operands[2].kind == "imm" and (known := e.immediate_bits(i.operands[2], 32)) < bits:
        # What LLVM would find out by itself, in more time than all else of the shift takes.
        return e.set(i.operands[0], kind, e.binary(operation, kind, value, splat(kind, known)))
    amount = e.intrinsic("umin", "i32", e.get(i.operands[2], "i32"), splat("i32", bits))
    if operation == "ashr":
        amount = e.intrinsic("umin", "i32", amount, splat("i32", bits - 1))
        return e.set(
            i.operands[0], kind, e.binary("ashr", kind, value, e.convert(amount, "i32", kind))
        )
    inside = e.compare("ult", "i32", amount, splat("i32", bits))
    safe = e.binary("and", "i32", amount, splat("i32", bits - 1))
    shifted = e.binary(operation, kind, value, e.convert(safe, "i32", kind))
    e.set(i.operands[0], kind, e.select(inside, kind, shifted, splat(kind, 0)))


@computes("shf", statistics="integer")
def funnel_shift(e: Emitter, i: Instruction) -> None:
    """shf.{l,r}.{clamp,wrap}.b32 d, a, b, c: shift of the 64-bit value b:a."""
    direction, mode, _ = split_modifiers(i, ("l", "r"), ("clamp", "wrap"), ("b32",))
    a, b, c = (e.get(op, "i32") for op in i.operands[1:4])
    shifted = e.intrinsic(f"fsh{direction}", "i32", b, a, c)
    if mode == "clamp":
        beyond = e.compare("uge", "i32", c, splat("i32", 32))
        shifted = e.select(beyond, "i32", a if direction == "l" else b, shifted)
    e.set(i.operands[0], "i32", shifted)


def _field_operand(e: Emitter, op, kind: str, limit: int) -> str:
    """Position or length of a field, at most ``limit``, as i64.

    The ISA restricts it to 0..255. Beyond, the hardware takes bits 0-7 for fields of 32 bits, and
    the whole value for those of 64.
    """
    value = e.get(op, "i32")
    if kind == "i32":
        value = e.binary("and", "i32", value, splat("i32", 255))
    return e.cast("zext", e.intrinsic("umin", "i32", value, splat("i32", limit)), "i32", "i64")


@computes("bfe", statistics="integer")
def extract_field(e: Emitter, i: Instruction) -> None:
    """bfe.type d, a, position, length; beyond the top, signed fields repeat the sign."""
    (type_name,) = split_modifiers(i, ("u32", "s32", "u64", "s64"))
    kind, signed = kind_of(type_name), type_name[0] == "s"
    shift_right = "ashr" if signed else "lshr"
    value = e.cast("sext" if signed else "zext", e.get(i.operands[1], kind), kind, "i64")
    position = _field_operand(e, i.operands[2], kind, 255)
    length = _field_operand(e, i.operands[3], kind, 64)
    inside = e.compare("ult", "i64", position, splat("i64", 64))
    shifted = e.binary(
        shift_right, "i64", value, e.intrinsic("umin", "i64", position, splat("i64", 63))
    )
    if not signed:
        shifted = e.select(inside, "i64", shifted, splat("i64", 0))
    rest = e.binary("sub", "i64", splat("i64", 64), length)
    empty = e.compare("eq", "i64", length, splat("i64", 0))
    rest = e.binary("and", "i64", rest, splat("i64", 63))
    field = e.binary(shift_right, "i64", e.binary("shl", "i64", shifted, rest), rest)
    field = e.select(empty, "i64", splat("i64", 0), field)
    e.set(i.operands[0], kind, e.cast("trunc", field, "i64", kind))


@computes("bfi", statistics="integer")
def insert_field(e: Emitter, i: Instruction) -> None:
    """bfi.type d, a, b, position, length: the low bits of a into b."""
    (type_name,) = split_modifiers(i, ("b32", "b64"))
    kind = kind_of(type_name)
    bits = _MASK_BITS[kind]
    a, b = (e.cast("zext", e.get(op, kind), kind, "i64") for op in i.operands[1:3])
    position = _field_operand(e, i.operands[3], kind, 255)
    length = _field_operand(e, i.operands[4], kind, bits)
    full = e.compare("uge", "i64", length, splat("i64", 64))
    power = e.binary(
        "shl", "i64", splat("i64", 1), e.binary("and", "i64", length, splat("i64", 63))
    )
    ones = e.select(full, "i64", splat("i64", -1), e.binary("sub", "i64", power, splat("i64", 1)))
    inside = e.compare("ult", "i64", position, splat("i64", bits))
    safe = e.binary("and", "i64", position, splat("i64", 63))
    mask = e.select(inside, "i64", e.binary("shl", "i64", ones, safe), splat("i64", 0))
    change = e.binary("xor", "i64", e.binary("shl", "i64", a, safe), b)
    value = e.binary("xor", "i64", b, e.binary("and", "i64", change, mask))
    e.set(i.operands[0], kind, e.cast("trunc", value, "i64", kind))


@computes("bfind", statistics="integer")
def find_leading(e: Emitter, i: Instruction) -> None:
    """bfind{.shiftamt}.type: the top bit that differs from the sign, or all ones if none does."""
    as_shift, type_name = split_modifiers(i, ("shiftamt", ""), ("u32", "s32", "u64", "s64"))
    kind = kind_of(type_name)
    value = e.get(i.operands[1], kind)
    if type_name[0] == "s":
        sign = e.binary("ashr", kind, value, splat(kind, -1 & (_MASK_BITS[kind] - 1)))
        value = e.binary("xor", kind, value, sign)
    zeros = e.intrinsic("ctlz", kind, value, extra="i1 false")
    none = e.compare("eq", kind, value, splat(kind, 0))
    position = (
        zeros if as_shift else e.binary("sub", kind, splat(kind, _MASK_BITS[kind] - 1), zeros)
    )
    result = e.select(none, kind, splat(kind, -1), position)
    e.set(i.operands[0], "i32", e.convert(result, kind, "i32"))


@computes("popc", "clz", statistics="integer")
def count_bits(e: Emitter, i: Instruction) -> None:
    """popc, clz{.b32,.b64}: u32 results."""
    (type_name,) = split_modifiers(i, ("b32", "b64"))
    kind = kind_of(type_name)
    value = e.get(i.operands[1], kind)
    result = (
        e.intrinsic("ctpop", kind, value)
        if i.opcode == "popc"
        else e.intrinsic("ctlz", kind, value, extra="i1 false")
    )
    e.set(i.operands[0], "i32", e.convert(result, kind, "i32"))


@computes("brev", statistics="integer")
def reverse_bits(e: Emitter, i: Instruction) -> None:
    """brev: bits in reverse order."""
    (type_name,) = split_modifiers(i, ("b32", "b64"))
    kind = kind_of(type_name)
    e.set(i.operands[0], kind, e.intrinsic("bitreverse", kind, e.get(i.operands[1], kind)))


@computes("prmt", statistics="integer")
def permute_bytes(e: Emitter, i: Instruction) -> None:
    """prmt.b32{.mode} d, a, b, c: four bytes picked from b:a (9.7.9.7)."""
    _, mode = split_modifiers(i, ("b32",), ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16", ""))
    a, b, c = (e.get(op, "i32") for op in i.operands[1:4])
    source = e.interleave(a, b)
    result = splat("i32", 0)
    for position in range(4):
        selector = _byte_selector(e, mode, c, position)
        index = e.binary("and", "i32", selector, splat("i32", 7))
        amount = e.cast("zext", e.binary("shl", "i32", index, splat("i32", 3)), "i32", "i64")
        byte = e.cast("trunc", e.binary("lshr", "i64", source, amount), "i64", "i8")
        if not mode:
            copies = e.binary("ashr", "i8", byte, splat("i8", 7))
            sign = e.compare("ugt", "i32", selector, splat("i32", 7))
            byte = e.select(sign, "i8", copies, byte)
        wide = e.binary("shl", "i32", e.cast("zext", byte, "i8", "i32"), splat("i32", 8 * position))
        result = e.binary("or", "i32", result, wide)
    e.set(i.operands[0], "i32", result)


def _byte_selector(e: Emitter, mode: str, c: str, position: int) -> str:
    """Selector nibble of one result byte: bits 0-2 the source byte, bit 3 sign replication."""
    if not mode:
        nibble = e.binary("lshr", "i32", c, splat("i32", 4 * position))
        return e.binary("and", "i32", nibble, splat("i32", 15))
    low = e.binary("and", "i32", c, splat("i32", 3))
    here = splat("i32", position)
    if mode == "rc8":
        return low
    if mode == "rc16":
        half = e.binary("and", "i32", low, splat("i32", 1))
        return e.binary(
            "add", "i32", e.binary("shl", "i32", half, splat("i32", 1)), splat("i32", position & 1)
        )
    operation = {"f4e": "add", "b4e": "sub", "ecl": "umax", "ecr": "umin"}[mode]
    if operation in ("add", "sub"):
        return e.binary("and", "i32", e.binary(operation, "i32", low, here), splat("i32", 7))
    return e.intrinsic(operation, "i32", low, here)
