"""Instruction table: a row has all that the simulator knows of an opcode.

Every opcode is *inline* (an emit function writes LLVM IR for it), a *machine operation* (a bind
function validates the modifiers once and returns an executor that Python runs for each warp), or a
branch or exit. A row is keyed by a dotted prefix; the longest prefix of the full opcode wins, and
the rest are its modifiers. What is not in the table is an error that names the instruction. No
other module knows opcodes: whoever needs something of one looks it up here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sm100_sim.errors import UnknownInstruction
from sm100_sim.ptx.parser import Instruction

from .columns import (
    ORDERING,
    SUBMITTING,
    ByModifier,
    Effect,
    Event,
    Jump,
    MemoryAccess,
    Mix,
    NativeForm,
    Recorded,
    Rule,
    Ties,
)


class IncompleteRow(ValueError):
    """A row of the instruction table lacks a column, or says what nobody would act on."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: all that the simulator knows of an opcode.

    Semantics: exactly one of ``bind``, ``emit`` and ``jump`` is set. ``aligned`` says that all
    lanes of the warp that are alive (or those of the membermask, for inline operations) must arrive
    together before the instruction executes; ``member_mask`` is the position of the membermask.

    Registers: ``defines`` are positions of operands that the instruction only writes, for every
    executing lane; it reads all others. ``fold`` computes the result before anything runs, or None,
    given the modifiers and the sources as far as they are known; ``copies`` says that the result is
    a copy of the source, ``addressing`` that a loop that waits may recompute it.

    Memory: ``access``, of inline operations. ``effect`` is the asynchronous operation that is
    issued, ``chain`` whether the chain of MMAs that a warp is issuing goes on or ends with it.

    What others make of it: the sanitizer's ``rule``; what a ``trace`` records; the ``event`` of
    the timing model, and what an inline operation counts for in its instruction ``mix``;
    ``ties``, whether clusters communicate through it; ``synchronises``, whether leaving it out is
    a mutation; ``native``, its native form, None if Python executes it. ``statistics`` names the
    class under which executions are counted, or computes it from the instruction.

    ``effect``, ``event`` and ``mix`` may depend on the modifiers (`ByModifier`).
    """

    name: str
    statistics: str | Callable[[Instruction], str]
    effect: Effect | ByModifier
    rule: Rule
    trace: Recorded
    event: Event | ByModifier
    ties: Ties
    bind: Callable | None = None
    emit: Callable | None = None
    jump: Jump | None = None
    aligned: bool = False
    defines: tuple[int, ...] = ()
    member_mask: int | None = None
    fold: Callable[[tuple[str, ...], list[int | None]], int | None] | None = None
    copies: bool = False
    addressing: bool = False
    access: MemoryAccess = MemoryAccess.NONE
    chain: bool = False
    mix: Mix | ByModifier | None = None
    synchronises: bool = False
    native: NativeForm | None = None

    def statistics_class(self, instruction: Instruction) -> str:
        return self.statistics if isinstance(self.statistics, str) else self.statistics(instruction)

    def effect_with(self, modifiers: Iterable[str]) -> Effect:
        """The asynchronous operation that the instruction with these modifiers issues."""
        return _value(self.effect, modifiers)

    def event_with(self, modifiers: Iterable[str]) -> Event:
        """The event that the instruction with these modifiers is."""
        return _value(self.event, modifiers)

    def mix_with(self, modifiers: Iterable[str]) -> Mix | None:
        """Return the mix that the instruction with these modifiers counts for."""
        return _value(self.mix, modifiers)


def _value(cell: Any, modifiers: Iterable[str]) -> Any:
    return cell.of(modifiers) if isinstance(cell, ByModifier) else cell


#: Columns without a default: what is not said is not known.
_REQUIRED = {"rule": Rule, "trace": Recorded, "event": Event, "effect": Effect, "ties": Ties}
#: Rules of inline operations: at no other does native code stop.
_INLINE_RULES = (Rule.COMPUTES, Rule.LOGGED, Rule.NOT_FOLLOWED)
_ROWS: dict[str, Row] = {}
#: Dotted name -> its row and modifiers.
_found: dict[str, tuple[Row, tuple[str, ...]] | None] = {}


def _register(name: str, columns: dict[str, Any]) -> None:
    if name in _ROWS:
        raise ValueError(f"the instruction table already has a row {name!r}")
    # `_check` names what is absent.
    row = Row(name, **{**dict.fromkeys(_REQUIRED), **columns})
    _check(row)
    _ROWS[name] = row
    _found.clear()


def _check(row: Row) -> None:
    """Raise IncompleteRow for a row with a hole, or that says what nobody would act on."""
    for column, values in _REQUIRED.items():
        cell = getattr(row, column)
        cells = cell.values if isinstance(cell, ByModifier) else (cell,)
        if not all(isinstance(one, values) for one in cells):
            raise IncompleteRow(
                f"the row {row.name!r} of the instruction table says {cell!r} for {column!r}; "
                f"accepted are the members of columns.{values.__name__}: "
                f"{', '.join(values.__members__)}"
            )
    if [row.bind, row.emit, row.jump].count(None) != 2:
        raise IncompleteRow(
            f"the row {row.name!r} of the instruction table needs semantics, of one kind: bind, "
            "emit or jump"
        )
    if row.effect and row.rule not in SUBMITTING or row.event and row.trace is Recorded.NOTHING:
        raise IncompleteRow(
            f"the row {row.name!r}: an asynchronous operation ({row.effect!r}) must be recorded by "
            f"the sanitizer (rule {row.rule}), an event ({row.event!r}) by a trace ({row.trace})"
        )
    if row.rule in ORDERING and not row.synchronises:
        raise IncompleteRow(f"the row {row.name!r}: what the rule {row.rule} is for synchronises")
    if row.bind is None:
        passive = row.trace is Recorded.NOTHING and not row.effect and not row.event
        if row.rule not in _INLINE_RULES or not passive or row.native or row.synchronises:
            raise IncompleteRow(
                f"the row {row.name!r} is inline: nothing can be done at its execution beside "
                "what it computes. Make it a machine operation, or take what it cannot have away"
            )
    logged = row.rule is Rule.LOGGED
    if logged != (row.access is not MemoryAccess.NONE) or logged and row.emit is None:
        raise IncompleteRow(
            f"the row {row.name!r}: accesses to memory are logged for inline operations, and "
            f"these say which: rule {row.rule}, access {row.access}"
        )


def machine_op(
    *names: str, statistics: str | Callable[[Instruction], str] | None = None, **columns: Any
) -> Callable:
    """Decorator: register ``bind(instruction, kernel) -> execute(warp, lanes)`` under ``names``.

    bind checks every modifier (raising UnknownInstruction) and binds the operand accessors once.
    execute gets the mask of executing lanes and returns None when done, or a waiting object: then
    the lanes stay at the instruction and it is executed again when they wake up.
    ``statistics`` defaults to the name. columns: fields of `Row`; rule, trace, event, effect and
    ties must be there. Raises IncompleteRow if one is not.
    """

    def decorate(bind: Callable) -> Callable:
        for name in names:
            _register(name, {"statistics": statistics or name, "bind": bind, **columns})
        return bind

    return decorate


def inline_op(
    *names: str,
    statistics: str | Callable[[Instruction], str] | None = None,
    member_mask: int | None = None,
    aligned: bool = False,
    **columns: Any,
) -> Callable:
    """Decorator: register ``emit(emitter, instruction)``, which writes LLVM IR, under ``names``.

    An operation with a membermask operand waits until those lanes have converged, an aligned one
    for all lanes that are alive. columns: fields of `Row`. Nothing observes the execution of an
    inline operation, so trace, event and effect are none; rule and ties must be there.
    """
    aligned = aligned or member_mask is not None
    columns = {"trace": Recorded.NOTHING, "event": Event.NONE, "effect": Effect.NONE, **columns}

    def decorate(emit: Callable) -> Callable:
        for name in names:
            _register(
                name,
                {
                    "statistics": statistics or name,
                    "emit": emit,
                    "aligned": aligned,
                    "member_mask": member_mask,
                    **columns,
                },
            )
        return emit

    return decorate


def computes(*names: str, defines: tuple[int, ...] = (0,), **columns: Any) -> Callable:
    """`inline_op` for what reads and writes registers only."""
    return inline_op(*names, defines=defines, rule=Rule.COMPUTES, ties=Ties.NEVER, **columns)


def jump_op(name: str, jump: Jump) -> None:
    """Register a branch or an exit: blocks of native code end with it."""
    _register(name, {
        "statistics": "branch", "jump": jump, "rule": Rule.COMPUTES, "trace": Recorded.NOTHING,
        "event": Event.NONE, "effect": Effect.NONE, "ties": Ties.NEVER,
    })  # fmt: skip


def lookup(name: str) -> tuple[Row, tuple[str, ...]] | None:
    """Row with the longest prefix of the dotted ``name`` and the remaining modifiers."""
    if name not in _found:
        _found[name] = _search(name.split("."))
    return _found[name]


def _search(parts: list[str]) -> tuple[Row, tuple[str, ...]] | None:
    for count in range(len(parts), 0, -1):
        row = _ROWS.get(".".join(parts[:count]))
        if row is not None:
            return row, tuple(parts[count:])
    return None


def row_of(instruction: Instruction) -> Row:
    """The row of an instruction. Raises UnknownInstruction if it has none."""
    return instruction.row or _found_for(instruction)[0]


def _found_for(instruction: Instruction) -> tuple[Row, tuple[str, ...]]:
    found = lookup(instruction.name)
    if found is None:
        raise unknown(instruction, "no row of the instruction table covers this opcode")
    return found


def effect_of(instruction: Instruction) -> Effect:
    """The asynchronous operation that an instruction issues."""
    row, modifiers = _found_for(instruction)
    return row.effect_with(modifiers)


def resolve(instruction: Instruction) -> Row:
    """Find the row and split ``instruction`` into opcode and modifiers accordingly.

    Raises UnknownInstruction for an opcode that no row covers.
    """
    row, modifiers = _found_for(instruction)
    instruction.row, instruction.opcode, instruction.modifiers = row, row.name, modifiers
    return row


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


@contextlib.contextmanager
def temporary_rows(*changed: Row) -> Iterator[None]:
    """The table with other or further rows meanwhile, those that are registered inside included.

    Kernels that were translated with them keep them.
    """
    before = dict(_ROWS)
    try:
        for row in changed:
            _check(row)
            _ROWS[row.name] = row
        _found.clear()
        yield
    finally:
        _ROWS.clear()
        _ROWS.update(before)
        _found.clear()


def rows() -> dict[str, Row]:
    """All rows by name (a copy)."""
    return dict(_ROWS)
