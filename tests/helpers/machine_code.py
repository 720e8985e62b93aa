"""What machine code says about the registers of a kernel's roles."""

import re

from sm100_sim.timing.sass import SassFunction

REGISTER = re.compile(r"(?<![A-Z])R(\d+)")
#: Registers of a tcgen05.ld or st, which names the first of them.
TMEM_WIDTH = re.compile(r"(?:LDTM|STTM)\.x(\d+)")


def beyond(function: SassFunction, start: int, budget: int) -> list[str]:
    """Instructions after number `start` on any path that name a register the budget lacks."""
    found, seen = [], set()
    first = function.block_of[start]
    pending = [(first, start + 1)]
    while pending:
        index, begin = pending.pop()
        block = function.blocks[index]
        for instruction in function.instructions[begin : block.stop]:
            named = [int(number) for number in REGISTER.findall(instruction.operands)]
            width = TMEM_WIDTH.match(instruction.opcode)
            if named and max(named) + (int(width[1]) if width else 1) > budget:
                found.append(instruction.text)
        for successor in block.successors:
            if successor not in seen:
                seen.add(successor)
                pending.append((successor, function.blocks[successor].start))
    return found
