"""Vector clocks of one cluster: who has seen which accesses complete.

A frontier is an int32 vector. Entry `agent` is the largest clock of that agent whose accesses are
known to be complete. Every warp has seven agents: its ordinary (generic proxy) accesses, its
tcgen05.ld, its tcgen05.st, the MMAs it issues, the bulk stores it issues, its successful waits
(these spread with every arrive, relaxed ones included, because they only tell what was executed)
and its cp.async.
Every mbarrier has one: the copies that signal it, clock = phases begun. The last part of the
vector, one entry a warp, tells which generic accesses a fence.proxy.async has made visible to
asynchronous agents.

Frontiers are merged by maximum: an arrive publishes the frontier of the thread (or of the
completing operation) to the barrier, a successful wait takes in what was published in the phase.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

GENERIC, LOAD, STORE, MMA, BULK, WAIT, COPY = range(7)
AGENTS_OF_A_WARP = 7
#: mbarriers of one CTA that can be told apart; a CTA with more is refused.
BARRIERS_OF_A_CTA = 128


@dataclass(frozen=True)
class Layout:
    """Layout of a frontier. ctas: of the cluster; warps: of a CTA."""

    ctas: int
    warps: int

    @property
    def agents(self) -> int:
        """Entries that are clocks of agents."""
        return self.barrier_base + self.ctas * BARRIERS_OF_A_CTA

    @property
    def barrier_base(self) -> int:
        """First agent that belongs to an mbarrier."""
        return self.ctas * self.warps * AGENTS_OF_A_WARP

    @property
    def size(self) -> int:
        """Length of a frontier."""
        return self.agents + self.ctas * self.warps

    def empty(self) -> np.ndarray:
        """A frontier that knows nothing."""
        return np.zeros(self.size, np.int32)

    def generic(self) -> slice:
        """Entries of all warps' generic accesses."""
        return slice(GENERIC, self.barrier_base, AGENTS_OF_A_WARP)

    def generic_of(self, rank: int) -> slice:
        """Entries of the generic accesses of one CTA's warps."""
        first = rank * self.warps * AGENTS_OF_A_WARP
        return slice(first, first + self.warps * AGENTS_OF_A_WARP, AGENTS_OF_A_WARP)

    def proxy(self) -> slice:
        """Entries of the generic accesses that asynchronous agents may see."""
        return slice(self.agents, self.size)

    def tensor(self) -> np.ndarray:
        """Indices of the agents that a tcgen05.fence orders: tcgen05 loads, stores and MMAs."""
        base = np.arange(0, self.barrier_base, AGENTS_OF_A_WARP)
        return np.sort(np.concatenate([base + LOAD, base + STORE, base + MMA]))
