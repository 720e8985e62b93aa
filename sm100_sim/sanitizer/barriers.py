"""mbarriers that carry what their arrivals publish."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from sm100_sim.barriers import MBarrier

if TYPE_CHECKING:
    from .sanitizer import Sanitizer


class WatchedBarrier(MBarrier):
    """An mbarrier with the frontiers of its phases.

    gathering: what the arrivals of the current phase publish. released: what those of the last
    complete phase did. observed: warp -> count of its waits, of successful waits for the last
    complete phase. initialised: (warp, generic clock) of the init; fenced: whether a fence made it
    visible to other CTAs and to the async proxy. skipped: an arrive came before any wait for the
    phase before, and was reported. last_waits: warp -> phase last waited for.
    arrivals: of the current phase by the warp that issued them; usual: those of the first phase.
    signalled: bytes of a copy have arrived in the current phase. roles: index of an instruction ->
    the warps that have arrived by it, in any phase.
    """

    __slots__ = (
        "sanitizer", "gathering", "released", "observed", "base", "agent", "initialised", "fenced",
        "skipped", "last_waits", "arrivals", "usual", "signalled",
        "roles",
    )  # fmt: skip

    def __init__(self, sanitizer: Sanitizer, address: int, count: int, wake: Any) -> None:
        super().__init__(address, count, wake)
        self.sanitizer = sanitizer
        self.gathering = sanitizer.layout.empty()
        self.released: np.ndarray | None = None
        self.observed: dict[int, int] = {}
        cluster = sanitizer.actor.cluster
        self.agent = cluster.barrier_agent(address)
        self.base = cluster.clock_base.get(self.agent, 0)
        self.fenced = False
        self.initialised: tuple[int, int] = (0, 0)
        self.skipped = self.signalled = False
        self.arrivals: Counter[Any] = Counter()
        self.usual: Counter[Any] | None = None
        self.roles: dict[int, set[Any]] = {}
        self.last_waits: dict[int, int] = {}
        sanitizer.barrier_begins(self)

    @property
    def clock(self) -> int:
        """Clock of copies that signal the current phase."""
        return self.base + self.phase + 1

    def arrive(self, count: int = 1) -> int:
        actor = self.sanitizer.actor
        self.sanitizer.arrives(self)
        self.arrivals[actor.warp] += count
        self.roles.setdefault(actor.instruction.index, set()).add(actor.warp)
        return super().arrive(count)

    def expect_tx(self, nbytes: int) -> None:
        if nbytes < 0:
            self.signalled = True
            self.sanitizer.signals(self)
        super().expect_tx(nbytes)

    def _complete_phase(self) -> None:
        if self.usual is None:
            self.usual = self.arrivals
        elif self.arrivals != self.usual:
            self.sanitizer.unbalanced(self)
        self.arrivals, self.signalled = Counter(), False
        self.released, self.gathering = self.gathering, self.sanitizer.layout.empty()
        self.observed = {}
        super()._complete_phase()
        self.sanitizer.completed(self)
