"""The one table of instruction semantics.

Every opcode is either *inline* (an emit function writes LLVM IR for it) or a *machine operation*
(a bind function validates the modifiers once and returns an executor that Python runs for each
warp). An entry is keyed by a dotted prefix; the longest prefix of the full opcode wins, and the
rest are its modifiers. What is not in the table is an error that names the instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sm100_sim.errors import UnknownInstruction
from sm100_sim.ptx.parser import Instruction


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the table.

    Exactly one of ``bind`` and ``emit`` is set. ``statistics`` names the class under which
    executions are counted, or computes it from the instruction. ``aligned`` says that all lanes of
    the warp that are alive (or those of the membermask, for inline operations) must arrive
    together before the instruction executes; ``member_mask`` is the position of the membermask.
    ``defines`` are positions of operands that the instruction only writes, for every executing
    lane.
    """

    name: str
    statistics: str | Callable[[Instruction], str]
    bind: Callable | None = None
    emit: Callable | None = None
    aligned: bool = False
    defines: tuple[int, ...] = (0,)
    member_mask: int | None = None

    def statistics_class(self, instruction: Instruction) -> str:
        return self.statistics if isinstance(self.statistics, str) else self.statistics(instruction)


_ENTRIES: dict[str, Entry] = {}


def _register(entry: Entry) -> None:
    if entry.name in _ENTRIES:
        raise ValueError(f"the instruction table already has an entry {entry.name!r}")
    _ENTRIES[entry.name] = entry


def machine_op(*names: str, statistics: str | Callable[[Instruction], str] | None = None,
               aligned: bool = False, defines: tuple[int, ...] = ()) -> Callable:
    """Decorator: register ``bind(instruction, kernel) -> execute(warp, lanes)`` under ``names``.

    bind checks every modifier (raising UnknownInstruction) and binds the operand accessors once.
    execute gets the mask of executing lanes and returns None when done, or a waiting object: then
    the lanes stay at the instruction and it is executed again when they wake up.
    ``statistics`` defaults to the name.
    """

    def decorate(bind: Callable) -> Callable:
        for name in names:
            _register(Entry(name, statistics or name, bind=bind, aligned=aligned, defines=defines))
        return bind

    return decorate


def inline_op(*names: str, statistics: str | Callable[[Instruction], str] | None = None,
              member_mask: int | None = None, defines: tuple[int, ...] = (0,),
             aligned: bool = False) -> Callable:
    """Decorator: register ``emit(emitter, instruction)``, which writes LLVM IR, under ``names``.

    An operation with a membermask operand waits until those lanes have converged, an aligned one
    for all lanes that are alive.
    """

    def decorate(emit: Callable) -> Callable:
        for name in names:
            _register(Entry(name, statistics or name, emit=emit, defines=defines,
                            aligned=aligned or member_mask is not None, member_mask=member_mask))
        return emit

    return decorate


def lookup(name: str) -> tuple[Entry, tuple[str, ...]] | None:
    """Entry with the longest prefix of the dotted ``name`` and the remaining modifiers."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        entry = _ENTRIES.get(".".join(parts[:count]))
        if entry is not None:
            return entry, tuple(parts[count:])
    return None


def resolve(instruction: Instruction) -> Entry:
    """Find the entry and split ``instruction`` into opcode and modifiers accordingly.

    Raises UnknownInstruction for an opcode that no entry covers.
    """
    found = lookup(instruction.name)
    if found is None:
        raise unknown(instruction, "no entry of the instruction table covers this opcode")
    entry, instruction.modifiers = found
    instruction.opcode = entry.name
    return entry


def unknown(instruction: Instruction, why: str) -> UnknownInstruction:
    """The error for an opcode, modifier or operand form that the simulator does not implement."""
    return UnknownInstruction(f"{instruction.name}: {why}", instruction=instruction)


def split_modifiers(instruction: Instruction, *groups: tuple[str, ...]) -> list[str]:
    """Match the modifiers in order against ``groups`` of alternatives and return one per group.

    A group that contains "" is optional. Raises UnknownInstruction for a modifier that no group
    takes, or a group that must be there and is not.
    """
    rest, found = list(instruction.modifiers), []
    for group in groups:
        if rest and rest[0] in group:
            found.append(rest.pop(0))
        elif "" in group:
            found.append("")
        else:
            given = f".{rest[0]}" if rest else "the end of the opcode"
            raise unknown(instruction, f"found {given} where one of {', '.join(group)} must stand")
    if rest:
        raise unknown(instruction, f"modifier .{rest[0]} is not implemented here")
    return found


def entries() -> dict[str, Entry]:
    """All entries by name (a copy)."""
    return dict(_ENTRIES)
