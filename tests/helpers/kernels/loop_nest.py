"""The loops of a compiled kernel.

Loops are the natural loops of the control-flow graph (an edge to a block that dominates its source
closes one), so neither line numbers nor the order of the blocks matter.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from sm100_sim.timing import SassFunction, SassInstruction

#: Instructions of a loop that does work; a loop that polls a barrier and has none of them waits.
_WORK = ("LDTM", "STTM", "MUFU", "FFMA2", "UTCHMMA", "UTMALDG", "UTMASTG", "STS", "LDS", "SYNCS.A")


@dataclass(frozen=True)
class Loop:
    """A natural loop: header, latches (sources of its back edges), all blocks; by index."""

    header: int
    latches: frozenset[int]
    blocks: frozenset[int]


class LoopNest:
    """The loops of one kernel, blocks by their index in `function.blocks`."""

    def __init__(self, function: SassFunction) -> None:
        self.function = function

    def instructions_of(self, block: int) -> list[SassInstruction]:
        """The instructions of a block."""
        found = self.function.blocks[block]
        return self.function.instructions[found.start : found.stop]

    @functools.cached_property
    def loops(self) -> list[Loop]:
        """Natural loops, those of one header merged, in the order of their headers."""
        dominators = self._dominators()
        latches: dict[int, set[int]] = {}
        for block in self.function.blocks:
            for successor in block.successors:
                if successor in dominators.get(block.index, ()):
                    latches.setdefault(successor, set()).add(block.index)
        return [
            Loop(header, frozenset(sources), frozenset(self._body(header, sources)))
            for header, sources in sorted(latches.items())
        ]

    @functools.cached_property
    def working_loops(self) -> list[Loop]:
        """Innermost loops, not counting those that only wait for a barrier."""
        found = [loop for loop in self.loops if not self._only_waits(loop)]
        return [loop for loop in found if not any(other.blocks < loop.blocks for other in found)]

    def _only_waits(self, loop: Loop) -> bool:
        opcodes = [i.opcode for index in loop.blocks for i in self.instructions_of(index)]
        polls = any(opcode.startswith("SYNCS.PHASECHK") for opcode in opcodes)
        return polls and not any(opcode.startswith(_WORK) for opcode in opcodes)

    def _predecessors(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {block.index: [] for block in self.function.blocks}
        for block in self.function.blocks:
            for successor in block.successors:
                found[successor].append(block.index)
        return found

    def _dominators(self) -> dict[int, set[int]]:
        """Block -> its dominators, for the blocks that the entry reaches."""
        reached, pending = {0}, [0]
        while pending:
            for successor in self.function.blocks[pending.pop()].successors:
                if successor not in reached:
                    reached.add(successor)
                    pending.append(successor)
        predecessors = self._predecessors()
        dominators = {index: set(reached) for index in reached}
        dominators[0] = {0}
        changed = True
        while changed:
            changed = False
            for index in sorted(reached - {0}):
                before = [dominators[p] for p in predecessors[index] if p in reached]
                new = set.intersection(*before) | {index}
                if new != dominators[index]:
                    dominators[index], changed = new, True
        return dominators

    def _body(self, header: int, latches: set[int]) -> set[int]:
        predecessors = self._predecessors()
        body, pending = {header}, list(latches)
        while pending:
            index = pending.pop()
            if index not in body:
                body.add(index)
                pending += predecessors[index]
        return body
