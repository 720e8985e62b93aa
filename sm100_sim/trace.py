"""An ordered record of the machine operations of a launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .events import Waiting
from .warp import predicate_reader, uniform

#: Opcodes (prefixes) that a trace records: asynchronous and synchronisation instructions.
RECORDED = (
    "tcgen05", "cp.async", "cp.reduce", "mbarrier", "bar", "barrier", "fence", "clusterlaunch",
    "setmaxnreg", "griddepcontrol", "atom", "red", "st.async", "membar",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One executed machine operation.

    number: position in the launch. ctaid: (x, y, z). opcode: the full dotted name. lanes: mask.
    operands: their values in the lowest lane, in PTX order: an int for a register, immediate,
        predicate (0 or 1) or address; a tuple (address, items...) for a bracket with several
        members such as TMA's [map, {coordinates}]; a tuple of ints for a vector of up to eight
        registers; None for longer vectors and for destinations that are not written yet.
    """

    number: int
    ctaid: tuple[int, int, int]
    warp: int
    opcode: str
    lanes: int
    operands: tuple[Any, ...]
    text: str
    line: int


class Trace:
    """Collects `entries`; an instruction that waits is recorded once, when it is through."""

    def __init__(self) -> None:
        self.entries: list[TraceEntry] = []

    def wrapped(self, compiled: Any) -> list[Callable | None]:
        """The kernel's executors, those of recorded opcodes followed by a note here."""
        return [
            self._recording(instruction, execute)
            if execute is not None and instruction.name.startswith(RECORDED)
            else execute
            for instruction, execute in zip(
                compiled.instructions, compiled.executors, strict=True
            )
        ]

    def _recording(self, instruction: Any, execute: Callable) -> Callable:
        reads = [_operand_reader(operand) for operand in instruction.operands]
        opcode, text, line = instruction.name, instruction.text, instruction.line
        entries = self.entries

        def recorded(warp: Any, lanes: int) -> Any:
            values = tuple(read(warp, lanes) for read in reads)
            outcome = execute(warp, lanes)
            if type(outcome) is not tuple and not (isinstance(outcome, Waiting) and outcome.retry):
                entries.append(
                    TraceEntry(
                        len(entries), warp.cta.ctaid, warp.index, opcode, lanes, values, text, line
                    )
                )
            return outcome

        return recorded


def _operand_reader(operand: Any) -> Callable[[Any, int], Any]:
    if operand.kind == "vec":
        if len(operand.items) > 8:
            return lambda warp, lanes: None
        items = [_operand_reader(item) for item in operand.items]
        return lambda warp, lanes: tuple(item(warp, lanes) for item in items)
    if operand.kind == "pred":
        mask = predicate_reader(operand)
        return lambda warp, lanes: 1 if mask(warp) & lanes & -lanes else 0
    if operand.kind == "mem" and operand.items:
        parts = [_operand_reader(operand.base), *map(_operand_reader, operand.items)]
        return lambda warp, lanes: tuple(part(warp, lanes) for part in parts)
    if operand.kind in ("reg", "imm", "mem", "sym"):
        bits = 64
        base = operand.base if operand.kind == "mem" else operand
        if base.kind == "imm" or (base.kind == "reg" and base.register.file == "r32"):
            bits = 32
        return uniform(operand, bits)
    return lambda warp, lanes: None
