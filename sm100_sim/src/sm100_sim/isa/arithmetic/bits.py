"""Integer instructions of the long tail: szext, bmsk, fns, dp2a, dp4a (PTX ISA 9.7.1)."""

from __future__ import annotations

from sm100_sim.isa.emitter import Emitter, splat
from sm100_sim.isa.table import computes, split_modifiers
from sm100_sim.ptx.parser import Instruction


def _amount(e: Emitter, i: Instruction, position: int, mode: str) -> str:
    """A position or width of 0 to 32: larger ones are clamped, or taken modulo 32, as i64."""
    value = e.get(i.operands[position], "i32")
    value = (
        e.intrinsic("umin", "i32", value, splat("i32", 32))
        if mode == "clamp"
        else e.binary("and", "i32", value, splat("i32", 31))
    )
    return e.cast("zext", value, "i32", "i64")


@computes("szext", statistics="integer")
def extend(e: Emitter, i: Instruction) -> None:
    """szext.{clamp,wrap}.{u32,s32} d, a, n: the low n bits of a, extended by zeros or the sign."""
    mode, type_name = split_modifiers(i, ("clamp", "wrap"), ("u32", "s32"))
    rest = e.binary("sub", "i64", splat("i64", 64), _amount(e, i, 2, mode))
    empty = e.compare("eq", "i64", rest, splat("i64", 64))
    rest = e.binary("and", "i64", rest, splat("i64", 63))
    wide = e.cast("zext", e.get(i.operands[1], "i32"), "i32", "i64")
    shifted = e.binary("shl", "i64", wide, rest)
    field = e.binary("ashr" if type_name == "s32" else "lshr", "i64", shifted, rest)
    field = e.select(empty, "i64", splat("i64", 0), field)
    e.set(i.operands[0], "i32", e.cast("trunc", field, "i64", "i32"))


@computes("bmsk", statistics="integer")
def bit_mask(e: Emitter, i: Instruction) -> None:
    """bmsk.{clamp,wrap}.b32 d, a, b: b ones from position a upwards."""
    mode, _ = split_modifiers(i, ("clamp", "wrap"), ("b32",))
    start, width = (_amount(e, i, position, mode) for position in (1, 2))
    ones = e.binary("sub", "i64", e.binary("shl", "i64", splat("i64", 1), width), splat("i64", 1))
    mask = e.binary("shl", "i64", ones, start)
    e.set(i.operands[0], "i32", e.cast("trunc", mask, "i64", "i32"))


@computes("fns", statistics="integer")
def find_nth_set(e: Emitter, i: Instruction) -> None:
    """fns.b32 d, mask, base, offset: the offset-th set bit from base, upwards if positive.

    The bit at base counts as the first; offset 0 means base itself. All ones if there is none.
    """
    split_modifiers(i, ("b32",))
    mask, base, offset = (e.get(op, "i32") for op in i.operands[1:4])
    found = splat("i32", -1)
    upwards = e.compare("sgt", "i32", offset, splat("i32", 0))
    downwards = e.compare("slt", "i32", offset, splat("i32", 0))
    wanted = e.intrinsic("abs", "i32", offset, extra="i1 false")
    counts = {1: splat("i32", 0), -1: splat("i32", 0)}
    for step in (1, -1):
        direction = upwards if step == 1 else downwards
        for bit in range(32)[::step]:
            place = e.binary("lshr", "i32", mask, splat("i32", bit))
            one = e.binary("and", "i32", place, splat("i32", 1))
            within = e.compare("sle" if step == 1 else "sge", "i32", base, splat("i32", bit))
            one = e.select(within, "i32", one, splat("i32", 0))
            counts[step] = e.binary("add", "i32", counts[step], one)
            here = e.compare("eq", "i32", counts[step], wanted)
            here = e.binary("and", "i1", here, e.compare("ne", "i32", one, splat("i32", 0)))
            here = e.binary("and", "i1", here, direction)
            found = e.select(here, "i32", splat("i32", bit), found)
    inside = e.compare("ult", "i32", base, splat("i32", 32))
    own = e.binary(
        "and",
        "i32",
        e.binary("lshr", "i32", mask, e.binary("and", "i32", base, splat("i32", 31))),
        splat("i32", 1),
    )
    itself = e.binary("and", "i1", e.compare("ne", "i32", own, splat("i32", 0)), inside)
    same = e.select(itself, "i32", base, splat("i32", -1))
    neither = e.compare("eq", "i32", offset, splat("i32", 0))
    e.set(i.operands[0], "i32", e.select(neither, "i32", same, found))


def _parts(e: Emitter, value: str, bits: int, count: int, signed: bool) -> list[str]:
    """``count`` fields of ``bits`` bits from the lowest up, extended to i32."""
    parts = []
    for place in range(count):
        high = e.binary("shl", "i32", value, splat("i32", 32 - bits * (place + 1)))
        parts.append(e.binary("ashr" if signed else "lshr", "i32", high, splat("i32", 32 - bits)))
    return parts


@computes("dp4a", "dp2a", statistics="integer")
def dot_product(e: Emitter, i: Instruction) -> None:
    """dp4a.atype.btype d, a, b, c: c plus the products of four bytes each; dp2a{.lo,.hi}: of two
    halves of a and the lower or upper two bytes of b."""
    if i.opcode == "dp4a":
        half, (a_type, b_type) = "lo", split_modifiers(i, ("u32", "s32"), ("u32", "s32"))
    else:
        half, a_type, b_type = split_modifiers(i, ("lo", "hi"), ("u32", "s32"), ("u32", "s32"))
    a, b, total = (e.get(op, "i32") for op in i.operands[1:4])
    if half == "hi":
        b = e.binary("lshr", "i32", b, splat("i32", 16))
    count = 4 if i.opcode == "dp4a" else 2
    for x, y in zip(
        _parts(e, a, 32 // count, count, a_type == "s32"),
        _parts(e, b, 8, count, b_type == "s32"),
        strict=True,
    ):
        total = e.binary("add", "i32", total, e.binary("mul", "i32", x, y))
    e.set(i.operands[0], "i32", total)
