"""An ordered record of the machine operations of a launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sm100_sim.isa.columns import Recorded
from sm100_sim.isa.table import row_of
from sm100_sim.state.events import Waiting
from sm100_sim.state.warp import lane_array, predicate_reader, reader, uniform


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One executed machine operation, or the exit of a warp (opcode "exit", line 0).

    number: position in the launch. ctaid: (x, y, z). opcode: the full dotted name. lanes: mask.
    operands: their values in the lowest lane, in PTX order: an int for a register, immediate,
        predicate (0 or 1) or address; a tuple (address, items...) for a bracket with several
        members such as TMA's [map, {coordinates}]; a tuple of ints for a vector of up to eight
        registers; None for longer vectors and for destinations that are not written yet. The
        first of an mbarrier try_wait or test_wait is its result: 1 if the phase was complete.
    addresses: of an mbarrier arrival by several lanes, the address of each; else empty.
    nbytes: that a bulk copy moves, else 0.
    blocks: (index, count) of the kernel's basic blocks that the warp has executed since its
        previous entry, this one's included.
    """

    number: int
    ctaid: tuple[int, int, int]
    warp: int
    opcode: str
    lanes: int
    operands: tuple[Any, ...]
    text: str
    line: int
    addresses: tuple[int, ...] = ()
    nbytes: int = 0
    blocks: tuple[tuple[int, int], ...] = ()


class Trace:
    """Collects `entries`; an instruction that waits is recorded once, when it is through.

    shared_accesses: as in `Report`, filled by `observer.Tracer`.
    """

    def __init__(self) -> None:
        self.entries: list[TraceEntry] = []
        self.shared_accesses: dict[int, tuple[int, int, int]] = {}
        self._seen: np.ndarray | None = None
        #: Warp -> blocks executed since its last entry.
        self._blocks: dict[Any, Counter[int]] = {}

    def wrapped(
        self, instructions: list[Any], executors: list[Callable | None]
    ) -> list[Callable | None]:
        """The executors by instruction, those of recorded instructions followed by a note here."""
        return [
            None
            if execute is None
            else self._accounting(execute)
            if row_of(instruction).trace is Recorded.NOTHING
            else self._recording(instruction, execute)
            for instruction, execute in zip(instructions, executors, strict=True)
        ]

    def account(self, warp: Any) -> Counter[int]:
        """Return the blocks that this warp has executed since its last entry.

        The counters are those of the launch. What they have grown by since the last call is this
        warp's, because every machine operation calls this, and so does a warp that stops running.
        """
        counts = warp.block_counts[:, 0]
        if self._seen is None:
            self._seen = np.zeros_like(counts)
        found = self._blocks.setdefault(warp, Counter())
        for block in np.flatnonzero(counts != self._seen).tolist():
            found[block] += int(counts[block] - self._seen[block])
        self._seen[:] = counts
        return found

    def exits(self, warp: Any) -> None:
        """Add an entry for a warp that has exited."""
        blocks = self._blocks.pop(warp, Counter())
        self.entries.append(
            TraceEntry(
                len(self.entries), warp.cta.ctaid, warp.index, "exit", 0, (), "exit", 0,
                blocks=tuple(sorted(blocks.items())),
            )
        )  # fmt: skip

    def _accounting(self, execute: Callable) -> Callable:
        def accounted(warp: Any, lanes: int) -> Any:
            self.account(warp)
            return execute(warp, lanes)

        return accounted

    def _recording(self, instruction: Any, execute: Callable) -> Callable:
        reads = [_operand_reader(operand) for operand in instruction.operands]
        opcode, text, line = instruction.name, instruction.text, instruction.line
        each = _address_reader(instruction)
        tests = row_of(instruction).trace is Recorded.RESULT
        entries = self.entries

        def recorded(warp: Any, lanes: int) -> Any:
            blocks = self.account(warp)
            values = tuple(read(warp, lanes) for read in reads)
            addresses = each(warp, lanes)
            counters = warp.cta.cluster.machine.counters
            before = counters["tma.load bytes"] + counters["tma.store bytes"]
            outcome = execute(warp, lanes)
            if type(outcome) is not tuple and not (isinstance(outcome, Waiting) and outcome.retry):
                moved = counters["tma.load bytes"] + counters["tma.store bytes"] - before
                if tests:
                    values = (reads[0](warp, lanes), *values[1:])
                entries.append(
                    TraceEntry(
                        len(entries), warp.cta.ctaid, warp.index, opcode, lanes, values, text, line,
                        addresses, moved, tuple(sorted(blocks.items())),
                    )
                )  # fmt: skip
                blocks.clear()
            return outcome

        return recorded


def _address_reader(instruction: Any) -> Callable[[Any, int], tuple[int, ...]]:
    """The address in each executing lane, for arrivals by several lanes."""
    operand = next((o for o in instruction.operands if o.kind == "mem" and not o.items), None)
    if operand is None or row_of(instruction).trace is not Recorded.LANES:
        return lambda warp, lanes: ()
    read = reader(operand, 32)

    def addresses(warp: Any, lanes: int) -> tuple[int, ...]:
        if not lanes & lanes - 1:
            return ()
        return tuple(read(warp)[lane_array(lanes)].tolist())

    return addresses


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
