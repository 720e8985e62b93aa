"""Costs of wgmma for a replay, read off the machine code of the paths that warps take.

The instruction names the shape; that the last MMA of a group closes it, and how many groups a wait
lets be, stand in its operands. So a wait that ptxas has added counts, one that it has dropped does
not. Costs are those measured on an H200 (docs/facts.md): 64 x N takes N / 2 clocks of an SM's
tensor core, A and B 32 bytes per row of the port of shared memory, B alone where A is in registers.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from ..program import Compiled
from ..replaying.products import WARPS
from ..tensor import MmaCost
from .resources import Action
from .sass import SassFunction, SassInstruction

#: Clocks from the end of a product in the tensor core until a wait for it succeeds: from issue to
#: behind the wait a product takes 64 + N / 2.
LATENCY = 64
_ROWS = 64
_SHAPE = re.compile(r"[HIQB]GMMA(?:\.SP)?\.64x(\d+)x\d+")
_PENDING = re.compile(r"gsb0, (0x[0-9a-f]+|\d+)")


def product_cost(instruction: SassInstruction) -> MmaCost:
    """Return the cost of one wgmma. Raises ValueError for a sparse one, which the model does not
    know."""
    shape = _SHAPE.match(instruction.opcode)
    if shape is None or ".SP" in instruction.opcode:
        raise ValueError(f"{instruction.text}: the model knows dense products of 64 rows alone")
    columns = int(shape[1])
    # The first operand is the result, the second A.
    a_in_memory = instruction.operands.split(", ")[1].startswith("gdesc")
    operands = (columns + a_in_memory * _ROWS) // 4
    return MmaCost(columns // 2, operands, columns // 2 + LATENCY)


def with_products(compiled: Compiled) -> Compiled:
    """A program with the products of its warpgroups; as it was where it has none.

    Raises ValueError if the warps of a warpgroup issue different numbers of products.
    """
    rows = _rows_of_code(compiled.function)
    if not rows:
        return compiled
    program = compiled.program
    issued: dict[tuple[int, int], set[int]] = {}
    event, action = program.event.copy(), list(program.action)
    entries, mma = list(compiled.entries), dict(compiled.mma)
    for number, (rank, warp) in enumerate(compiled.warps):
        path, products = compiled.paths[number], 0
        for place in np.flatnonzero(np.isin(path.numbers, list(rows))).tolist():
            row, cost = rows[path.numbers[place]]
            if cost is not None:
                # The clocks of a product are those of one of its four warps.
                row = (*row[:4], int(warp % WARPS == 0))
                mma[len(action)] = cost
                products += 1
            event[program.first[number] + place] = len(action)
            action.append(np.array(row, np.int64))
            entries.append(_entry_of(compiled, number, place))
        issued.setdefault((rank, warp // WARPS), set()).add(products)
    uneven = [name for name, counts in issued.items() if len(counts) > 1]
    if uneven:
        rank, warpgroup = uneven[0]
        raise ValueError(
            f"warps of warpgroup {warpgroup} of CTA {rank} issue {sorted(issued[uneven[0]])} "
            "products; all four issue each"
        )
    code = compiled.instructions.action.copy()
    for number, (row, _) in rows.items():
        code[number] = row[0]
    return replace(
        compiled, instructions=compiled.instructions._replace(action=code), entries=entries,
        mma=mma, program=program._replace(event=event, action=np.array(action, np.int64)),
    )  # fmt: skip


def _rows_of_code(
    function: SassFunction,
) -> dict[int, tuple[tuple[int, int, int, int, int], MmaCost | None]]:
    """Instruction number -> (row of `Program.action`, cost of a product, None of a wait)."""
    found: dict[int, tuple[tuple[int, int, int, int, int], MmaCost | None]] = {}
    for number, instruction in enumerate(function.instructions):
        if instruction.base.endswith("GMMA"):
            cost = product_cost(instruction)
            closes = LATENCY * ("gsb0" in instruction.operands)
            row = int(Action.PRODUCT), cost.compute, cost.operands, closes, 0
            found[number] = row, cost
        elif instruction.opcode.startswith("WARPGROUP.DEPBAR"):
            pending = _PENDING.search(instruction.operands)
            if pending is None:
                raise ValueError(f"{instruction.text}: for how many groups does it wait?")
            found[number] = (int(Action.PRODUCT_WAIT), int(pending[1], 0), 0, 0, 0), None
    return found


def _entry_of(compiled: Compiled, number: int, place: int) -> object:
    """The trace entry of an element of a path, or the next one that has any."""
    begin, end = compiled.program.first[number] + place, compiled.program.last[number]
    rows = compiled.program.event[begin:end]
    held = rows[rows >= 0]
    return compiled.entries[held[0] if len(held) else -1]
