"""Moves, selections, comparisons and address conversions (PTX ISA 9.7.6, 9.7.7, 9.7.9)."""

from __future__ import annotations

from sm100_sim.isa.columns import Mix
from sm100_sim.isa.emitter import Emitter, splat
from sm100_sim.isa.table import computes, split_modifiers, unknown
from sm100_sim.ptx.parser import Instruction, Operand
from sm100_sim.state.warp import LOCAL_WINDOW, SHARED_WINDOW

from .floating import flush, half_to_float

_VALUE_TYPES = ("b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")
_ALL_TYPES = ("pred", *_VALUE_TYPES, "b128")
_KINDS = {"f16": "i16", "bf16": "i16", "f32": "float", "f64": "double"}


def value_kind(type_name: str) -> str:
    """Lane type for moving a value: integers even for floats, so that bits stay as they are."""
    return f"i{type_name[1:]}" if type_name[0] != "f" else {"f32": "i32", "f64": "i64"}[type_name]


@computes(
    "mov",
    statistics="mov",
    copies=True,
    addressing=True,
    fold=lambda modifiers, sources: sources[0],
)
def move(e: Emitter, i: Instruction) -> None:
    """mov.type: registers, immediates, addresses, special registers; packing and unpacking."""
    (type_name,) = split_modifiers(i, _ALL_TYPES)
    destination, source = i.operands
    if destination.kind == "vec":
        return _unpack(e, i, destination.items, source, type_name)
    if source.kind == "vec":
        return _pack(e, i, destination, source.items, type_name)
    if type_name == "b128":
        return e.set_wide(destination, *e.wide(source))
    if type_name == "pred":
        return e.set(destination, "i1", e.get(source, "i1"))
    if source.kind == "special" and source.name in ("%clock64", "%globaltimer"):
        return e.set(destination, "i64", e.clock())
    kind = value_kind(type_name)
    if kind == "i64" and source.kind == "reg" and source.register.file == "r64":
        # Copying halves keeps packed pairs as they are.
        forms = e.values.get(source.register, {})
        if "low.float" in forms or "low.i32" in forms:
            return e.set_halves(destination, "i32", *e.halves(source, "i32"))
    e.set(destination, kind, e.get(source, kind))


def _pack(
    e: Emitter, i: Instruction, destination: Operand, items: tuple[Operand, ...], type_name: str
) -> None:
    """mov.b32 d, {16, 16}; mov.b64 d, {32, 32} or {16 x 4}; mov.b128 d, {64, 64}."""
    bits = int(type_name[1:])
    if type_name == "b128" and len(items) == 2:
        return e.set_wide(destination, *(e.get(op, "i64") for op in items))
    if type_name == "b64" and len(items) == 2:
        floats = all(op.kind == "reg" and "float" in e.values.get(op.register, ()) for op in items)
        kind = "float" if floats else "i32"
        return e.set_halves(destination, kind, *(e.get(op, kind) for op in items))
    part = bits // len(items)
    if type_name not in ("b16", "b32", "b64") or part * len(items) != bits or part < 8:
        raise unknown(i, f"{len(items)} parts of a {type_name}")
    kind, total = value_kind(type_name), ""
    for position, op in enumerate(items):
        value = e.convert(e.get(op, f"i{part}"), f"i{part}", kind)
        if position:
            shifted = e.binary("shl", kind, value, splat(kind, part * position))
            value = e.binary("or", kind, total, shifted)
        total = value
    e.set(destination, kind, total)


def _unpack(
    e: Emitter, i: Instruction, items: tuple[Operand, ...], source: Operand, type_name: str
) -> None:
    bits = int(type_name[1:])
    if type_name == "b128" and len(items) == 2:
        for op, value in zip(items, e.wide(source), strict=True):
            e.set(op, "i64", value)
        return
    if type_name == "b64" and len(items) == 2:
        forms = e.values.get(source.register, {}) if source.register is not None else {}
        kind = "float" if "low.float" in forms else "i32"
        for op, value in zip(items, e.halves(source, kind), strict=True):
            e.set(op, kind, value)
        return
    part = bits // len(items)
    if type_name not in ("b16", "b32", "b64") or part * len(items) != bits or part < 8:
        raise unknown(i, f"{len(items)} parts of a {type_name}")
    kind = value_kind(type_name)
    value = e.get(source, kind)
    for position, op in enumerate(items):
        piece = e.binary("lshr", kind, value, splat(kind, part * position)) if position else value
        e.set(op, f"i{part}", e.cast("trunc", piece, kind, f"i{part}"))


def _fold_selection(modifiers: tuple[str, ...], sources: list[int | None]) -> int | None:
    a, b, condition = sources
    return None if condition is None else a if condition else b


@computes("selp", statistics="select", fold=_fold_selection, mix=Mix.SELECT)
def select_by_predicate(e: Emitter, i: Instruction) -> None:
    """selp.type d, a, b, p: a where p holds."""
    (type_name,) = split_modifiers(i, _VALUE_TYPES)
    kind = value_kind(type_name)
    destination, a, b, condition = i.operands
    e.set(destination, kind, e.select(e.get(condition, "i1"), kind, e.get(a, kind), e.get(b, kind)))


@computes("slct", statistics="select")
def select_by_sign(e: Emitter, i: Instruction) -> None:
    """slct{.ftz}.type.{s32,f32} d, a, b, c: a where c >= 0 (NaN chooses b)."""
    ftz, type_name, by = split_modifiers(i, ("ftz", ""), _VALUE_TYPES, ("s32", "f32"))
    kind = value_kind(type_name)
    destination, a, b, c = i.operands
    if by == "s32":
        condition = e.compare("sge", "i32", e.get(c, "i32"), splat("i32", 0))
    else:
        value = e.get(c, "float")
        condition = e.compare(
            "oge", "float", flush(e, value) if ftz else value, e.float_constant(0)
        )
    e.set(destination, kind, e.select(condition, kind, e.get(a, kind), e.get(b, kind)))


# Comparisons.

_FLOAT_COMPARISONS = {
    "eq": "oeq",
    "ne": "one",
    "lt": "olt",
    "le": "ole",
    "gt": "ogt",
    "ge": "oge",
    "equ": "ueq",
    "neu": "une",
    "ltu": "ult",
    "leu": "ule",
    "gtu": "ugt",
    "geu": "uge",
    "num": "ord",
    "nan": "uno",
}
_UNSIGNED = {"lo": "ult", "ls": "ule", "hi": "ugt", "hs": "uge"}
_COMPARISONS = (*_FLOAT_COMPARISONS, *_UNSIGNED)
_COMPARED_TYPES = (*_VALUE_TYPES, "f16", "bf16", "f16x2", "bf16x2")


def _compare_operands(
    e: Emitter, i: Instruction, comparison: str, type_name: str, ftz: bool
) -> str:
    a, b = i.operands[1:3]
    if type_name in ("f16", "bf16"):
        values = [half_to_float(e, e.get(op, "i16"), type_name) for op in (a, b)]
        return e.compare(_FLOAT_COMPARISONS[comparison], "float", *values)
    if type_name in _KINDS:
        kind = _KINDS[type_name]
        values = [e.get(op, kind) for op in (a, b)]
        values = [flush(e, v) for v in values] if ftz and type_name == "f32" else values
        return e.compare(_FLOAT_COMPARISONS[comparison], kind, *values)
    if type_name.endswith("x2"):
        raise unknown(i, "packed comparisons are not implemented")
    kind = value_kind(type_name)
    if comparison in _UNSIGNED:
        predicate = _UNSIGNED[comparison]
    elif comparison in ("eq", "ne"):
        predicate = comparison
    elif comparison in ("lt", "le", "gt", "ge"):
        predicate = f"{'s' if type_name[0] == 's' else 'u'}{comparison}"
    else:
        raise unknown(i, f"comparison .{comparison} of integers")
    return e.compare(predicate, kind, e.get(a, kind), e.get(b, kind))


def _combine(e: Emitter, how: str, value: str, op: Operand | None) -> str:
    """op: the predicate that `value` is combined with, None without a `how`."""
    return value if op is None else e.binary(how, "i1", value, e.get(op, "i1"))


def _fold_comparison(modifiers: tuple[str, ...], sources: list[int | None]) -> int | None:
    if len(sources) != 2 or None in sources or modifiers[0] not in ("eq", "ne"):
        return None
    return int((sources[0] == sources[1]) == (modifiers[0] == "eq"))


@computes("setp", statistics="setp", fold=_fold_comparison)
def set_predicate(e: Emitter, i: Instruction) -> None:
    """setp.cmp{.bool}{.ftz}.type p{|q}, a, b{, c}: p = cmp bool c, q = not cmp bool c."""
    comparison, how, ftz, type_name = split_modifiers(
        i, _COMPARISONS, ("and", "or", "xor", ""), ("ftz", ""), _COMPARED_TYPES
    )
    value = _compare_operands(e, i, comparison, type_name, bool(ftz))
    destination = i.operands[0]
    combined = i.operands[3] if how else None
    if destination.kind == "pair":
        first, second = destination.items
        # Both results are formed before either is set: c may be one of the destinations.
        opposite = e.binary("xor", "i1", value, splat("i1", 1))
        results = _combine(e, how, value, combined), _combine(e, how, opposite, combined)
        e.set(first, "i1", results[0])
        e.set(second, "i1", results[1])
        return
    e.set(destination, "i1", _combine(e, how, value, combined))


@computes("set", statistics="setp")
def set_value(e: Emitter, i: Instruction) -> None:
    """set.cmp{.bool}{.ftz}.dtype.stype d, a, b{, c}: all ones (integers) or 1.0 where it holds."""
    comparison, how, ftz, result, type_name = split_modifiers(
        i,
        _COMPARISONS,
        ("and", "or", "xor", ""),
        ("ftz", ""),
        ("u32", "s32", "f32"),
        _COMPARED_TYPES,
    )
    value = _compare_operands(e, i, comparison, type_name, bool(ftz))
    value = _combine(e, how, value, i.operands[3] if how else None)
    one = splat("i32", 0x3F800000 if result == "f32" else -1)
    e.set(i.operands[0], "i32", e.select(value, "i32", one, splat("i32", 0)))


# Addresses.

_SPACES = (
    "shared",
    "shared::cta",
    "shared::cluster",
    "global",
    "local",
    "param",
    "param::entry",
    "const",
)


@computes("cvta", statistics="integer", addressing=True)
def convert_address(e: Emitter, i: Instruction) -> None:
    """cvta{.to}.space.{u32,u64}: between an address in a space and a generic one.

    Global addresses are generic ones; shared and local addresses lie in windows of their own;
    parameters are generic addresses of the parameter buffer.
    """
    to, space, type_name = split_modifiers(i, ("to", ""), _SPACES, ("u32", "u64"))
    if type_name == "u32":
        raise unknown(i, "generic addresses have 64 bits")
    value = e.get(i.operands[1], "i64")
    if space.startswith("shared"):
        value = _window(e, value, SHARED_WINDOW, bool(to))
    elif space == "local":
        value = _window(e, value, LOCAL_WINDOW, bool(to))
    elif space.startswith("param"):
        base = e.broadcast("i64", e.scalar_field("params", "i64"))
        value = e.binary("sub" if to else "add", "i64", value, base)
    elif space == "const":
        raise unknown(i, "constant memory is not supported")
    e.set(i.operands[0], "i64", value)


def _window(e: Emitter, value: str, window: int, to: bool) -> str:
    if to:
        return e.binary("and", "i64", value, splat("i64", 0xFFFFFFFF))
    low = e.binary("and", "i64", value, splat("i64", 0xFFFFFFFF))
    return e.binary("or", "i64", low, splat("i64", window))


@computes("isspacep", statistics="integer")
def is_in_space(e: Emitter, i: Instruction) -> None:
    """isspacep.space p, a: whether a generic address lies in the space."""
    (space,) = split_modifiers(i, ("shared", "shared::cta", "shared::cluster", "global", "local"))
    value = e.get(i.operands[1], "i64")
    top = e.binary("lshr", "i64", value, splat("i64", 56))
    shared = e.compare("eq", "i64", top, splat("i64", SHARED_WINDOW >> 56))
    local = e.compare("eq", "i64", top, splat("i64", LOCAL_WINDOW >> 56))
    if space == "global":
        either = e.binary("or", "i1", shared, local)
        return e.set(i.operands[0], "i1", e.binary("xor", "i1", either, splat("i1", 1)))
    if space in ("shared", "shared::cta"):
        rank = e.binary(
            "and", "i32", e.cast("trunc", value, "i64", "i32"), splat("i32", 0xFF000000)
        )
        own = e.compare("eq", "i32", rank, e.broadcast("i32", e.scalar_field("shared_base")))
        shared = e.binary("and", "i1", shared, own)
    e.set(i.operands[0], "i1", local if space == "local" else shared)


@computes("mapa", statistics="integer")
def map_address(e: Emitter, i: Instruction) -> None:
    """mapa{.shared::cluster}.{u32,u64} d, a, rank: a's offset in another CTA of the cluster.

    Without the space, a and d are generic addresses. The rank stands in bits 24 to 31.
    """
    space, type_name = split_modifiers(i, ("shared::cluster", ""), ("u32", "u64"))
    kind = f"i{type_name[1:]}"
    if not space and kind == "i32":
        raise unknown(i, "generic addresses have 64 bits")
    value = e.get(i.operands[1], kind)
    rank = e.cast("zext", e.get(i.operands[2], "i32"), "i32", kind)
    offset = e.binary("and", kind, value, splat(kind, ~0xFF000000))
    shifted = e.binary("shl", kind, rank, splat(kind, 24))
    e.set(i.operands[0], kind, e.binary("or", kind, offset, shifted))


@computes("getctarank", statistics="integer")
def get_cta_rank(e: Emitter, i: Instruction) -> None:
    """getctarank{.shared::cluster}.{u32,u64} d, a: rank of the CTA whose shared memory a is in."""
    _, type_name = split_modifiers(i, ("shared::cluster", ""), ("u32", "u64"))
    value = e.get(i.operands[1], "i32")
    e.set(i.operands[0], "i32", e.binary("lshr", "i32", value, splat("i32", 24)))


@computes("createpolicy", statistics="integer")
def create_policy(e: Emitter, i: Instruction) -> None:
    """createpolicy.*.b64: an L2 cache policy, which changes no result; the value is opaque."""
    if i.modifiers[:1] not in (("fractional",), ("range",), ("cvt",)) or i.modifiers[-1] != "b64":
        raise unknown(i, "accepted are createpolicy.fractional, .range and .cvt with .b64")
    e.set(i.operands[0], "i64", splat("i64", 0))
