"""The shadow of a memory in native code (`shadow` has the rules).

A state is the number of the last write's access (0 for none), how many reads follow, and theirs;
its own number is its place among the shadow's states.
"""

from __future__ import annotations

from sm100_sim.native.language import Signature, boolean, i32, invoke, native, ptr, u32, u64

from ..clocks import AGENTS_OF_A_WARP
from .records import (
    ASYNC_KINDS,
    ATOMIC_KIND,
    CLC_KIND,
    GENERIC_KINDS,
    IN_FLIGHT,
    LOAD_KIND,
    MMA_KIND,
    REDUCED_KIND,
    STORE_KIND,
    AccessRow,
    BufferRecord,
    ShadowRecord,
)

#: Numbers of the states that need no accesses: never written; bytes of a live mbarrier; written by
#: something whose order is not followed (atomics).
FRESH, BARRIER, UNTRACKED = range(3)
#: Words of the states above, which the states proper follow.
FIRST_STATE = 4

GROW = Signature(None, (u64, u32))
JUDGE = Signature(None, (u64, u32, u32, u64, u32))


@native
def reserve(b: ptr[BufferRecord], more: u32) -> None:
    """Make room in a buffer."""
    if b.count + more > b.capacity:
        invoke(GROW, b.grow, u64(b), more)


@native
def reached(s: ptr[ShadowRecord], a: ptr[AccessRow], b: ptr[AccessRow], known: ptr[i32]) -> boolean:
    """Return True if access a is known to be complete where b is made. (Pairs of tcgen05
    instructions that the PTX ISA lists are in order besides, `Sanitizer.judge`.)"""
    if a.kind == MMA_KIND and b.kind == MMA_KIND and s.in_order == 1:
        return a.warp == b.warp or known[a.warp * AGENTS_OF_A_WARP] >= a.issued
    if b.kind == STORE_KIND and a.warp == b.warp and s.in_order == 1:
        if a.kind == LOAD_KIND or a.kind == STORE_KIND:
            return True
    if a.kind == b.kind and (a.kind == ATOMIC_KIND or a.kind == REDUCED_KIND):
        return True
    return a.clock != IN_FLIGHT and known[u32(a.agent)] >= a.clock


@native
def check(s: ptr[ShadowRecord], before: i32, access: u32, known: ptr[i32]) -> None:
    """Let Python judge a pair unless it is ordered and needs no proxy fence."""
    rows = ptr[AccessRow](s.accesses.data)
    a = rows[u32(before)]
    b = rows[access]
    ordered = reached(s, a, b, known)
    if ordered:
        if u32(GENERIC_KINDS) >> a.kind & 1 == 0 or u32(ASYNC_KINDS) >> b.kind & 1 == 0:
            return
        if a.write == 0 and b.kind != CLC_KIND:
            return
        if known[s.agents + a.warp] >= a.issued:
            return
    invoke(JUDGE, s.judge, u64(s), u32(before), access, u64(known), u32(ordered))


@native
def after_write(s: ptr[ShadowRecord], access: u32) -> i32:
    """The state in which `access` is the last write and nobody has read."""
    states = s.states
    data = ptr[i32](states.data)
    last = u32(s.last)
    if data[last] == i32(access) and data[last + 1] == 0:
        return s.last
    reserve(states, u32(2))
    data = ptr[i32](states.data)
    place = states.count
    data[place] = i32(access)
    data[place + 1] = 0
    states.count = place + 2
    s.last = i32(place)
    return s.last


@native
def after_read(s: ptr[ShadowRecord], number: i32, access: u32, known: ptr[i32]) -> i32:
    """The state that follows by a read; reads that are known to be complete are forgotten."""
    states = s.states
    old = u32(number)
    count = u32(ptr[i32](states.data)[old + 1])
    reserve(states, count + 3)
    data = ptr[i32](states.data)
    rows = ptr[AccessRow](s.accesses.data)
    for i in range(count):
        if data[u64(old) + 2 + i] == i32(access):
            return number
    place = states.count
    data[place] = data[old]
    kept: u32 = 0
    for i in range(count):
        read = data[u64(old) + 2 + i]
        row = rows[u32(read)]
        if row.clock == IN_FLIGHT or known[u32(row.agent)] < row.clock:
            data[place + 2 + kept] = read
            kept += 1
    data[place + 2 + kept] = i32(access)
    kept += 1
    data[place + 1] = i32(kept)
    last = u32(s.last)
    same = True
    for i in range(kept + 2):
        if data[u64(last) + i] != data[u64(place) + i]:
            same = False
            break
    if same:
        return s.last
    states.count = place + kept + 2
    s.last = i32(place)
    return s.last


@native
def follow(s: ptr[ShadowRecord], number: i32, access: u32, write: u32, known: ptr[i32]) -> i32:
    """The state after `access` to granules in state `number`."""
    if number == BARRIER or number == FRESH and write == 0:
        invoke(JUDGE, s.judge, u64(s), u32(number), access, u64(known), u32(0))
        return BARRIER if number == BARRIER else i32(UNTRACKED)
    if number == FRESH:
        return after_write(s, access)
    place = u32(number)
    before = ptr[i32](s.states.data)[place]
    if before == i32(access) and write == 0:
        return number
    if before != 0 and before != i32(access):
        check(s, before, access, known)
    if write == 0:
        return after_read(s, number, access, known)
    for i in range(ptr[u32](s.states.data)[place + 1]):
        read = ptr[i32](s.states.data)[u64(place) + 2 + i]
        if read != i32(access):
            check(s, read, access, known)
    return after_write(s, access)


@native
def touch_run(
    s: ptr[ShadowRecord], access: u32, write: u32, known: ptr[i32], start: u64, count: u64
) -> boolean:
    """Record an access to `count` granules from `start` on; whether there are that many."""
    if start + count > s.cells:
        return False
    plane = s.plane + start
    i: u64 = 0
    while i < count:
        old = plane[i]
        new = follow(s, old, access, write, known)
        while i < count and plane[i] == old:
            plane[i] = new
            i += 1
    return True


@native
def touch_rows(
    s: ptr[ShadowRecord],
    access: u32,
    write: u32,
    known: ptr[i32],
    start: u64,
    count: u64,
    stride: u64,
    rows: u64,
) -> u32:
    """Touch `rows` times `count` granules, `stride` from one row to the next; see `touch_run`."""
    i: u64 = 0
    while i < rows:
        if not touch_run(s, access, write, known, start + i * stride, count):
            return 0
        i += 1
    return 1


@native
def touch_cells(
    s: ptr[ShadowRecord],
    access: u32,
    write: u32,
    known: ptr[i32],
    cells: ptr[u64],
    count: u64,
    unit: u64,
) -> u32:
    """Touch `unit` granules from each of `count` multiples of `unit` on; see `touch_run`."""
    for i in range(count):
        if not touch_run(s, access, write, known, cells[i] * unit, unit):
            return 0
    return 1
