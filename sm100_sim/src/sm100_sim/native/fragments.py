"""tcgen05.ld and st in native code (`isa.tcgen05_data` has the forms)."""

from __future__ import annotations

from .language import copy, native, ptr, u32, u64
from .layout import NO_SLOT, Context, Fragment, Operation, TensorMemory
from .operands import DONE, PYTHON, operand, shared_by_lanes

#: Columns in a row of tensor memory as native code sees it: [column, 128 lanes].
TMEM_LANES = 128
#: Those of the target that has most; only columns that exist are ever owned.
TMEM_COLUMNS = 576
ALL_LANES = 0xFFFFFFFF
#: Shapes, in the order of `isa.tcgen05_data.SHAPES`.
ROWS, BITS64, BITS128, BITS256, PAIRED = range(5)


@native
def owned(t: ptr[TensorMemory], column: u32, count: u32) -> u32:
    """1 if columns [column, column + count) are all allocated, else 0."""
    if column + count > TMEM_COLUMNS or count == 0:
        return 0
    first = column >> 5
    last = (column + count - 1) >> 5
    pattern = (u32(2) << last) - (u32(1) << first)
    return 1 if t.owned & pattern == pattern else u32(0)


@native
def lane_at(shape: u32, t: u32, r: u32) -> u32:
    """Lane of register r of thread t, from the address; the table in `isa.tcgen05_data`."""
    if shape == ROWS:
        return t
    if shape == PAIRED:
        return t & 15
    if shape == BITS64:
        return (t >> 2) + 8 * (t & 1)
    bit = r if shape == BITS128 else r >> 1
    return (t >> 2) + 8 * (bit & 1)


@native
def column_at(f: ptr[Fragment], t: u32, r: u32) -> u32:
    """Column of register r of thread t, from the address."""
    if f.shape == ROWS:
        return r
    if f.shape == PAIRED:
        return r + f.split * (t >> 4)
    if f.shape == BITS64:
        return (t >> 1 & 1) + 2 * r
    if f.shape == BITS128:
        return (t & 3) + 4 * (r >> 1)
    return 2 * (t & 3) + (r & 1) + 8 * (r >> 2)


@native
def load_fragment(registers: ptr[u32], cells: ptr[u32], f: ptr[Fragment], lanes: u32) -> None:
    """Registers of some lanes from tensor memory; `cells`: at the address's lane and column."""
    for r in range(f.count):
        slot = f.slots[r]
        row = registers + u64(slot) * 32
        if slot == NO_SLOT:
            continue
        if f.shape == ROWS and f.packed == 0 and lanes == ALL_LANES:
            copy(row, cells + r * TMEM_LANES, 128)
            continue
        for t in range(32):
            if lanes >> u32(t) & 1 == 1:
                column = column_at(f, u32(t), u32(r)) << f.packed
                cell = cells + u64(column * TMEM_LANES + lane_at(f.shape, u32(t), u32(r)))
                row[t] = cell[0]
                if f.packed == 1:
                    row[t] = cell[0] & 0xFFFF | cell[TMEM_LANES] << 16


@native
def store_fragment(registers: ptr[u32], cells: ptr[u32], f: ptr[Fragment]) -> None:
    """All registers of a warp to tensor memory; `cells`: at lane and column of the address."""
    for r in range(f.count):
        row = registers + u64(f.slots[r]) * 32
        if f.shape == ROWS and f.packed == 0:
            copy(cells + r * TMEM_LANES, row, 128)
            continue
        for t in range(32):
            column = column_at(f, u32(t), u32(r)) << f.packed
            cell = cells + u64(column * TMEM_LANES + lane_at(f.shape, u32(t), u32(r)))
            cell[0] = row[t]
            if f.packed == 1:
                cell[0] = row[t] & 0xFFFF
                cell[TMEM_LANES] = row[t] >> 16


@native
def cells_at(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> ptr[u32]:
    """First cell of an access at address [0] to form[1] columns and form[2] lanes; null if Python
    must look."""
    if lanes != ALL_LANES or not shared_by_lanes(c, lanes, o.operands[0]):
        return ptr[u32](u64(0))
    address = u32(operand(c, lanes, o.operands[0]))
    lane = address >> 16
    column = address & 0xFFFF
    first = (c.index & 3) * 32
    half = lane == first + 16 and o.form[2] == 16
    if lane != first and not half or column >= TMEM_COLUMNS:
        return ptr[u32](u64(0))
    t = c.cta.tensor_memory
    if owned(t, column, u32(o.form[1])) == 0:
        return ptr[u32](u64(0))
    return t.cells + (column * TMEM_LANES + lane)


@native
def tensor_load(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> u32:
    """tcgen05.ld of the Fragment at form[0]."""
    cells = cells_at(c, lanes, o)
    if not cells:
        return PYTHON
    load_fragment(c.r32, cells, ptr[Fragment](o.form[0]), lanes)
    return DONE


@native
def tensor_store(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> u32:
    """tcgen05.st of the Fragment at form[0]."""
    cells = cells_at(c, lanes, o)
    if not cells:
        return PYTHON
    store_fragment(c.r32, cells, ptr[Fragment](o.form[0]))
    return DONE


@native
def nothing(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> u32:
    """An instruction that only orders others."""
    return DONE
