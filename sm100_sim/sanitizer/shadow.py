"""Shadow of a memory: for each granule the last write and the reads since.

A granule holds the number of a state, and a state is immutable: (write, reads). Accesses cover
whole tiles whose granules are nearly always in one state, so an access costs one look at the states
that occur and one fill, not work per granule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

#: Numbers of the states that need no accesses: never written; bytes of a live mbarrier; written by
#: something whose order is not followed (atomics).
FRESH, BARRIER, UNTRACKED = range(3)


class Access:
    """One access, or many of one instruction at one time.

    agent, clock: it is complete for whoever's frontier has at least `clock` at `agent`; clock is
    None while it is in flight. kind: "generic", "ld", "st", "mma", "tma", "bulk", "clc", "alloc",
    "dealloc" or "arrive". write: whether it writes. warp: number of the issuing warp in the
    cluster; issued: its generic clock then. instruction, cta, index: for reports (CTA coordinates
    and warp index). detail: more for reports. order: of an MMA, tcgen05.cp or shift, what decides
    after which others it executes (its opcode, accumulator and instruction descriptor).
    """

    __slots__ = (
        "agent", "clock", "kind", "write", "warp", "issued", "instruction", "cta", "index",
        "detail", "order",
    )  # fmt: skip

    def __init__(self, state: Any, agent: int, clock: int | None, kind: str, write: bool) -> None:
        self.agent = agent
        self.clock = clock
        self.kind = kind
        self.write = write
        self.warp = state.number
        self.issued = state.clock
        self.instruction = state.instruction
        self.cta = state.warp.cta.ctaid
        self.index = state.warp.index
        self.detail = ""
        self.order: tuple = ()


State = tuple[Access | None, tuple[Access, ...]]


class Shadow:
    """States of the granules of one memory.

    plane: int32 array of state numbers, any shape. judge(before, access, frontier, where): called
    for each conflicting pair, `before` an Access or one of the special states' numbers; returns
    whether `before` is ordered before `access`.
    """

    def __init__(self, shape: tuple[int, ...], where: str, judge: Callable[..., bool]) -> None:
        self.plane = np.zeros(shape, np.int32)
        self.where = where
        self._judge = judge
        self._states: list[State | None] = [None, None, (None, ())]

    def touch(self, region: Any, access: Access, frontier: np.ndarray) -> None:
        """Record an access to `plane[region]` and check it against what is there."""
        plane = self.plane
        cells = plane[region]
        if not cells.size:
            return
        first = int(cells.min())
        if first == cells.max():
            plane[region] = self._follow(first, access, frontier)
            return
        numbers, inverse = np.unique(cells, return_inverse=True)
        after = np.array(
            [self._follow(int(number), access, frontier) for number in numbers], np.int32
        )
        plane[region] = after[inverse].reshape(cells.shape)

    def update(self, region: Any, access: Access, frontier: np.ndarray) -> None:
        """Record a read and then a write of the same cells by one operation."""
        write, access.write = access.write, False
        self.touch(region, access, frontier)
        access.write = write
        self.touch(region, access, frontier)

    def _follow(self, number: int, access: Access, frontier: np.ndarray) -> int:
        """The state after `access` to granules in state `number`."""
        if number == BARRIER:
            self._judge(BARRIER, access, frontier, self.where)
            return BARRIER
        state = self._states[number]
        if state is None:
            if not access.write:
                self._judge(FRESH, access, frontier, self.where)
                return UNTRACKED
            return self._new((access, ()))
        write, reads = state
        if write is access and not access.write:
            return number
        if write is not None and write is not access:
            self._judge(write, access, frontier, self.where)
        if access.write:
            for read in reads:
                if read is not access:
                    self._judge(read, access, frontier, self.where)
            return self._new((access, ()))
        if access in reads:
            return number
        kept = tuple(r for r in reads if r.clock is None or frontier[r.agent] < r.clock)
        return self._new((write, (*kept, access)))

    def _new(self, state: State) -> int:
        states = self._states
        # One access makes the same new state of many old ones; keep them together.
        if states[-1] == state:
            return len(states) - 1
        states.append(state)
        return len(states) - 1
