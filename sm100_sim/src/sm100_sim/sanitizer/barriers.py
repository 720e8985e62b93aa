"""mbarriers that carry what their arrivals publish."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from sm100_sim.native.calling import callable_of
from sm100_sim.state.barriers import MBarrier

from .compiled.records import ROLES, BarrierRecord
from .compiled.watched import complete_phase
from .rules import Rules


def _shared(name: str) -> property:
    """A flag that native code shares."""
    return property(
        lambda self: bool(getattr(self.shared, name)),
        lambda self, value: setattr(self.shared, name, value),
    )


class WatchedBarrier(MBarrier):
    """An mbarrier with the frontiers of its phases.

    gathering: what the arrivals of the current phase publish. released: what those of the last
    complete phase did. observed: by warp, clock of its latest successful wait for the last complete
    phase, 0 for none. initialised: (warp, generic clock) of the init; fenced: whether a fence made
    it visible to other CTAs and to the async proxy. skipped: an arrive came before any wait for the
    phase before, and was reported. last_waits: by warp, phase last waited for, -1 for none.
    arrivals: of the current phase by the warp that issued them; usual: those of the first phase.
    signalled: bytes of a copy have arrived in the current phase. roles: index of an instruction ->
    numbers of the warps that have arrived by it, in any phase. Warps are numbers in the cluster.
    """

    __slots__ = (
        "sanitizer", "_frontiers", "_by_warp", "base", "agent", "initialised", "_roles", "shared",
    )  # fmt: skip

    def __init__(
        self, sanitizer: Rules, address: int, count: int, wake: Any, record: Any = None
    ) -> None:
        super().__init__(address, count, wake, record)
        self.sanitizer = sanitizer
        layout, cluster = sanitizer.layout, sanitizer.actor.cluster
        warps = layout.ctas * layout.warps
        self._frontiers = [layout.empty(), layout.empty()]
        self._by_warp = np.zeros((4 + ROLES, warps), np.int32)
        self._by_warp[1] = self._by_warp[4:] = -1
        self.agent = cluster.barrier_agent(address)
        self.base = cluster.clock_base.get(self.agent, 0)
        rows = (self._by_warp[row].ctypes.data for row in range(5))
        frontiers = (frontier.ctypes.data for frontier in self._frontiers)
        self.shared = BarrierRecord(*frontiers, *rows, self.agent, self.base)
        self.record.watch = ctypes.addressof(self.shared)
        self.initialised: tuple[int, int] = (0, 0)
        self._roles: dict[int, set[int]] = {}
        sanitizer.barrier_begins(self)

    fenced, skipped, signalled = map(_shared, ("fenced", "skipped", "signalled"))

    @property
    def gathering(self) -> np.ndarray:
        return self._frontiers[self.shared.completed & 1]

    @property
    def released(self) -> np.ndarray | None:
        return self._frontiers[~self.shared.completed & 1] if self.shared.completed else None

    @property
    def observed(self) -> np.ndarray:
        return self._by_warp[0]

    @property
    def last_waits(self) -> np.ndarray:
        return self._by_warp[1]

    @property
    def arrivals(self) -> np.ndarray:
        return self._by_warp[2]

    @property
    def usual(self) -> np.ndarray:
        return self._by_warp[3]

    @property
    def roles(self) -> dict[int, set[int]]:
        warps = self._by_warp.shape[1]
        for warp, indices in enumerate(self._by_warp[4:].reshape(warps, ROLES).tolist()):
            for index in indices:
                if index >= 0:
                    self._roles.setdefault(index, set()).add(warp)
        return self._roles

    @property
    def clock(self) -> int:
        """Clock of copies that signal the current phase."""
        return self.base + self.phase + 1

    def initialise(self, warp: int, clock: int) -> None:
        """mbarrier.init by a warp at its generic clock."""
        self.initialised = self.shared.warp, self.shared.clock = warp, clock

    def arrive(self, count: int = 1) -> int:
        actor = self.sanitizer.actor
        self.sanitizer.arrives(self)
        warp, index = actor.number, actor.instruction.index
        self.arrivals[warp] += count
        self._roles.setdefault(index, set()).add(warp)
        return super().arrive(count)

    def expect_tx(self, nbytes: int) -> None:
        if nbytes < 0:
            self.signalled = True
            self.sanitizer.signals(self)
        super().expect_tx(nbytes)

    def _completed(self) -> None:
        warp = self.sanitizer.actor.cluster.by_number[0].record
        callable_of(complete_phase)(ctypes.addressof(warp), ctypes.addressof(self.record))
        super()._completed()
        self.sanitizer.completed(self)

    def compare_arrivals(self) -> None:
        """Other warps arrived in the phase just completed than in the first: report it.

        Reports tell of the phase that the arrivals belong to.
        """
        record = self.record
        after = record.phase, record.pending
        record.phase, record.pending = record.phase - 1, 0
        try:
            self.sanitizer.unbalanced(self)
        finally:
            record.phase, record.pending = after
