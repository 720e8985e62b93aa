"""Stretches of a kernel: what stands between two synchronising instructions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

from sm100_sim.isa.table import row_of

_ORDERED = {"acquire", "release", "acq_rel"}


def synchronises(instruction: Any) -> bool:
    """Return True for a wait, an arrival, a fence, a barrier, or anything about a group of
    copies."""
    return row_of(instruction).synchronises


class Stretches:
    """Numbers the stretches of a kernel in the order of its PTX.

    Two accesses of one stretch have the same synchronisation before and behind them, so whatever
    orders one of them with a third access orders the other, too. A stretch also ends at a jump
    that is always taken: what follows it in the text is reached from elsewhere, often by another
    role.
    """

    def __init__(self, instructions: Iterable[Any]) -> None:
        self._ends = [i.index for i in instructions if _ends(i)]

    def of(self, index: int) -> int:
        """The stretch of the instruction with this index."""
        return bisect_right(self._ends, index)


def _ends(instruction: Any) -> bool:
    if row_of(instruction).jump is not None:
        return instruction.guard is None
    return synchronises(instruction) or bool(_ORDERED.intersection(instruction.modifiers))
