"""Registers of wgmma instructions that a kernel touches while they may be at work.

PTX ISA 9.3, wgmma.mma_async and wgmma.fence: until a wait_group covers it, a wgmma owns its
accumulator and, if A is in registers, those; only wgmmas of the same shape may go on with the
accumulator. A wgmma.fence must stand between another access to such a register and the wgmma.

Native code does not log accesses to registers, so this looks at the program, not at a run: which
wgmmas may be in flight at each point, over all paths. What is found counts where both instructions
have been executed. ptxas does the same and inserts waits and fences, or makes all wgmmas of the
function wait for each other (its messages C7510 to C7519): right results, by luck, and slow.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

from sm100_sim.isa.columns import Rule
from sm100_sim.isa.table import row_of
from sm100_sim.isa.tensor.wgmma import form_of
from sm100_sim.translate.blocks import operand_registers, successors, uses_and_definitions

IN_FLIGHT, NOT_FENCED = "registers-in-flight", "registers-not-fenced"


class Hazard(NamedTuple):
    """product: a wgmma.mma_async. other: what touches a register of it, None for whatever came
    before the kernel's first fence. writes: whether it is written (read else)."""

    kind: str
    register: str
    product: Any
    other: Any
    writes: bool = False


class _State(NamedTuple):
    """Possible state at a point of the program, as masks: wgmmas that no commit covers; those of
    groups that no wait covers, the latest group first; registers written and read since the last
    fence."""

    open: int = 0
    groups: tuple[int, ...] = ()
    written: int = 0
    read: int = 0

    def merged(self, other: _State) -> _State:
        """Return the state that covers either."""
        depth = max(len(self.groups), len(other.groups))
        mine, theirs = (s.groups + (0,) * (depth - len(s.groups)) for s in (self, other))
        return _State(self.open | other.open, tuple(a | b for a, b in zip(mine, theirs)),
                      self.written | other.written, self.read | other.read)  # fmt: skip

    @property
    def at_work(self) -> int:
        """Mask of the wgmmas that may be in flight."""
        found = self.open
        for group in self.groups:
            found |= group
        return found


class _Product(NamedTuple):
    """A wgmma with its registers as masks."""

    number: int
    instruction: Any
    shape: tuple[int, int]
    d: int
    a: int


class _Touch(NamedTuple):
    """Another instruction with the registers of wgmmas that it reads and writes."""

    instruction: Any
    reads: int
    writes: int


class _Program:
    """The kernel as far as registers of wgmmas are concerned."""

    def __init__(self, kernel: Any, omitted: int) -> None:
        self.blocks = kernel.blocks
        products = [i for i in kernel.instructions if _is(i, Rule.WARPGROUP_MMA)]
        operands = [r for i in products for op in i.operands[:2] if op.kind == "vec"
                    for r in operand_registers(op)]  # fmt: skip
        self.names = list(dict.fromkeys(operands))
        self._bit = {register: 1 << place for place, register in enumerate(self.names)}
        self.products = [
            _Product(number, i, form_of(i).shape, self._mask(i.operands[0]),
                     self._mask(i.operands[1]) if i.operands[1].kind == "vec" else 0)
            for number, i in enumerate(products)
        ]  # fmt: skip
        self._product_at = {product.instruction.index: product for product in self.products}
        #: Groups that some wait leaves at work; older ones need not be told apart.
        self.depth = max((i.operands[0].value for i in kernel.instructions
                          if _is(i, Rule.WAIT_WARPGROUP)), default=0)  # fmt: skip
        self.steps = [list(self._steps(kernel, block, omitted)) for block in self.blocks]

    def _mask(self, operand: Any) -> int:
        found = 0
        for register in operand_registers(operand):
            found |= self._bit.get(register, 0)
        return found

    def _steps(self, kernel: Any, block: Any, omitted: int) -> Iterator[Any]:
        """Yield the steps of a block: `_Product`, `_Touch` or the instruction of a fence, commit or
        wait."""
        stop = block.stop + (block.terminator_instruction is not None)
        for instruction in kernel.instructions[block.start : stop]:
            rule = row_of(instruction).rule
            if instruction.index == omitted:
                continue
            if rule is Rule.WARPGROUP_MMA:
                yield self._product_at[instruction.index]
            elif rule in (Rule.WARPGROUP_FENCE, Rule.COMMIT_WARPGROUP, Rule.WAIT_WARPGROUP):
                yield instruction
            else:
                uses, _, definitions = uses_and_definitions(instruction)
                reads = sum({self._bit.get(register, 0) for register in uses})
                writes = sum({self._bit.get(register, 0) for register in definitions})
                if reads or writes:
                    yield _Touch(instruction, reads, writes)

    def after(self, state: _State, step: Any) -> _State:
        """The state behind a step."""
        if isinstance(step, _Product):
            return state._replace(open=state.open | 1 << step.number)
        if isinstance(step, _Touch):
            return state._replace(written=state.written | step.writes,
                                  read=state.read | step.reads)  # fmt: skip
        rule = row_of(step).rule
        if rule is Rule.WARPGROUP_FENCE:
            return state._replace(written=0, read=0)
        if rule is Rule.WAIT_WARPGROUP:
            return state._replace(groups=state.groups[: step.operands[0].value])
        groups = (state.open, *state.groups)
        oldest = 0
        for group in groups[self.depth :]:
            oldest |= group
        return state._replace(open=0, groups=(*groups[: self.depth], oldest))

    def states(self) -> list[_State | None]:
        """The state at the start of each block, None where nothing leads to it."""
        found: list[_State | None] = [None] * len(self.blocks)
        found[0] = _State(written=(1 << len(self.names)) - 1)
        pending = {0}
        while pending:
            index = pending.pop()
            state: Any = found[index]
            for step in self.steps[index]:
                state = self.after(state, step)
            for successor in successors(self.blocks[index]):
                before = found[successor]
                merged = state if before is None else before.merged(state)
                if merged != before:
                    found[successor] = merged
                    pending.add(successor)
        return found


def _is(instruction: Any, rule: Rule) -> bool:
    return row_of(instruction).rule is rule


#: Translated kernel -> its hazards.
_known: weakref.WeakKeyDictionary[Any, list[Hazard]] = weakref.WeakKeyDictionary()


def hazards_of(compiled: Any, omitted: int = -1) -> list[Hazard]:
    """`hazards` of a translated kernel, found once."""
    if omitted >= 0:
        return hazards(compiled.kernel, omitted)
    if compiled not in _known:
        _known[compiled] = hazards(compiled.kernel)
    return _known[compiled]


def hazards(kernel: Any, omitted: int = -1) -> list[Hazard]:
    """All of a kernel: one for each instruction that touches a register at work, and one for each
    wgmma that no fence stands in front of.

    omitted: index of an instruction that is left out.
    """
    program = _Program(kernel, omitted)
    found: list[Hazard] = []
    if not program.products:
        return found
    for state, steps in zip(program.states(), program.steps, strict=True):
        if state is None:
            continue
        for step in steps:
            if isinstance(step, _Product):
                found += _of_product(program, state, step)
            elif isinstance(step, _Touch):
                found += _of_touch(program, state, step)
            state = program.after(state, step)
    return found


def _of_touch(program: _Program, state: _State, step: _Touch) -> Iterator[Hazard]:
    """A register at work is read or written; which wgmma is named: the last of them."""
    for product in _at_work(program, state):
        written = step.writes & (product.d | product.a)
        touched = written or step.reads & product.d
        if touched:
            yield Hazard(IN_FLIGHT, _name(program, touched), product.instruction,
                         step.instruction, bool(written))  # fmt: skip
            return


def _of_product(program: _Program, state: _State, step: _Product) -> Iterator[Hazard]:
    """A wgmma takes registers that another one has, or that no fence stands behind."""
    for product in _at_work(program, state):
        other_shape = step.d & product.d if step.shape != product.shape else 0
        shared = other_shape | step.d & product.a | step.a & product.d
        if shared:
            yield Hazard(IN_FLIGHT, _name(program, shared), product.instruction, step.instruction,
                         bool(shared & step.d))  # fmt: skip
            break
    written, read = state.written & (step.d | step.a), state.read & step.d
    if written or read:
        name = _name(program, written or read)
        other = _last_touch(program, step, written or read, bool(written))
        yield Hazard(NOT_FENCED, name, step.instruction, other, bool(written))


def _at_work(program: _Program, state: _State) -> Iterator[_Product]:
    """The wgmmas that may be in flight, the last of the program first."""
    mask = state.at_work
    return (product for product in reversed(program.products) if mask >> product.number & 1)


def _last_touch(program: _Program, before: _Product, registers: int, writes: bool) -> Any:
    """The nearest instruction ahead of a wgmma in the text, or else the last one, that writes or
    reads one of the registers; None if none does."""
    found = [
        step.instruction for steps in program.steps for step in steps
        if isinstance(step, _Touch) and (step.writes if writes else step.reads) & registers
    ]  # fmt: skip
    ahead = [i for i in found if i.index < before.instruction.index]
    return (ahead or found or [None])[-1]


def _name(program: _Program, mask: int) -> str:
    return program.names[(mask & -mask).bit_length() - 1].name
