"""Accesses that native code has logged, recorded in native code.

Loads and stores of a warp to the shared memory of its own CTA and to global memory, as
`Sanitizer.drain` and `global_memory` record them. The others, and whatever may be a finding, are
left to Python.
"""

from __future__ import annotations

from sm100_sim.native.language import (
    boolean,
    copy,
    i32,
    native,
    ptr,
    stack,
    u8,
    u32,
    u64,
)
from sm100_sim.native.layout import Context
from sm100_sim.translate.access_log import LOG_HEADER, LOG_RECORD

from ..clocks import AGENTS_OF_A_WARP
from .records import (
    GENERIC_KIND,
    AccessRow,
    GlobalRecord,
    Log,
    LogRecord,
    RangeRecord,
    WarpRecord,
    WriterRow,
)
from .tracking import reserve, touch_cells, touch_run

RECORD_BYTES = LOG_RECORD.itemsize
#: Granules of shared memory are 4 bytes.
GRANULE_SHIFT = 2
#: Granules of global memory are 2 bytes.
GLOBAL_SHIFT = 1


@native
def agent_of(w: ptr[WarpRecord], which: u32) -> u32:
    """One of a warp's agents."""
    return w.number * AGENTS_OF_A_WARP + which


@native
def add_access(
    w: ptr[WarpRecord], agent: i32, clock: i32, kind: u32, write: u32, index: u32, signal: u32
) -> u32:
    """Number of a new access by a warp now."""
    table = w.cluster.accesses
    reserve(table, u32(1))
    number = table.count
    table.count = number + 1
    row = ptr[AccessRow](table.data) + number
    row.agent = agent
    row.clock = clock
    row.kind = kind
    row.write = write
    row.warp = w.number
    row.issued = w.clock
    row.index = i32(index)
    row.signal = signal
    return number


@native
def range_at(g: ptr[GlobalRecord], address: u64) -> ptr[RangeRecord]:
    """The range of global memory that holds an address; null for none."""
    low: u64 = 0
    high = g.count
    while low < high:
        middle = (low + high) >> 1
        if g.ranges[middle].end <= address:
            low = middle + 1
        else:
            high = middle
    if low == g.count or g.ranges[low].start > address:
        return ptr[RangeRecord](u64(0))
    return g.ranges + low


@native
def own_write(w: ptr[WarpRecord], number: i32, write: u32) -> boolean:
    """Return True if a write is of the warp's CTA, and to a reader known."""
    row = ptr[WriterRow](w.cluster.writes.writers.data) + u32(number)
    if row.cluster != w.cluster.number or row.rank != w.rank:
        return False
    return write != 0 or w.frontier[u32(row.agent)] >= row.clock


@native
def writer_of(w: ptr[WarpRecord], index: u32) -> u32:
    """Number of a write by a warp now."""
    table = w.cluster.writes.writers
    agent = agent_of(w, u32(0))
    last = ptr[WriterRow](table.data) + (table.count - 1)
    if last.cluster == w.cluster.number and u32(last.agent) == agent:
        if last.clock == w.clock and u32(last.index) == index:
            return table.count - 1
    reserve(table, u32(1))
    number = table.count
    table.count = number + 1
    row = ptr[WriterRow](table.data) + number
    row.cluster = w.cluster.number
    row.rank = w.rank
    row.warp = w.number
    row.agent = i32(agent)
    row.clock = w.clock
    row.issued = w.clock
    row.kind = u32(GENERIC_KIND)
    row.index = i32(index)
    return number


@native
def addresses_of(r: ptr[LogRecord], addresses: ptr[u64]) -> u64:
    """Put the addresses of a record's lanes one after the other; their number, 32 at most."""
    count: u64 = 0
    for lane in range(32):
        if r.mask >> u32(lane) & 1 == 1:
            addresses[count] = r.addresses[lane]
            count += 1
    return count


@native
def touch_global(
    w: ptr[WarpRecord], addresses: ptr[u64], lanes: u64, width: u64, index: u32, write: u32
) -> boolean:
    """Record a load or store of `width` bytes of global memory at each address; False, before
    anything is recorded, if it is one for Python (`GlobalWrites.store` and `load`)."""
    g = w.cluster.writes
    found = range_at(g, addresses[0])
    if not found or write != 0 and g.guarded != 0:
        return False
    if not found.plane:
        # Nobody has written there.
        for lane in range(lanes):
            if addresses[lane] < found.start or addresses[lane] >= found.end:
                return False
        return write == 0
    count = width >> GLOBAL_SHIFT if width > 1 else u64(1)
    known: i32 = 0
    for lane in range(lanes):
        address = addresses[lane]
        if address < found.start or address + width > found.end:
            return False
        first = (address - found.start) >> GLOBAL_SHIFT
        for i in range(count):
            before = found.plane[first + i]
            if before != 0 and before != known:
                if not own_write(w, before, write):
                    return False
                known = before
    if write == 0:
        return True
    number = i32(writer_of(w, index))
    for lane in range(lanes):
        first = (addresses[lane] - found.start) >> GLOBAL_SHIFT
        for i in range(count):
            found.plane[first + i] = number
    return True


@native
def drain_record(w: ptr[WarpRecord], r: ptr[LogRecord]) -> boolean:
    """Record one access of native code; False if that is for Python."""
    k = w.cluster
    index = r.tag >> 1
    write = r.tag & 1
    if r.mask == 0:
        return True
    if k.ordered[index] != 0:
        return False
    addresses = stack(u64, 32)
    lanes = addresses_of(r, addresses)
    base = k.memory + u64(w.rank) * k.row
    if addresses[0] - base >= k.row:
        for lane in range(lanes):
            if addresses[lane] - k.memory < k.bytes:
                return False
        return touch_global(w, addresses, lanes, u64(r.width), index, write)
    cells = stack(u64, 32)
    count: u64 = 0
    unit = u64(r.width) >> GRANULE_SHIFT if r.width > 4 else u64(1)
    for lane in range(lanes):
        offset = addresses[lane] - base
        if offset >= k.row:
            return False
        cell = (offset >> GRANULE_SHIFT) // unit
        if count == 0 or cells[count - 1] != cell:
            cells[count] = cell
            count += 1
    w.unfenced = u32(1)
    access = add_access(
        w, i32(agent_of(w, u32(0))), w.clock, u32(GENERIC_KIND), write, index, u32(0)
    )
    adjacent = True
    for i in range(1, count):
        if cells[i] != cells[i - 1] + 1:
            adjacent = False
            break
    s = k.ctas[w.rank].smem
    if adjacent:
        touch_run(s, access, write, w.frontier, cells[0] * unit, count * unit)
    else:
        touch_cells(s, access, write, w.frontier, cells, count, unit)
    return True


@native
def drain(c: ptr[Context], w: ptr[WarpRecord]) -> boolean:
    """Record what native code has accessed since; False if Python must do the first of the rest."""
    log = ptr[Log](c.log)
    count = u64(log.count)
    if count == 0:
        return True
    records = ptr[LogRecord](c.log + LOG_HEADER)
    for i in range(count):
        if not drain_record(w, records[i]):
            for j in range(i, count):
                place = ptr[u8](u64(records[j - i]))
                copy(place, ptr[u8](u64(records[j])), u64(RECORD_BYTES))
            log.count = u32(count - i)
            return False
    log.count = u32(0)
    return True


@native
def drain_log(c: ptr[Context]) -> u32:
    """`drain`, for Python."""
    return u32(1) if drain(c, ptr[WarpRecord](c.watch)) else u32(0)
