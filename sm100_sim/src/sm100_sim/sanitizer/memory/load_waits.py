"""Data of tcgen05.ld that a kernel uses with no tcgen05.wait::ld on the way.

PTX ISA 9.3, tcgen05.ld and tcgen05.wait: the instruction is asynchronous, and its registers hold
the data behind a wait::ld of the warp. On a GPU the register dependency waits, too, so compilers
let arithmetic go ahead of the wait, and a kernel may run right for years without it. What counts is
therefore an effect: data, or what was computed of them, that are stored or sent while no wait::ld
has covered their load. That is looked for in the program, over all paths.

Loads in inline assembly, as those of CUDA C++ and Triton, and in PTX written by hand are findings.
Where a compiler has made the load of an operation of its own, as in CuTe DSL, published kernels
(flash-attn-4, CUTLASS, cuDNN) leave waits out and rely on the register dependency; such loads are a
note of the launch, with their places, and no finding.

What the register dependency does not order is an arrival: ptxas makes of a wait::ld that the next
arrival waits for the load, and without it nothing does (docs/facts.md). So a load of any origin is
a finding if the warp arrives at a barrier before it has waited or touched a register of the load.
Arithmetic in front of the arrival counts as a touch, though ptxas may move it behind. A mov is none
where the run shows that it matters: ptxas makes no instruction of it, but many arrivals behind a
mov alone are no release of the columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from sm100_sim.isa.columns import Rule
from sm100_sim.isa.table import row_of
from sm100_sim.ptx.parser import Register
from sm100_sim.translate.blocks import successors, uses_and_definitions

from ..findings import Finding, arrived_early, not_waited


class Use(NamedTuple):
    """load: a tcgen05.ld. other: an instruction with an effect that takes data of it, in
    `register`."""

    load: Any
    other: Any
    register: str


def found(
    machine: Any, omitted: int, stretches: Any, overtaken: frozenset[int]
) -> Iterator[Finding]:
    """Yield a finding for each use whose instructions a launch has executed.

    overtaken: indices of loads whose columns were overwritten in the run with nothing between.
    """
    for use in _executed(machine, omitted, False):
        finding = not_waited(use)
        finding.stretches = tuple(stretches.of(at.index) for at in finding.sites)
        yield finding
    executed = machine.executed_indices()
    kernel = machine.compiled.kernel
    early = {use.load.index: use for use in arrivals_of(kernel, omitted, overtaken)}
    for use in (early | {use.load.index: use for use in arrivals_of(kernel, omitted)}).values():
        if use.load.index in executed and use.other.index in executed:
            yield arrived_early(use)


def notes(machine: Any, omitted: int) -> list[str]:
    """Return a note on the loads that a compiler has made and whose data are used with no wait."""
    loads = {use.load.index: use.load for use in _executed(machine, omitted, True)}
    if not loads:
        return []
    places = dict.fromkeys(
        ":".join(map(str, load.source)) if load.source else f"PTX line {load.line}"
        for load in loads.values()
    )
    return [
        f"data of {len(loads)} tcgen05.ld that the compiler has made are used with no "
        f"tcgen05.wait::ld between, at {', '.join(places)}; a GPU waits for their registers, so "
        "this is no finding"
    ]


def _executed(machine: Any, omitted: int, by_compiler: bool) -> Iterator[Use]:
    executed = machine.executed_indices()
    for use in uses_of(machine.compiled.kernel, omitted, by_compiler):
        if use.load.index in executed and use.other.index in executed:
            yield use


#: Register -> mask of the loads that may be in flight and whose data it depends on.
_State = dict[Register, int]


def uses_of(kernel: Any, omitted: int = -1, by_compiler: bool = False) -> list[Use]:
    """Return a use for each instruction that takes data of a load that no wait covers.

    omitted: index of an instruction that is left out. by_compiler: of the loads that a compiler has
    made of an operation of its own, in place of all others.
    """
    by_hand = kernel.assembly_lines
    loads = [
        i for i in kernel.instructions
        if row_of(i).rule is Rule.TENSOR_LOAD
        and (by_hand is not None and i.line not in by_hand) == by_compiler
    ]  # fmt: skip
    if not loads:
        return []
    numbers = {load.index: number for number, load in enumerate(loads)}
    states: list[_State | None] = [None] * len(kernel.blocks)
    states[0], pending = {}, {0}
    while pending:
        index = pending.pop()
        state = dict(states[index] or {})
        for instruction in _steps(kernel, kernel.blocks[index], omitted):
            _step(state, instruction, numbers)
        for successor in successors(kernel.blocks[index]):
            known = states[successor]
            if known is None:
                states[successor] = dict(state)
                pending.add(successor)
            elif _merge(known, state):
                pending.add(successor)
    return _uses(kernel, omitted, states, loads, numbers)


class _Flight(NamedTuple):
    """The loads that may be in flight, as a mask, and the registers that hold their data."""

    mask: int
    owners: _State


#: Starts of opcodes by which a warp arrives at a barrier.
_ARRIVALS = ("mbarrier.arrive", "bar.", "barrier.")


def arrivals_of(kernel: Any, omitted: int = -1, only: frozenset[int] | None = None) -> list[Use]:
    """Return a use for each load that is in flight, on some path, where the warp arrives at a
    barrier: the first arrival of the program.

    omitted: index of an instruction that is left out. only: indices of the loads that are looked
    at, of which a mov is no touch; None: all loads, of which it is one.
    """
    loads = [i for i in _used_loads(kernel) if only is None or i.index in only]
    if not loads:
        return []
    bits = {load.index: 1 << number for number, load in enumerate(loads)}
    found: dict[int, Use] = {}
    states: list[_Flight | None] = [None] * len(kernel.blocks)
    states[0], pending = _Flight(0, {}), {0}
    while pending:
        index = pending.pop()
        before = states[index] or _Flight(0, {})
        state = _Flight(before.mask, dict(before.owners))
        for instruction in _steps(kernel, kernel.blocks[index], omitted):
            if state.mask and instruction.opcode.startswith(_ARRIVALS):
                for load in loads:
                    if state.mask & bits[load.index]:
                        _keep_first(found, load, instruction)
            is_copy = only is not None and instruction.opcode == "mov"
            state = _passed(state, instruction, bits.get(instruction.index, 0), is_copy)
        for successor in successors(kernel.blocks[index]):
            known = states[successor]
            if known is None:
                states[successor] = _Flight(state.mask, dict(state.owners))
                pending.add(successor)
            elif _merge(known.owners, state.owners) or state.mask & ~known.mask:
                states[successor] = _Flight(known.mask | state.mask, known.owners)
                pending.add(successor)
    return list(found.values())


def _used_loads(kernel: Any) -> list[Any]:
    """Return the loads of whose data an instruction other than mov takes any: those of no other
    load can be wrong."""
    owners: dict[Register, set[int]] = {}
    loads = [i for i in kernel.instructions if row_of(i).rule is Rule.TENSOR_LOAD]
    for load in loads:
        for register in uses_and_definitions(load)[2]:
            owners.setdefault(register, set()).add(load.index)
    used: set[int] = set()
    before = -1
    while before != sum(map(len, owners.values())):
        before = sum(map(len, owners.values()))
        for instruction in kernel.instructions:
            uses, _, definitions = uses_and_definitions(instruction)
            data = {index for register in uses for index in owners.get(register, ())}
            if not data:
                continue
            if instruction.opcode == "mov":
                for register in definitions:
                    owners.setdefault(register, set()).update(data)
            else:
                used |= data
    return [load for load in loads if load.index in used]


def _keep_first(found: dict[int, Use], load: Any, arrival: Any) -> None:
    known = found.get(load.index)
    if known is None or arrival.index < known.other.index:
        register = next(iter(uses_and_definitions(load)[2]))
        found[load.index] = Use(load, arrival, register.name)


def _passed(state: _Flight, instruction: Any, bit: int, is_copy: bool) -> _Flight:
    """Go on behind an instruction. bit: of a load, 0 for all others.

    A warp waits for the registers that an instruction reads or writes. is_copy: it does not, and
    its results are in the registers of what it copies.
    """
    if _is_wait(instruction):
        return _Flight(0, {})
    uses, _, definitions = uses_and_definitions(instruction)
    mask, owners = state
    data = 0
    for register in uses:
        data |= owners.get(register, 0)
    if not is_copy:
        for register in definitions:
            data |= owners.get(register, 0)
        mask, data = mask & ~data, bit
    for register in definitions:
        if data:
            owners[register] = data
        else:
            owners.pop(register, None)
    return _Flight(mask | bit, owners)


def _is_wait(instruction: Any) -> bool:
    return row_of(instruction).rule is Rule.WAIT_LOADS


def _uses(
    kernel: Any, omitted: int, states: list[_State | None], loads: list[Any], numbers: dict
) -> list[Use]:
    found: dict[tuple[int, int], Use] = {}
    for block, before in zip(kernel.blocks, states, strict=True):
        if before is None:
            continue
        state = dict(before)
        for instruction in _steps(kernel, block, omitted):
            if _has_effect(instruction):
                for register in uses_and_definitions(instruction)[0]:
                    mask = state.get(register, 0)
                    if mask:
                        load = loads[mask.bit_length() - 1]
                        key = (load.index, instruction.index)
                        found.setdefault(key, Use(load, instruction, register.name))
            _step(state, instruction, numbers)
    return list(found.values())


def _steps(kernel: Any, block: Any, omitted: int) -> list[Any]:
    stop = block.stop + (block.terminator_instruction is not None)
    return [i for i in kernel.instructions[block.start : stop] if i.index != omitted]


def _has_effect(instruction: Any) -> bool:
    """Return True if an instruction does more than compute registers of its own warp."""
    is_store = instruction.opcode.partition(".")[0] in ("st", "stmatrix", "red", "atom")
    return is_store or row_of(instruction).rule is Rule.TENSOR_STORE


def _step(state: _State, instruction: Any, numbers: dict[int, int]) -> None:
    """Go on behind an instruction."""
    if _is_wait(instruction):
        state.clear()
        return
    uses, _, definitions = uses_and_definitions(instruction)
    mask = 0
    if instruction.index in numbers:
        mask = 1 << numbers[instruction.index]
    else:
        for register in uses:
            mask |= state.get(register, 0)
    for register in definitions:
        if mask:
            state[register] = mask
        else:
            state.pop(register, None)


def _merge(known: _State, other: _State) -> bool:
    """Add the loads of another state; whether there were any."""
    changed = False
    for register, mask in other.items():
        before = known.get(register, 0)
        if mask | before != before:
            known[register] = mask | before
            changed = True
    return changed
