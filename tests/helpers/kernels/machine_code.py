"""Registers of a kernel's roles, as machine code has them."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from loop_nest import LoopNest

from fa4_hd256.kernels.plan.budgets import RegisterPlan
from fa4_hd256.run.resources import resource_usage
from sm100_sim.host.cubin import launch_registers
from sm100_sim.timing.machine_code.sass import SassFunction

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


def roles_have_their_registers(function: SassFunction, plan: RegisterPlan) -> None:
    """Assert that behind each setmaxnreg, on every path, no register is named that the budget
    lacks, and that the budgets are those of the plan."""
    budgets = []
    for number, instruction in enumerate(function.instructions):
        if instruction.base == "USETMAXREG":
            budgets.append(int(re.search(r"0x[0-9a-f]+", instruction.operands)[0], 16))
            assert beyond(function, number, budgets[-1]) == []
            # The check can fail: no role does with two.
            assert beyond(function, number, 2) != []
    assert sorted(set(budgets)) == sorted({budget for _, budget in plan.budgets})


def nothing_is_spilled(kernel: Any, plan: RegisterPlan) -> None:
    """Assert that a compiled kernel has no stack, and is launched with its plan's registers."""
    assert set(launch_registers(kernel.cubin).values()) == {plan.at_launch}
    usage = resource_usage(kernel.cubin)
    assert (usage.stack, usage.local) == (0, 0)


def look_ups_of_steps(function: SassFunction) -> list[int]:
    """Return, for each loop that loads tiles, how often it reads memory into registers.  A look-up
    takes longer than a step's MMAs."""
    nest = LoopNest(function)
    loops = [
        [i.base for block in loop.blocks for i in nest.instructions_of(block)]
        for loop in nest.working_loops
    ]
    return [bases.count("LDG") for bases in loops if "UTMALDG" in bases]


def no_step_looks_up(function: SassFunction) -> None:
    """Assert that loops which load tiles read nothing of memory into registers: what is read of it
    in a tile's first step serves the others."""
    found = look_ups_of_steps(function)
    assert found and not any(found)
    # The tile's look-ups are there, and seen.
    assert "LDG" in [i.base for i in function.instructions]


def letters(instructions: Iterable[Any], letter_of: Mapping[str, str]) -> str:
    """Return a letter for each instruction whose opcode begins like a key of `letter_of`, in
    order."""
    return "".join(
        next((letter for start, letter in letter_of.items() if i.opcode.startswith(start)), "")
        for i in instructions
    )


#: Letters of wgmma kernels: the MMA into 256 columns and others, their fence and wait,
#: exponentials, the wait for a barrier.
WGMMA_LETTERS = {
    "HGMMA.64x256": "O", "HGMMA": "S", "WARPGROUP.ARRIVE": "F", "WARPGROUP.DEPBAR": "W",
    "MUFU.EX2": "x", "SYNCS.PHASECHK": "b",
}  # fmt: skip
