"""Instructions that exchange data between the lanes of a warp (PTX ISA 9.7.9.5, 9.7.13).

Each waits until the lanes of its membermask have converged; only then is it executed, by all of
them together.
"""

from __future__ import annotations

from sm100_sim.isa.columns import Mix, Rule, Ties
from sm100_sim.isa.emitter import Emitter, splat
from sm100_sim.isa.table import computes, inline_op, split_modifiers, unknown
from sm100_sim.ptx.parser import Instruction

from .floating import larger


def _permute(e: Emitter, value: str, index: str) -> str:
    """value[index] per lane, through memory: lanes are few and the buffer is in the cache."""
    e.scratch_needed = True
    e.line(f"store <32 x i32> {value}, ptr %scratch, align 64")
    pointers = e.name_for(f"getelementptr i32, ptr %scratch, <32 x i32> {index}")
    return e.gather("i32", pointers, splat("i1", 1), 4)


def _lanes(e: Emitter) -> str:
    return e.lane_constants(range(32))


@computes("shfl.sync", statistics="shfl", member_mask=4, mix=Mix.SHUFFLE)
def shuffle(e: Emitter, i: Instruction) -> None:
    """shfl.sync.{up,down,bfly,idx}.b32 d{|p}, a, b, c, membermask (9.7.9.6).

    c holds the clamp in bits 0-4 and the segment mask in bits 8-12; out of range, a lane keeps its
    own value and p is false.
    """
    mode, _ = split_modifiers(i, ("up", "down", "bfly", "idx"), ("b32",))
    value, b, c = (e.get(op, "i32") for op in i.operands[1:4])
    lane = _lanes(e)
    b = e.binary("and", "i32", b, splat("i32", 31))
    clamp = e.binary("and", "i32", c, splat("i32", 31))
    segment = e.binary("and", "i32", e.binary("lshr", "i32", c, splat("i32", 8)), splat("i32", 31))
    outside = e.binary("xor", "i32", segment, splat("i32", 31))
    lowest = e.binary("and", "i32", lane, segment)
    highest = e.binary("or", "i32", lowest, e.binary("and", "i32", clamp, outside))
    if mode == "idx":
        source = e.binary("or", "i32", lowest, e.binary("and", "i32", b, outside))
    else:
        operation = {"up": "sub", "down": "add", "bfly": "xor"}[mode]
        source = e.binary(operation, "i32", lane, b)
    inside = e.compare("sge" if mode == "up" else "sle", "i32", source, highest)
    source = e.binary("and", "i32", e.select(inside, "i32", source, lane), splat("i32", 31))
    result = _permute(e, value, source)
    destination = i.operands[0]
    if destination.kind == "pair":
        e.set(destination.items[1], "i1", inside)
        destination = destination.items[0]
    e.set(destination, "i32", result)


def _member_lanes(e: Emitter, i: Instruction, op) -> str:
    """Scalar i32: lanes that execute and are in the membermask."""
    if op.kind == "imm":
        return e.name_for(f"and i32 {e.executing_mask()}, {op.value & 0xFFFFFFFF}")
    # The mask is the same in every lane that executes; their converged set is what counts.
    return e.executing_mask()


@computes("vote.sync", statistics="vote", member_mask=2, mix=Mix.VOTE)
def vote(e: Emitter, i: Instruction) -> None:
    """vote.sync.{all,any,uni}.pred p, a, mask and vote.sync.ballot.b32 d, a, mask."""
    mode, type_name = split_modifiers(i, ("all", "any", "uni", "ballot"), ("pred", "b32"))
    members = _member_lanes(e, i, i.operands[2])
    holds = e.name_for(f"bitcast <32 x i1> {e.get(i.operands[1], 'i1')} to i32")
    yes = e.name_for(f"and i32 {holds}, {members}")
    if mode == "ballot":
        return e.set(i.operands[0], "i32", e.broadcast("i32", yes))
    every = e.name_for(f"icmp eq i32 {yes}, {members}")
    some = e.name_for(f"icmp ne i32 {yes}, 0")
    result = every if mode == "all" else some
    if mode == "uni":
        result = e.name_for(f"or i1 {every}, {e.name_for(f'xor i1 {some}, true')}")
    e.set(i.operands[0], "i1", e.broadcast("i1", result))


@computes("elect.sync", statistics="vote", member_mask=1)
def elect(e: Emitter, i: Instruction) -> None:
    """elect.sync d|p, membermask: the lowest member lane is elected; d is its number."""
    split_modifiers(i)
    members = _member_lanes(e, i, i.operands[1])
    e.declarations.add("declare i32 @llvm.cttz.i32(i32, i1)")
    lane = e.name_for(f"call i32 @llvm.cttz.i32(i32 {members}, i1 false)")
    negative = e.name_for(f"sub i32 0, {members}")
    lowest = e.name_for(f"and i32 {members}, {negative}")
    destination, elected = i.operands[0].items
    e.set(elected, "i1", e.name_for(f"bitcast i32 {lowest} to <32 x i1>"))
    if destination.kind != "sink":
        e.set(destination, "i32", e.broadcast("i32", lane))


@computes("activemask", statistics="vote")
def active_mask(e: Emitter, i: Instruction) -> None:
    """activemask.b32 d: the lanes that execute it."""
    split_modifiers(i, ("b32",))
    e.set(i.operands[0], "i32", e.broadcast("i32", e.executing_mask()))


@inline_op(
    "bar.warp.sync",
    "barrier.warp.sync",
    statistics="vote",
    member_mask=0,
    rule=Rule.NOT_FOLLOWED,
    ties=Ties.NEVER,
)
def warp_barrier(e: Emitter, i: Instruction) -> None:
    """bar.warp.sync membermask: waiting for the lanes is all it does."""
    split_modifiers(i)


@computes("match.any.sync", "match.all.sync", statistics="vote", member_mask=2)
def match(e: Emitter, i: Instruction) -> None:
    """match.{any,all}.sync.{b32,b64} d{|p}, a, mask: lanes that hold the same value."""
    (type_name,) = split_modifiers(i, ("b32", "b64"))
    kind = f"i{type_name[1:]}"
    members, value = _member_lanes(e, i, i.operands[2]), e.get(i.operands[1], kind)
    masks = "poison"
    for lane in range(32):
        one = e.name_for(f"extractelement <32 x {kind}> {value}, i32 {lane}")
        equal = e.compare("eq", kind, value, e.broadcast(kind, one))
        mask = e.name_for(f"bitcast <32 x i1> {equal} to i32")
        mask = e.name_for(f"and i32 {mask}, {members}")
        masks = e.name_for(f"insertelement <32 x i32> {masks}, i32 {mask}, i32 {lane}")
    destination = i.operands[0]
    if i.opcode == "match.any.sync":
        return e.set(destination, "i32", masks)
    same = e.compare("eq", "i32", masks, e.broadcast("i32", members))
    first, second = destination.items if destination.kind == "pair" else (destination, None)
    e.set(first, "i32", e.select(same, "i32", masks, splat("i32", 0)))
    if second is not None:
        e.set(second, "i1", same)


@computes("redux.sync", statistics="redux", member_mask=2)
def reduce(e: Emitter, i: Instruction) -> None:
    """redux.sync.{add,min,max,and,or,xor}.type d, a, mask; f32 min and max{.abs}{.NaN}."""
    operation, absolute, nan, type_name = split_modifiers(
        i,
        ("add", "min", "max", "and", "or", "xor"),
        ("abs", ""),
        ("NaN", ""),
        ("u32", "s32", "b32", "f32"),
    )
    members = e.name_for(f"bitcast i32 {_member_lanes(e, i, i.operands[2])} to <32 x i1>")
    if type_name == "f32":
        return _reduce_float(e, i, operation, bool(absolute), bool(nan), members)
    neutral = {
        "add": 0,
        "or": 0,
        "xor": 0,
        "and": -1,
        "min": 0x7FFFFFFF if type_name == "s32" else -1,
        "max": -(1 << 31) if type_name == "s32" else 0,
    }[operation]
    name = (
        operation
        if operation not in ("min", "max")
        else f"{'s' if type_name == 's32' else 'u'}{operation}"
    )
    value = e.select(members, "i32", e.get(i.operands[1], "i32"), splat("i32", neutral))
    full = f"@llvm.vector.reduce.{name}.v32i32"
    e.declarations.add(f"declare i32 {full}(<32 x i32>)")
    result = e.name_for(f"call i32 {full}(<32 x i32> {value})")
    e.set(i.operands[0], "i32", e.broadcast("i32", result))


def _reduce_float(
    e: Emitter, i: Instruction, operation: str, absolute: bool, nan: bool, members: str
) -> None:
    if operation not in ("min", "max"):
        raise unknown(i, "f32 reductions are min and max")
    value = e.get(i.operands[1], "float")
    if absolute:
        value = e.intrinsic("fabs", "float", value)
    # Lanes outside hold a neutral value: NaN loses, unless NaN is what .NaN looks for.
    extreme = 0xFF800000 if operation == "max" else 0x7F800000
    value = e.select(members, "float", value, e.float_constant(extreme if nan else 0x7FFFFFFF))
    for step in (16, 8, 4, 2, 1):
        bits = e.cast("bitcast", value, "float", "i32")
        order = ", ".join(f"i32 {lane ^ step}" for lane in range(32))
        other = e.name_for(
            f"shufflevector <32 x i32> {bits}, <32 x i32> poison, <32 x i32> <{order}>"
        )
        value = larger(e, operation, "float", value, e.cast("bitcast", other, "i32", "float"), nan)
    e.set(i.operands[0], "float", value)
