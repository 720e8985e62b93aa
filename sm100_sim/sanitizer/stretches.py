"""Stretches of a kernel: what stands between two synchronising instructions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

#: Opcodes (prefixes) of synchronisation: waits, arrivals, fences, barriers, groups of copies.
#: bar.warp.sync is not among them: it orders lanes of one warp, which the sanitizer does not tell
#: apart; nor is griddepcontrol, which orders launches.
SYNCHRONISATION = (
    "mbarrier.try_wait", "mbarrier.test_wait", "mbarrier.arrive", "mbarrier.arrive_drop",
    "mbarrier.expect_tx", "mbarrier.complete_tx", "tcgen05.commit", "tcgen05.wait", "tcgen05.fence",
    "fence", "membar", "bar.sync", "bar.arrive", "bar.red", "bar.cta", "barrier",
    "cp.async.bulk.commit_group", "cp.async.bulk.wait_group", "cp.async.commit_group",
    "cp.async.wait_group", "cp.async.wait_all", "cp.async.mbarrier.arrive",
)  # fmt: skip
_JUMPS = ("bra", "brx", "ret", "exit")
_ORDERED = {"acquire", "release", "acq_rel"}


def synchronises(instruction: Any) -> bool:
    """Whether an instruction is one of SYNCHRONISATION."""
    name = instruction.name
    return any(name == p or name.startswith((f"{p}.", f"{p}::")) for p in SYNCHRONISATION)


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
    if instruction.opcode in _JUMPS:
        return instruction.guard is None
    return synchronises(instruction) or bool(_ORDERED.intersection(instruction.modifiers))
