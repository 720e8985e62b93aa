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

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from sm100_sim.errors import TmemError
from sm100_sim.native.calling import callable_of
from sm100_sim.native.fragments import load_fragment, store_fragment
from sm100_sim.native.layout import NO_SLOT, Fragment
from sm100_sim.state.tmem import LANES, split_address
from sm100_sim.state.warp import ALL_LANES, lowest_lane, reader, writer

from ..columns import Effect, Event, NativeForm, Recorded, Rule, Ties
from ..table import machine_op, unknown


@dataclass(frozen=True)
class Shape:
    """A data-movement shape: registers and columns per repetition, and the TMEM lanes it covers."""

    registers: int
    columns: int
    lanes: int


#: In the order of the numbers that `native.fragments` has for them.
SHAPES = {
    "32x32b": Shape(1, 1, 32),
    "16x64b": Shape(1, 2, 16),
    "16x128b": Shape(2, 4, 16),
    "16x256b": Shape(4, 8, 16),
    "16x32bx2": Shape(1, 1, 16),
}
#: Most registers that one instruction moves per thread.
MAX_REGISTERS = 128


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
    def runs(self) -> tuple[tuple[int, int], ...]:
        """[first, end) of the columns touched, from the address, in runs that do not meet.

        `split` is immHalfSplitoff of 16x32bx2: where the threads from 16 on begin.
        """
        width = SHAPES[self.shape].columns * self.repeat
        found: tuple[tuple[int, int], ...] = ((0, self.split + width),)
        if self.split > width:
            found = (0, width), (self.split, self.split + width)
        return tuple((first << self.packed, end << self.packed) for first, end in found)

    @property
    def columns(self) -> int:
        """Columns from the address to the last one touched, inclusive."""
        return self.runs[-1][1]


def items_of(operand) -> tuple:
    """The registers of a vector operand, or the one register that it is."""
    return operand.items if operand.kind == "vec" else (operand,)


def fragment_record(form: Form, operand) -> Fragment:
    """A form and its registers, for `native.fragments`."""
    slots = [item.slot if item.kind == "reg" else NO_SLOT for item in items_of(operand)]
    return Fragment(
        shape=list(SHAPES).index(form.shape),
        count=form.registers,
        packed=form.packed,
        split=form.split,
        slots=tuple(slots),
    )


def _cells(warp, lane: int, column: int) -> int:
    """Address of a cell of the tensor memory of a warp's CTA."""
    return warp.cta.tmem.record.cells + 4 * (column * LANES + lane)


def form_of(
    instruction, pack: str, split: int | None, modifiers: tuple[str, ...] | None = None
) -> Form:
    """Parse `.sync.aligned.shape.xN{.pack}.b32`, in that order. modifiers: by default those of the
    instruction."""
    parts = list(instruction.modifiers if modifiers is None else modifiers)
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

    A load of columns that its CTA has freed is a finding of the machine: on a GPU they keep their
    data until another CTA of the SM allocates them and writes.

    Lanes that name different addresses are undefined in the PTX ISA and a finding of the machine. A
    GPU takes the address from a uniform register; here it is the first lane's, on which an example
    of NVIDIA's relies (docs/findings.md).
    """
    read = reader(address_operand, 32)
    columns, covered = form.columns, SHAPES[form.shape].lanes
    name, is_load = instruction.opcode, instruction.opcode.startswith("tcgen05.ld")
    source = f", {instruction.source[0]}:{instruction.source[1]}" if instruction.source else ""

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
            warp.cta.cluster.machine.finding(
                f"{name} (PTX line {instruction.line}{source}): the address differs between the "
                "lanes of the warp, which the PTX ISA leaves undefined; that of the first lane was "
                "taken"
            )
        found = place(int.from_bytes(first, "little"), warp.index)
        if is_load and warp.cta.tmem.reads_freed(found[1], columns):
            warp.cta.cluster.machine.finding(
                f"{name} (PTX line {instruction.line}{source}) reads columns that its CTA has "
                "freed: they hold their data until another CTA of the SM allocates them, which "
                "nothing delays; all loads must be done before tcgen05.dealloc"
            )
        else:
            warp.cta.tmem.check(found[1], columns, name)
        return found

    return locate


@machine_op(
    "tcgen05.ld",
    aligned=True,
    defines=(0,),
    rule=Rule.TENSOR_LOAD,
    trace=Recorded.ENTRY,
    event=Event.TMEM_LOAD,
    effect=Effect.NONE,
    ties=Ties.NEVER,
    native=NativeForm.TENSOR_LOAD,
)
def bind_load(instruction, kernel):
    """tcgen05.ld.sync.aligned.shape.num{.pack::16b}.b32 r, [taddr]{, immHalfSplitoff}."""
    form, address = load_form(instruction)
    target = instruction.operands[0]
    _check_vector(instruction, target, form)
    locate = locator(instruction, address, form)
    record = fragment_record(form, target)

    def execute(warp, lanes: int) -> None:
        cells = _cells(warp, *locate(warp, lanes))
        load = callable_of(load_fragment)
        load(warp.r32.ctypes.data, cells, ctypes.addressof(record), lanes)

    return execute


def load_form(instruction) -> tuple[Form, Any]:
    """Return (form, address operand) of a tcgen05.ld, with a reduction or without."""
    if instruction.row.name == "tcgen05.ld":
        _, address, *rest = instruction.operands
        return form_of(instruction, "pack::16b", rest[0].value if rest else None), address
    _, _, address, *rest = instruction.operands
    form = form_of(
        instruction, "", rest[0].value if rest else None, (*instruction.modifiers[:4], "b32")
    )
    return form, address


#: Types of tcgen05.ld.red: type -> (element type, modifiers that may follow min or max, in that
#: order).
_REDUCED = {"f32": (np.float32, ("abs", "NaN")), "s32": (np.int32, ()), "u32": (np.uint32, ())}


@machine_op(
    "tcgen05.ld.red",
    aligned=True,
    defines=(0, 1),
    rule=Rule.TENSOR_LOAD,
    trace=Recorded.ENTRY,
    event=Event.TMEM_LOAD,
    effect=Effect.NONE,
    ties=Ties.NEVER,
)
def bind_load_and_reduce(instruction, kernel):
    """tcgen05.ld.red.sync.aligned.shape.num.redOp{.abs}{.NaN}.type r, redval, [taddr]{, offset}.

    Of sm_103a and sm_103f, not of sm_100. redval is the least or greatest of what the thread has
    loaded; as for min and max, a NaN is passed over unless .NaN says that it is the result.
    """
    form, address = load_form(instruction)
    target, result = instruction.operands[:2]
    _check_vector(instruction, target, form)
    if form.shape not in ("32x32b", "16x32bx2") or form.registers < 2:
        raise unknown(instruction, "a reduction is of 32x32b or 16x32bx2, from .x2 on")
    operation, *options, kind = instruction.modifiers[4:]
    if operation not in ("min", "max") or kind not in _REDUCED:
        raise unknown(instruction, "expected .min or .max, and .f32, .u32 or .s32")
    element, allowed = _REDUCED[kind]
    if options != [one for one in allowed if one in options]:
        raise unknown(instruction, f"after .{operation}: {'.abs and .NaN, in this order'}, of .f32")
    locate, record = locator(instruction, address, form), fragment_record(form, target)
    slots = [item.slot for item in items_of(target)]
    write = writer(result, 32)

    def execute(warp, lanes: int) -> None:
        cells = _cells(warp, *locate(warp, lanes))
        callable_of(load_fragment)(warp.r32.ctypes.data, cells, ctypes.addressof(record), lanes)
        values = warp.r32[slots].view(element)
        if "abs" in options:
            values = np.abs(values)
        write(warp, lanes, _reduced(values, operation, "NaN" in options).view(np.uint32))

    return execute


def _reduced(values: np.ndarray, operation: str, keeps_nan: bool) -> np.ndarray:
    """Return (32,), min or max over the first axis. A NaN that is the result is the canonical
    one."""
    if values.dtype != np.float32:
        return np.min(values, 0) if operation == "min" else np.max(values, 0)
    unordered = np.isnan(values)
    # -0 is less than +0: by the bits, in an order that is that of the values.
    bits = values.view(np.int32)
    ordered = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    left_out = np.iinfo(np.int32).max if operation == "min" else np.iinfo(np.int32).min
    ordered = np.where(unordered, left_out, ordered)
    found = np.min(ordered, 0) if operation == "min" else np.max(ordered, 0)
    result = np.where(found < 0, found ^ 0x7FFFFFFF, found).astype(np.int32).view(np.float32)
    is_nan = unordered.any(0) if keeps_nan else unordered.all(0)
    return np.where(is_nan, np.uint32(0x7FFFFFFF).view(np.float32), result)


@machine_op(
    "tcgen05.st",
    aligned=True,
    rule=Rule.TENSOR_STORE,
    trace=Recorded.ENTRY,
    event=Event.TMEM_STORE,
    effect=Effect.NONE,
    ties=Ties.NEVER,
    native=NativeForm.TENSOR_STORE,
)
def bind_store(instruction, kernel):
    """tcgen05.st.sync.aligned.shape.num{.unpack::16b}.b32 [taddr]{, immHalfSplitoff}, r."""
    address, *split, source = instruction.operands
    form = form_of(instruction, "unpack::16b", split[0].value if split else None)
    _check_vector(instruction, source, form)
    locate = locator(instruction, address, form)
    record = fragment_record(form, source)

    def execute(warp, lanes: int) -> None:
        cells = _cells(warp, *locate(warp, lanes))
        callable_of(store_fragment)(warp.r32.ctypes.data, cells, ctypes.addressof(record))

    return execute


def _check_vector(instruction, operand, form: Form) -> None:
    count = len(operand.items) if operand.kind == "vec" else 1
    if count != form.registers:
        raise unknown(instruction, f"{count} registers, the shape moves {form.registers}")


@machine_op(
    "tcgen05.wait::ld",
    aligned=True,
    rule=Rule.WAIT_LOADS,
    trace=Recorded.ENTRY,
    event=Event.NONE,
    effect=Effect.NONE,
    ties=Ties.NEVER,
    synchronises=True,
    native=NativeForm.ORDER,
)
@machine_op(
    "tcgen05.wait::st",
    aligned=True,
    rule=Rule.WAIT_STORES,
    trace=Recorded.ENTRY,
    event=Event.TMEM_STORE_WAIT,
    effect=Effect.NONE,
    ties=Ties.NEVER,
    synchronises=True,
    native=NativeForm.ORDER,
)
def bind_wait_for(instruction, kernel):
    """tcgen05.wait::{ld,st}.sync.aligned: loads and stores are performed at issue."""
    if instruction.modifiers != ("sync", "aligned"):
        raise unknown(instruction, "expected .sync.aligned")
    return lambda warp, lanes: None
