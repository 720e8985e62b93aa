"""Reading operands in native routines."""

from __future__ import annotations

from .language import boolean, native, popcount, ptr, trailing_zeros, u32, u64
from .layout import Context, Operand

#: Results of a routine: the operation is done; Python must do it, nothing has changed; all lanes
#: wait and execute it again when they are woken.
DONE, PYTHON, WAIT = range(3)

#: Kinds of Operand. CONSTANT: `value`. REGISTER32: register + value modulo 2^32. REGISTER64:
#: register + value. LOW32: its low 32 bits. SYMBOL: shared symbol at offset `value`. PREDICATE: 0
#: or 1, `value` all ones if negated.
CONSTANT, REGISTER32, REGISTER64, LOW32, SYMBOL, PREDICATE = range(6)


@native
def operand(c: ptr[Context], lanes: u32, o: ptr[Operand]) -> u64:
    """Value of an operand in the lowest set lane."""
    if o.kind == CONSTANT:
        return o.value
    lane = trailing_zeros(lanes)
    place = o.slot * 32 + lane
    if o.kind == REGISTER32:
        return (u64(c.r32[place]) + o.value) & 0xFFFFFFFF
    if o.kind == REGISTER64:
        return c.r64[place] + o.value
    if o.kind == LOW32:
        return (c.r64[place] + o.value) & 0xFFFFFFFF
    if o.kind == PREDICATE:
        return u64((c.preds[o.slot] ^ u32(o.value)) >> lane & 1)
    return u64(c.shared_base) + o.value


@native
def shared_by_lanes(c: ptr[Context], lanes: u32, o: ptr[Operand]) -> boolean:
    """Return True if all set lanes have the same value of a register operand."""
    if lanes & (lanes - 1) == 0 or o.kind == CONSTANT or o.kind == SYMBOL:
        return True
    lane = trailing_zeros(lanes)
    different: u64 = 0
    if o.kind == REGISTER32:
        row = c.r32 + o.slot * 32
        first = row[lane]
        found: u32 = 0
        for i in range(32):
            found |= (row[i] ^ first) & (0 - (lanes >> u32(i) & 1))
        different = u64(found)
    elif o.kind == PREDICATE:
        mask = c.preds[o.slot] & lanes
        different = 0 if mask == 0 or mask == lanes else u64(1)
    else:
        wide = c.r64 + o.slot * 32
        head = wide[lane]
        for i in range(32):
            different |= (wide[i] ^ head) & (0 - u64(lanes >> u32(i) & 1))
    return different == 0


@native
def lane_count(lanes: u32) -> u64:
    """Lanes in a mask."""
    return u64(popcount(lanes))
