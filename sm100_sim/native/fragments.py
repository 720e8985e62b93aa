"""tcgen05.ld and st of shape 32x32b in native code (`isa.tcgen05_data`)."""

from __future__ import annotations

from .language import copy, native, ptr, u32, u64
from .layout import Context, Operation, TensorMemory
from .operands import DONE, PYTHON, operand, shared_by_lanes

#: Columns in a row of tensor memory as native code sees it: [column, 128 lanes].
TMEM_LANES = 128
TMEM_COLUMNS = 512
ALL_LANES = 0xFFFFFFFF


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
def fragment(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> ptr[u32]:
    """First cell of an access at address [0] to form[1] columns; null if Python must look."""
    if lanes != ALL_LANES or not shared_by_lanes(c, lanes, o.operands[0]):
        return ptr[u32](u64(0))
    address = u32(operand(c, lanes, o.operands[0]))
    lane = address >> 16
    column = address & 0xFFFF
    if lane != (c.index & 3) * 32 or column >= TMEM_COLUMNS:
        return ptr[u32](u64(0))
    t = c.cta.tensor_memory
    if owned(t, column, u32(o.form[1])) == 0:
        return ptr[u32](u64(0))
    return t.cells + (column * TMEM_LANES + lane)


@native
def tensor_load(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> u32:
    """tcgen05.ld.32x32b into form[1] consecutive registers from slot form[0] on."""
    cells = fragment(c, lanes, o)
    if not cells:
        return PYTHON
    registers = c.r32 + o.form[0] * 32
    for i in range(o.form[1]):
        copy(registers + i * 32, cells + i * TMEM_LANES, 128)
    return DONE


@native
def tensor_store(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> u32:
    """tcgen05.st.32x32b of form[1] consecutive registers from slot form[0] on."""
    cells = fragment(c, lanes, o)
    if not cells:
        return PYTHON
    registers = c.r32 + o.form[0] * 32
    for i in range(o.form[1]):
        copy(cells + i * TMEM_LANES, registers + i * 32, 128)
    return DONE


@native
def nothing(c: ptr[Context], lanes: u32, o: ptr[Operation]) -> u32:
    """An instruction that only orders others."""
    return DONE
