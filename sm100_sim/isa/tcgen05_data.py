"""tcgen05.ld, tcgen05.st and their waits: registers of one warp <-> tensor memory.

PTX ISA 9.3, "tcgen05.ld", "tcgen05.st" and "Matrix fragments" of the data-movement shapes. For
thread t, register r, the cell is at lane L and column C from the address:

  32x32b   L = t                        C = r
  16x64b   L = t/4 + 8*(t%2)            C = t/2%2 + 2r
  16x128b  L = t/4 + 8*(r%2)            C = t%4 + 4*(r/2)
  16x256b  L = t/4 + 8*(r/2%2)          C = 2*(t%4) + r%2 + 8*(r/4)
  16x32bx2 L = t%16                     C = r, plus the split offset for t >= 16
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sm100_sim.errors import TmemError
from sm100_sim.state.tmem import split_address
from sm100_sim.state.warp import ALL_LANES, lowest_lane, reader, vector_reader, vector_writer

from .columns import Effect, Event, NativeForm, Recorded, Rule, Ties
from .table import machine_op, unknown


@dataclass(frozen=True)
class Shape:
    """A data-movement shape: registers per repetition and the TMEM lanes it covers."""

    registers: int
    lanes: int


SHAPES = {
    "32x32b": Shape(1, 32),
    "16x64b": Shape(1, 16),
    "16x128b": Shape(2, 16),
    "16x256b": Shape(4, 16),
    "16x32bx2": Shape(1, 16),
}
#: Most registers that one instruction moves per thread.
MAX_REGISTERS = 128


@lru_cache(maxsize=256)
def fragment(shape: str, repeat: int, split: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(lane, column) offset of every register: two arrays (registers, 32), [register, thread].

    `split`: immHalfSplitoff of 16x32bx2, in columns.
    """
    t = np.arange(32)[None, :]
    r = np.arange(SHAPES[shape].registers * repeat)[:, None]
    if shape == "32x32b":
        lane, column = t, r
    elif shape == "16x64b":
        lane, column = t // 4 + 8 * (t % 2), t // 2 % 2 + 2 * r
    elif shape == "16x128b":
        lane, column = t // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2)
    elif shape == "16x256b":
        lane, column = t // 4 + 8 * (r // 2 % 2), 2 * (t % 4) + r % 2 + 8 * (r // 4)
    else:
        lane, column = t % 16, r + split * (t // 16)
    lane, column = np.broadcast_arrays(lane, column)
    return np.ascontiguousarray(lane), np.ascontiguousarray(column)


@dataclass(frozen=True)
class Form:
    """The static part of a tcgen05.ld or tcgen05.st.

    `packed`: .pack::16b of a load, .unpack::16b of a store: a register holds the low halves of
    two adjacent columns, so the instruction covers twice as many columns.
    """

    shape: str
    repeat: int
    packed: bool = False
    split: int = 0

    @property
    def registers(self) -> int:
        """Registers per thread."""
        return SHAPES[self.shape].registers * self.repeat

    @property
    def columns(self) -> int:
        """Columns from the address to the last one touched, inclusive."""
        return (int(fragment(self.shape, self.repeat, self.split)[1].max()) + 1) << self.packed


def load_cells(cells, lane: int, column: int, form: Form) -> np.ndarray:
    """uint32 (registers, 32) that a tcgen05.ld at (lane, column) returns."""
    if form.shape == "32x32b" and not form.packed:
        return cells[column : column + form.repeat, lane : lane + 32]
    lanes, columns = fragment(form.shape, form.repeat, form.split)
    if not form.packed:
        return cells[columns + column, lanes + lane]
    low = cells[2 * columns + column, lanes + lane]
    high = cells[2 * columns + (column + 1), lanes + lane]
    return low & np.uint32(0xFFFF) | high << np.uint32(16)


def store_cells(cells, lane: int, column: int, form: Form, values: np.ndarray) -> None:
    """Write registers (registers, 32) as a tcgen05.st at (lane, column) does."""
    if form.shape == "32x32b" and not form.packed:
        cells[column : column + form.repeat, lane : lane + 32] = values
        return
    lanes, columns = fragment(form.shape, form.repeat, form.split)
    if not form.packed:
        cells[columns + column, lanes + lane] = values
        return
    cells[2 * columns + column, lanes + lane] = values & np.uint32(0xFFFF)
    cells[2 * columns + (column + 1), lanes + lane] = values >> np.uint32(16)


def form_of(instruction, pack: str, split: int | None) -> Form:
    """Parse `.sync.aligned.shape.xN{.pack}.b32`, in that order."""
    parts = list(instruction.modifiers)
    if parts[:2] != ["sync", "aligned"] or parts[-1:] != ["b32"]:
        raise unknown(instruction, "expected .sync.aligned and .b32")
    parts = parts[2:-1]
    packed = pack in parts
    if packed:
        parts.remove(pack)
    if len(parts) != 2 or parts[0] not in SHAPES or not parts[1][1:].isdigit():
        raise unknown(instruction, f"shape or modifier; accepted shapes: {', '.join(SHAPES)}")
    form = Form(parts[0], int(parts[1][1:]), packed, split or 0)
    if form.repeat & form.repeat - 1 or form.registers > MAX_REGISTERS or parts[1][0] != "x":
        raise unknown(instruction, "illegal repetition of this shape")
    if (split is not None) != (form.shape == "16x32bx2"):
        raise unknown(instruction, "immHalfSplitoff belongs to 16x32bx2 alone, and must be there")
    return form


def locator(instruction, address_operand, form: Form):
    """(warp, lanes) -> (lane, column), all checks of an access made.

    A warp reaches the quarter of the lanes that is its own. It names them either by their number or
    counted from the quarter's first: the PTX ISA shows the former only, and DeepGEMM's and cuDNN's
    published kernels rely on the latter.
    """
    read = reader(address_operand, 32)
    columns, covered = form.columns, SHAPES[form.shape].lanes
    name = instruction.opcode

    @lru_cache(maxsize=1024)
    def place(value: int, warp_index: int) -> tuple[int, int]:
        lane, column = split_address(value)
        quarter = 32 * (warp_index % 4)
        if lane < 32:
            lane += quarter
        if lane - quarter not in ((0,) if covered == 32 else (0, 16)):
            raise TmemError(
                f"{name}.{form.shape} at lane {lane}; warp {warp_index} reaches lanes {quarter} to "
                f"{quarter + 31} and the shape covers {covered} of them"
            )
        return lane, column

    def locate(warp, lanes: int) -> tuple[int, int]:
        raw = read(warp).tobytes()
        first = raw[:4]
        if lanes != ALL_LANES:
            at = 4 * lowest_lane(lanes)
            first = raw[at : at + 4]
        elif raw != first * 32:
            raise TmemError(f"{name}: the address differs between the lanes of the warp")
        found = place(int.from_bytes(first, "little"), warp.index)
        warp.cta.tmem.check(found[1], columns, name)
        return found

    return locate


@machine_op("tcgen05.ld", aligned=True, defines=(0,), rule=Rule.TENSOR_LOAD, trace=Recorded.ENTRY,
            event=Event.TMEM_LOAD, effect=Effect.NONE, ties=Ties.NEVER,
            native=NativeForm.TENSOR_LOAD)
def bind_load(instruction, kernel):
    """tcgen05.ld.sync.aligned.shape.num{.pack::16b}.b32 r, [taddr]{, immHalfSplitoff}."""
    if instruction.modifiers[:1] == ("red",):
        raise unknown(instruction, "tcgen05.ld.red does not exist on sm_100")
    target, address, *rest = instruction.operands
    form = form_of(instruction, "pack::16b", rest[0].value if rest else None)
    _check_vector(instruction, target, form)
    write = vector_writer(target)
    locate = locator(instruction, address, form)

    def execute(warp, lanes: int) -> None:
        lane, column = locate(warp, lanes)
        write(warp, lanes, load_cells(warp.cta.tmem.cells, lane, column, form))

    return execute


@machine_op("tcgen05.st", aligned=True, rule=Rule.TENSOR_STORE, trace=Recorded.ENTRY,
            event=Event.TMEM_STORE, effect=Effect.NONE, ties=Ties.NEVER,
            native=NativeForm.TENSOR_STORE)
def bind_store(instruction, kernel):
    """tcgen05.st.sync.aligned.shape.num{.unpack::16b}.b32 [taddr]{, immHalfSplitoff}, r."""
    address, *split, source = instruction.operands
    form = form_of(instruction, "unpack::16b", split[0].value if split else None)
    _check_vector(instruction, source, form)
    read = vector_reader(source)
    locate = locator(instruction, address, form)

    def execute(warp, lanes: int) -> None:
        lane, column = locate(warp, lanes)
        store_cells(warp.cta.tmem.cells, lane, column, form, read(warp))

    return execute


def _check_vector(instruction, operand, form: Form) -> None:
    count = len(operand.items) if operand.kind == "vec" else 1
    if count != form.registers:
        raise unknown(instruction, f"{count} registers, the shape moves {form.registers}")


@machine_op("tcgen05.wait::ld", aligned=True, rule=Rule.WAIT_LOADS, trace=Recorded.ENTRY,
            event=Event.NONE, effect=Effect.NONE, ties=Ties.NEVER, synchronises=True,
            native=NativeForm.ORDER)
@machine_op("tcgen05.wait::st", aligned=True, rule=Rule.WAIT_STORES, trace=Recorded.ENTRY,
            event=Event.TMEM_STORE_WAIT, effect=Effect.NONE, ties=Ties.NEVER, synchronises=True,
            native=NativeForm.ORDER)
def bind_wait_for(instruction, kernel):
    """tcgen05.wait::{ld,st}.sync.aligned: loads and stores are performed at issue."""
    if instruction.modifiers != ("sync", "aligned"):
        raise unknown(instruction, "expected .sync.aligned")
    return lambda warp, lanes: None
