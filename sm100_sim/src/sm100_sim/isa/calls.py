"""Calls of the two functions that the GPU's system offers to kernels: vprintf and __assertfail.

CUDA C++ Programming Guide, "Formatted output" and "Assertion": vprintf takes a format and a buffer
in which each argument stands at a multiple of its own size, integers with 4 or 8 bytes and floats
as doubles. What lanes print appears at once, in the order of the lanes.
"""

from __future__ import annotations

import ctypes
import re
import struct
import sys
from typing import Any

from sm100_sim.errors import MemoryFault, SimulationError
from sm100_sim.ptx.parser import MODULE_DATA_WINDOW
from sm100_sim.state.warp import LOCAL_WINDOW, Warp, reader, writer

from .columns import Effect, Event, Recorded, Rule, Ties
from .table import machine_op, unknown

_CONVERSION = re.compile(r"%([-+ #0]*)(\*|\d*)(?:\.(\*|\d*))?(hh|h|ll|l|z|j|t)?(.)", re.S)
_LONG = ("l", "ll", "z", "j", "t")


def _text(warp: Warp, pointer: int) -> str:
    """The string at an address in the module's data."""
    data, start = warp.compiled.kernel.module_data, pointer - MODULE_DATA_WINDOW
    if not 0 <= start < len(data):
        raise MemoryFault(f"the string at {pointer:#x} is not a constant of the module")
    return data[start : data.index(0, start)].decode(errors="replace")


class _Arguments:
    """Reads the argument buffer of one lane, which lies in its local memory."""

    def __init__(self, warp: Warp, lane: int, pointer: int) -> None:
        self.warp, self.offset = warp, pointer - LOCAL_WINDOW
        context = warp.context
        self.size, self.taken = context.local_bytes, 0
        self.base = context.local + lane * self.size

    def take(self, code: str) -> Any:
        """The next argument as the struct format ``code``."""
        width = struct.calcsize(code)
        start = -(-self.offset // width) * width
        if not 0 <= start <= self.size - width:
            raise MemoryFault("an argument of vprintf lies outside the stack of its thread")
        self.offset, self.taken = start + width, self.taken + 1
        return struct.unpack(code, ctypes.string_at(self.base + start, width))[0]


def _formatted(warp: Warp, form: str, arguments: _Arguments) -> str:
    """The text that a format gives."""

    def convert(match: re.Match) -> str:
        flags, width, precision, size, kind = match.groups()
        if kind == "%":
            return "%"
        width, precision = (
            str(arguments.take("<i")) if part == "*" else part for part in (width, precision)
        )
        shape = f"%{flags}{width}" + ("" if precision is None else f".{precision}")
        if kind in "diuoxXc":
            code = (
                ("q" if size in _LONG else "i") if kind in "di" else ("Q" if size in _LONG else "I")
            )
            value = arguments.take("<" + code)
            return (shape + kind) % (chr(value & 255) if kind == "c" else value)
        if kind in "fFeEgG":
            return (shape + kind) % arguments.take("<d")
        if kind in "aA":
            text = float(arguments.take("<d")).hex()
            return f"%{flags}{width}s" % (text.upper() if kind == "A" else text)
        if kind == "p":
            return f"%{flags}{width}s" % hex(arguments.take("<Q"))
        if kind == "s":
            return (shape + "s") % _text(warp, arguments.take("<Q"))
        raise SimulationError(f"vprintf: the conversion {match[0]!r} is not defined")

    return _CONVERSION.sub(convert, form)


@machine_op(
    "call.vprintf",
    statistics="call",
    defines=(0,),
    rule=Rule.NOT_FOLLOWED,
    trace=Recorded.NOTHING,
    event=Event.NONE,
    effect=Effect.NONE,
    ties=Ties.NEVER,
)
def bind_print(instruction, kernel):
    """vprintf(format, arguments): prints; returns the number of arguments."""
    if len(instruction.operands) != 3:
        raise unknown(instruction, "vprintf takes a format and a buffer of arguments")
    store = writer(instruction.operands[0], 32)
    form, buffer = (reader(operand, 64) for operand in instruction.operands[1:])

    def execute(warp: Warp, lanes: int) -> None:
        forms, buffers = form(warp), buffer(warp)
        for lane in range(32):
            if lanes >> lane & 1:
                arguments = _Arguments(warp, lane, int(buffers[lane]))
                sys.stdout.write(_formatted(warp, _text(warp, int(forms[lane])), arguments))
                store(warp, 1 << lane, arguments.taken)

    return execute


@machine_op(
    "call.__assertfail",
    statistics="call",
    rule=Rule.NOT_FOLLOWED,
    trace=Recorded.NOTHING,
    event=Event.NONE,
    effect=Effect.NONE,
    ties=Ties.NEVER,
)
def bind_assert(instruction, kernel):
    """__assertfail(message, file, line, function, character size): ends the kernel."""
    if len(instruction.operands) != 6:
        raise unknown(instruction, "__assertfail takes five arguments")
    message, file, _, function = (reader(op, 64) for op in instruction.operands[1:5])
    line = reader(instruction.operands[3], 32)

    def execute(warp: Warp, lanes: int) -> None:
        lane = (lanes & -lanes).bit_length() - 1
        what, where, name = (
            _text(warp, int(part(warp)[lane])) for part in (message, file, function)
        )
        raise SimulationError(
            f"{where}:{int(line(warp)[lane])}: {name}: assertion {what!r} failed in lane {lane}"
        )

    return execute


@machine_op(
    "call",
    rule=Rule.NOT_FOLLOWED,
    trace=Recorded.NOTHING,
    event=Event.NONE,
    effect=Effect.NONE,
    ties=Ties.NEVER,
)
def bind_call(instruction, kernel):
    """Any other function: one that the module does not define, or a pointer."""
    raise unknown(
        instruction,
        "calls go to functions that the module itself defines, to vprintf and to __assertfail; "
        "link device code before, and call nothing through a pointer",
    )
