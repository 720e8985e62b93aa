"""Control flow of a kernel: basic blocks, liveness, register slots and spin loops.

A block is straight-line inline code followed by one terminator. Blocks are cut at labels, after
branches, around every machine operation (a *trap*, a block of its own), and before every inline
instruction that needs the lanes of its warp together: those are the points at which lanes may
stand, so a program point is a block index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sm100_sim.isa.columns import Jump, Rule
from sm100_sim.isa.table import row_of
from sm100_sim.ptx.parser import Instruction, Kernel, Operand, Register

NEXT, BRANCH, EXIT, TRAP, INDEXED = range(5)
"""Terminators: fall through, (guarded) branch, exit, machine operation, brx.idx."""

_TERMINATORS = {Jump.BRANCH: BRANCH, Jump.INDEXED: INDEXED, Jump.EXIT: EXIT}
_SPIN_STEPS = 12


@dataclass(slots=True)
class Block:
    """One basic block: instructions [start, stop) inline, then ``terminator``.

    ``terminator_instruction`` is None for NEXT. ``target`` and ``following`` are block indices;
    ``targets`` those of a brx.idx. ``aligned`` is the instruction for which lanes must have
    converged before the block runs. ``live_out`` are the registers whose values leave the block
    in memory.
    """

    index: int
    start: int
    stop: int
    terminator: int = NEXT
    terminator_instruction: Instruction | None = None
    target: int = -1
    following: int = -1
    targets: tuple[int, ...] = ()
    aligned: Instruction | None = None
    live_out: set[Register] = field(default_factory=set)


def build_blocks(kernel: Kernel) -> list[Block]:
    """Cut a kernel into basic blocks, after its instructions have been found in the table."""
    instructions = kernel.instructions
    count = len(instructions)
    if not count:
        raise ValueError(f"kernel {kernel.name} has no instructions")
    leaders = {0, count}
    for i, instruction in enumerate(instructions):
        row = row_of(instruction)
        if row.jump is not None:
            leaders.add(i + 1)
            leaders.update(_target_indices(instruction))
        elif row.bind is not None:
            leaders.update((i, i + 1))
        elif row.aligned:
            leaders.add(i)
    starts = sorted(leaders)
    block_at = {start: index for index, start in enumerate(starts)}
    blocks = [
        _make_block(kernel, index, start, stop, block_at)
        for index, (start, stop) in enumerate(zip(starts, starts[1:], strict=False))
    ]
    # Running off the end of a kernel is an exit.
    blocks.append(Block(len(blocks), count, count, EXIT))
    return blocks


def _target_indices(instruction: Instruction) -> list[int]:
    labels = [op for op in instruction.operands if op.kind in ("label", "targets")]
    return [label.value for op in labels for label in (op.items or (op,))]


def _make_block(
    kernel: Kernel, index: int, start: int, stop: int, block_at: dict[int, int]
) -> Block:
    block = Block(index, start, stop, following=index + 1)
    first, last = kernel.instructions[start], kernel.instructions[stop - 1]
    if row_of(first).aligned:
        block.aligned = first
    row = row_of(last)
    if row.jump is not None:
        block.terminator = _TERMINATORS[row.jump]
    elif row.bind is not None:
        block.terminator = TRAP
    else:
        return block
    block.terminator_instruction, block.stop = last, stop - 1
    targets = tuple(block_at[target] for target in _target_indices(last))
    if block.terminator == BRANCH:
        block.target = targets[0]
    block.targets = targets
    return block


def operand_registers(op: Operand | None) -> Iterator[Register]:
    """Every register that an operand mentions, nested ones included."""
    if op is None:
        return
    if op.register is not None:
        yield op.register
    yield from operand_registers(op.base)
    for item in op.items:
        yield from operand_registers(item)


def uses_and_definitions(
    instruction: Instruction,
) -> tuple[list[Register], list[Register], list[Register]]:
    """Registers read, registers surely overwritten in every lane, and all written registers.

    A guarded definition keeps the old value in other lanes, hence also reads it.
    """
    defines = row_of(instruction).defines
    uses = list(operand_registers(instruction.guard))
    definitions: list[Register] = []
    for position, op in enumerate(instruction.operands):
        if position in defines and op.kind in ("reg", "pred", "pair", "vec"):
            definitions += operand_registers(op)
        else:
            uses += operand_registers(op)
    if instruction.guard is None:
        return uses, definitions, definitions
    return uses + definitions, [], definitions


def analyse_liveness(kernel: Kernel, keep: frozenset[str] = frozenset()) -> None:
    """Set ``live_out`` of every block and give a slot to each register that lives in memory.

    ``keep`` names registers that stay readable after the kernel has exited (for tests).
    Registers of one file get slots in the order of their declaration, so consecutive names that
    all live in memory are consecutive rows.
    """
    blocks, registers = kernel.blocks, kernel.registers
    number = {register: i for i, register in enumerate(registers)}
    kept = sum(1 << number[r] for r in registers if r.name in keep)
    use, kill, in_memory = [], [], kept
    for block in blocks:
        block_use, block_kill = 0, 0
        for i in _instruction_range(block):
            uses, definitions, _ = uses_and_definitions(kernel.instructions[i])
            for register in uses:
                block_use |= (1 << number[register]) & ~block_kill
            for register in definitions:
                block_kill |= 1 << number[register]
        if block.terminator == TRAP:
            for op in block.terminator_instruction.operands:
                for register in operand_registers(op):
                    in_memory |= 1 << number[register]
        use.append(block_use)
        kill.append(block_kill)
    live_out = _solve(blocks, use, kill, kept)
    for block, live in zip(blocks, live_out, strict=True):
        ending = block.terminator_instruction
        at_end = sum({1 << number[r] for r in operand_registers(ending.guard)}) if ending else 0
        if block.terminator == INDEXED:
            at_end |= sum({1 << number[r] for r in operand_registers(ending.operands[0])})
        # A register that no path defines is still read from memory.
        in_memory |= live | at_end | use[block.index]
        block.live_out = {registers[i] for i in _bits(live | at_end)}
    _assign_slots([registers[i] for i in _bits(in_memory)])


def _instruction_range(block: Block) -> range:
    return range(block.start, block.stop + (block.terminator_instruction is not None))


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def successors(block: Block) -> list[int]:
    """Indices of the blocks that may run after this one."""
    found = list(block.targets)
    guarded = (
        block.terminator_instruction is not None and block.terminator_instruction.guard is not None
    )
    if block.terminator in (NEXT, TRAP) or guarded:
        found.append(block.following)
    return found


def _solve(blocks: list[Block], use: list[int], kill: list[int], kept: int) -> list[int]:
    live_in, live_out = [0] * len(blocks), [0] * len(blocks)
    following = [successors(block) for block in blocks]
    predecessors: list[list[int]] = [[] for _ in blocks]
    for index, after in enumerate(following):
        for successor in after:
            predecessors[successor].append(index)
    pending = set(range(len(blocks)))
    while pending:
        index = max(pending)
        pending.discard(index)
        out = kept
        for successor in following[index]:
            out |= live_in[successor]
        live_out[index] = out
        new = use[index] | (out & ~kill[index])
        if new != live_in[index]:
            live_in[index] = new
            pending.update(predecessors[index])
    return live_out


def _assign_slots(registers: list[Register]) -> None:
    next_slot = {"r32": 0, "r64": 0, "pred": 0}
    for register in sorted(registers, key=lambda r: r.order):
        register.slot = next_slot[register.file]
        next_slot[register.file] += 2 if register.type == "b128" else 1


def mark_spins(kernel: Kernel) -> None:
    """Set ``spin`` on every mbarrier try_wait or test_wait whose false result loops back to it."""
    for instruction in kernel.instructions:
        if row_of(instruction).rule is Rule.WAIT:
            instruction.spin = _loops_on_false(kernel, instruction)


def _loops_on_false(kernel: Kernel, wait: Instruction) -> bool:
    """Follow the code after ``wait`` with its predicate false, evaluating what depends on it.

    Only moves of the predicate, comparisons of it and branches may stand between; on the way from
    the loop's head back to the wait, address arithmetic that overwrites nothing else may.
    """
    known: dict[Register | None, int] = {wait.operands[0].register: 0}
    if wait.guard is not None:
        return False
    index = wait.index + 1
    written: set[Register | None] = set()
    for _ in range(_SPIN_STEPS):
        if index >= len(kernel.instructions):
            return False
        instruction = kernel.instructions[index]
        if index == wait.index:
            return True
        if row_of(instruction).jump is Jump.BRANCH:
            taken = _guard_value(instruction, known)
            if taken is None:
                return False
            index = _target_indices(instruction)[0] if taken else index + 1
            continue
        value = _evaluate(instruction, known)
        if value is None:
            # Recomputing an address from registers that the loop does not change is harmless.
            if index > wait.index or not _recomputes(instruction, written):
                return False
        else:
            known[instruction.operands[0].register] = value
        written.add(instruction.operands[0].register)
        index += 1
    return False


def _recomputes(instruction: Instruction, written: set[Register | None]) -> bool:
    if instruction.guard is not None or not row_of(instruction).addressing:
        return False
    destination = instruction.operands[0].register
    sources = {r for op in instruction.operands[1:] for r in operand_registers(op)}
    return destination is not None and destination not in sources and not sources & written


def _guard_value(instruction: Instruction, known: dict) -> bool | None:
    guard = instruction.guard
    if guard is None:
        return True
    if guard.register not in known:
        return None
    return bool(known[guard.register]) != guard.negated


def _evaluate(instruction: Instruction, known: dict) -> int | None:
    """Value of a pure instruction whose sources are all known, else None."""
    if instruction.guard is not None:
        return None
    values: list[int | None] = []
    for op in instruction.operands[1:]:
        if op.kind == "imm":
            values.append(op.value)
        elif op.register in known:
            values.append(int(not known[op.register]) if op.negated else known[op.register])
        else:
            values.append(None)
    fold = row_of(instruction).fold
    return None if fold is None or not values else fold(instruction.modifiers, values)


def tensor_loads(instructions: Iterable[Instruction]) -> list[Instruction]:
    """Return the loads from tensor memory, in their order; the log of accesses numbers them so."""
    return [i for i in instructions if row_of(i).rule is Rule.TENSOR_LOAD]


def loaded_registers(kernel: Kernel) -> dict[Register, frozenset[int]]:
    """Registers that hold data of a tcgen05.ld, directly or copied by mov.

    The value are the indices of those instructions among all tcgen05.ld of the kernel.
    """
    found: dict[Register, frozenset[int]] = {}
    for number, instruction in enumerate(tensor_loads(kernel.instructions)):
        for place in row_of(instruction).defines:
            for register in operand_registers(instruction.operands[place]):
                found[register] = found.get(register, frozenset()) | {number}
    moves = [i for i in kernel.instructions if row_of(i).copies]
    changed = True
    while changed:
        changed = False
        for instruction in moves:
            target, *sources = instruction.operands
            held = frozenset().union(
                *(found.get(r, frozenset()) for op in sources for r in operand_registers(op))
            )
            for register in operand_registers(target):
                if not held <= found.get(register, frozenset()):
                    found[register] = found.get(register, frozenset()) | held
                    changed = True
    return found
