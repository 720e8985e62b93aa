"""Loads and stores (PTX ISA 9.7.9.8 to 9.7.9.13) of shared, global, local and generic addresses.

Every lane's address is checked in native code; a refused access becomes a fault of the warp.
Memory-consistency and cache modifiers change no result, because warps run one at a time.
"""

from __future__ import annotations

from sm100_sim.isa.columns import MemoryAccess, Rule, Ties
from sm100_sim.isa.emitter import Emitter, splat
from sm100_sim.isa.table import inline_op, split_modifiers, unknown
from sm100_sim.ptx.parser import TYPE_BYTES, Instruction, Operand

_SEMANTICS = ("weak", "relaxed", "acquire", "release", "volatile", "mmio", "")
_SCOPES = ("cta", "cluster", "gpu", "sys", "")
_SPACES = (
    "shared",
    "shared::cta",
    "shared::cluster",
    "global",
    "local",
    "param",
    "param::entry",
    "",
)
_CACHE = ("ca", "cg", "cs", "lu", "cv", "wb", "wt", "")
_EVICTION = (
    "L1::evict_normal",
    "L1::evict_unchanged",
    "L1::evict_first",
    "L1::evict_last",
    "L1::no_allocate",
    "",
)
_L2_EVICTION = ("L2::evict_normal", "L2::evict_first", "L2::evict_last", "")
_HINT = ("L2::cache_hint", "")
_PREFETCH = ("L2::64B", "L2::128B", "L2::256B", "")
_VECTORS = ("v2", "v4", "v8", "")
_TYPES = tuple(
    name
    for name in TYPE_BYTES
    if name[:1] in "bsuf" and name not in ("f16", "bf16", "f16x2", "bf16x2", "f32x2")
)
_FUNCTIONS = {
    "shared": "address_own_shared",
    "shared::cta": "address_own_shared",
    "shared::cluster": "address_shared",
    "global": "address_global",
    "local": "address_local",
    "": "address_generic",
    "param": "address_global",
    "param::entry": "address_global",
}


def _space(i: Instruction) -> str:
    return next(
        (m for m in i.modifiers if m.split("::")[0] in ("shared", "global", "local", "param")),
        "generic",
    ).split("::")[0]


def host_pointers(
    e: Emitter, i: Instruction, op: Operand, space: str, width: int, write: bool, lanes: int = -1
) -> tuple[str, str]:
    """Checked host addresses of a mem operand: (i64 lanes, mask <32 x i1> of lanes to access).

    lanes: mask of those whose addresses count.
    """
    mask = _check(e, i, op, space, width, write, lanes)
    pointers = e.name_for("load <32 x i64>, ptr %scratch, align 64")
    return pointers, e.name_for(f"bitcast i32 {mask} to <32 x i1>")


def _check(
    e: Emitter, i: Instruction, op: Operand, space: str, width: int, write: bool, lanes: int = -1
) -> str:
    """Check an access, leaving the addresses in %scratch; return the mask as i32."""
    if op.kind != "mem" or op.items:
        raise unknown(i, "the address operand must be [base + offset]")
    wide = "" if space == "" else space.split("::")[0]
    if wide == "param":
        address = _parameter_addresses(e, op, width)
    elif wide in ("", "global"):
        address = e.get(op.base, "i64")
        address = e.binary("add", "i64", address, splat("i64", op.value)) if op.value else address
    else:
        base = e.get(op.base, "i32")
        base = e.binary("add", "i32", base, splat("i32", op.value)) if op.value else base
        address = e.cast("zext", base, "i32", "i64")
    e.scratch_needed = True
    e.line(f"store <32 x i64> {address}, ptr %scratch, align 64")
    given = e.executing_mask()
    if lanes != -1:
        given = e.name_for(f"and i32 {given}, {lanes}")
    mask = e.name_for(
        f"call i32 @{_FUNCTIONS[space]}(ptr %context, i32 {given}, ptr %scratch, "
        f"i32 {width}, i32 {int(write)}, i32 {i.index})"
    )
    if e.logging and wide not in ("local", "param"):
        tag = i.index << 1 | write
        e.line(
            f"call void @log_access(ptr %context, i32 {mask}, ptr %scratch, i32 {width}, i32 {tag})"
        )
    return mask


def _parameter_addresses(e: Emitter, op: Operand, width: int) -> str:
    """Host addresses (i64 lanes) of offsets in the parameters that registers hold.

    Offsets past the parameters become addresses that no memory has, so they fault.
    """
    offset = e.binary("add", "i64", e.get(op.base, "i64"), splat("i64", op.value))
    end = e.binary("add", "i64", offset, splat("i64", width))
    size = e.convert(e.broadcast("i32", e.scalar_field("param_bytes")), "i32", "i64")
    begins = e.name_for(f"icmp ult <32 x i64> {offset}, {size}")
    fits = e.name_for(f"icmp ule <32 x i64> {end}, {size}")
    inside = e.binary("and", "i1", begins, fits)
    start = e.broadcast("i64", e.scalar_field("params", "i64"))
    host = e.binary("add", "i64", start, offset)
    nowhere = e.binary("or", "i64", offset, splat("i64", -(1 << 63)))
    return e.name_for(f"select <32 x i1> {inside}, <32 x i64> {host}, <32 x i64> {nowhere}")


def _unit(type_name: str) -> tuple[str, int]:
    size = TYPE_BYTES[type_name]
    return f"i{8 * size}", size


def _pieces(e: Emitter, i: Instruction, op: Operand, vector: str) -> tuple[Operand, ...]:
    items = op.items if op.kind == "vec" else (op,)
    if len(items) != int(vector[1:] or 1 if vector else 1):
        raise unknown(i, f"the vector operand must have {vector[1:] or 1} members")
    return items


def _lane_pointers(e: Emitter) -> None:
    """Emit, in a function of the module, %active of its %mask, %at from its %pointers and
    %offset."""
    e.line("%active = bitcast i32 %mask to <32 x i1>")
    pointers = e.name_for("load <32 x i64>, ptr %pointers, align 64")
    pointers = e.binary("add", "i64", pointers, e.broadcast("i64", "%offset"))
    e.line(f"%at = inttoptr <32 x i64> {pointers} to <32 x ptr>")


def _gather(e: Emitter, kind: str, mask: str, offset: int) -> str:
    """Lanes loaded `offset` bytes behind the addresses in %scratch; 0 in those not in the mask."""

    def build(body: Emitter) -> str:
        _lane_pointers(body)
        return body.gather(kind, "%at", "%active", int(kind[1:]) // 8)

    function = e.module_function(
        f"gather_{kind}", f"<32 x {kind}>", "ptr %pointers, i64 %offset, i32 %mask", build
    )
    return e.name_for(f"call <32 x {kind}> {function}(ptr %scratch, i64 {offset}, i32 {mask})")


def _scatter(e: Emitter, kind: str, value: str, mask: str, offset: int) -> None:
    """Lanes of the mask stored `offset` bytes behind the addresses in %scratch."""

    def build(body: Emitter) -> str:
        _lane_pointers(body)
        body.scatter(kind, "%value", "%at", "%active", int(kind[1:]) // 8)
        return ""

    function = e.module_function(
        f"scatter_{kind}",
        "void",
        f"ptr %pointers, i64 %offset, i32 %mask, <32 x {kind}> %value",
        build,
    )
    e.line(f"call void {function}(ptr %scratch, i64 {offset}, i32 {mask}, <32 x {kind}> {value})")


def _set_loaded(e: Emitter, op: Operand, type_name: str, value: str) -> None:
    """Write a loaded value, extended to its register by the sign of the type."""
    kind, size = _unit(type_name)
    if op.kind == "sink":
        return
    target = "i64" if op.register.file == "r64" else "i32"
    if type_name[0] == "s" and 8 * size < int(target[1:]):
        wanted = "i16" if op.register.type.endswith("16") and size == 1 else target
        value, kind = e.cast("sext", value, kind, wanted), wanted
    e.set(op, kind, value)


@inline_op(
    "ld",
    statistics=lambda i: f"ld.{_space(i)}",
    defines=(0,),
    access=MemoryAccess.LOAD,
    rule=Rule.LOGGED,
    ties=Ties.IF_ORDERED,
)
def load(e: Emitter, i: Instruction) -> None:
    """ld{.sem}{.scope}{.space}{cache modifiers}{.vec}.type d, [a]{, policy}."""
    _, _, space, *_, vector, type_name = split_modifiers(
        i,
        _SEMANTICS,
        _SCOPES,
        _SPACES,
        _CACHE,
        ("nc", ""),
        _EVICTION,
        _L2_EVICTION,
        _HINT,
        _PREFETCH,
        _VECTORS,
        _TYPES,
    )
    items = _pieces(e, i, i.operands[0], vector)
    base = i.operands[1].base
    if space.startswith("param") and base is not None and base.kind == "sym":
        return _load_param(e, i, items, type_name)
    kind, size = _unit(type_name)
    mask = _check(e, i, i.operands[1], space, size * len(items), False)
    if type_name == "b128":
        return e.set_wide(items[0], *(_gather(e, "i64", mask, offset) for offset in (0, 8)))
    values = [_gather(e, kind, mask, size * position) for position in range(len(items))]
    for op, value in zip(items, values, strict=True):
        _set_loaded(e, op, type_name, value)


@inline_op(
    "ldu",
    statistics="ld.global",
    defines=(0,),
    access=MemoryAccess.LOAD,
    rule=Rule.LOGGED,
    ties=Ties.NEVER,
)
def load_uniform(e: Emitter, i: Instruction) -> None:
    """ldu{.global}: a load that the kernel promises to be uniform."""
    load(e, i)


def _load_param(e: Emitter, i: Instruction, items: tuple[Operand, ...], type_name: str) -> None:
    """ld.param by name: the offset is known, so one scalar load serves all lanes."""
    op, (kind, size) = i.operands[1], _unit(type_name)
    if op.base.type != "param":
        raise unknown(i, "the name is not one of a parameter")
    for position, item in enumerate(items):
        offset = op.base.value + op.value + size * position
        pointer = e.name_for(f"getelementptr inbounds i8, ptr {e.field('params')}, i64 {offset}")
        scalar = e.name_for(f"load {kind}, ptr {pointer}, align 1")
        _set_loaded(e, item, type_name, e.broadcast(kind, scalar))


@inline_op(
    "st",
    statistics=lambda i: f"st.{_space(i)}",
    access=MemoryAccess.STORE,
    rule=Rule.LOGGED,
    ties=Ties.IF_ORDERED,
)
def store(e: Emitter, i: Instruction) -> None:
    """st{.sem}{.scope}{.space}{cache modifiers}{.vec}.type [a], b{, policy}."""
    _, _, space, *_, vector, type_name = split_modifiers(
        i, _SEMANTICS, _SCOPES, _SPACES, _CACHE, _EVICTION, _L2_EVICTION, _HINT, _VECTORS, _TYPES
    )
    if space.startswith("param"):
        raise unknown(i, "kernel parameters are read-only")
    items = _pieces(e, i, i.operands[1], vector)
    kind, size = _unit(type_name)
    mask = _check(e, i, i.operands[0], space, size * len(items), True)
    if type_name == "b128":
        for offset, value in zip((0, 8), e.wide(items[0]), strict=True):
            _scatter(e, "i64", value, mask, offset)
        return
    for position, op in enumerate(items):
        _scatter(e, kind, e.get(op, kind), mask, size * position)
