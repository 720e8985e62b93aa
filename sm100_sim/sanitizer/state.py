"""What the sanitizer knows of the warps and clusters of a launch."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from . import clocks
from .clocks import AGENTS_OF_A_WARP, BULK, COPY, GENERIC, LOAD, MMA, STORE, WAIT, Layout
from .shadow import Access, AccessTable, Shadow

if TYPE_CHECKING:
    from .sanitizer import Sanitizer


class Round:
    """One round of a named or cluster barrier: what those who arrive publish."""

    __slots__ = ("frontier",)

    def __init__(self, layout: Layout) -> None:
        self.frontier = layout.empty()


class WarpState:
    """Frontier of a warp and what it has in flight.

    frontier: what the warp has seen complete. clock: of its generic accesses, also
    `frontier[generic]`; it grows whenever something is published. published: what a relaxed arrive
    publishes: what the last fences covered. ordered: the frontier at the last
    tcgen05.fence::after_thread_sync (strict reading only). joining: round of a barrier whose result
    is taken in before the warp does anything else. loads: (clock, number of the instruction) of
    tcgen05.ld in flight. uses: flags that native code sets when loaded data are used. recorded:
    MMAs of the open chain already recorded. groups: clocks of the last bulk store of each committed
    group. copies, copy_groups: the same of cp.async, with its accesses in flight. unfenced: generic
    accesses were made since the last fence.proxy.async. met: ranks of CTAs known to have started.
    flags_read: addresses of relaxed reads since the last fence.
    """

    def __init__(self, sanitizer: Sanitizer, warp: Any, number: int, cluster: ClusterState) -> None:
        layout = sanitizer.layout
        self.warp, self.number, self.cluster = warp, number, cluster
        self.sanitizer = sanitizer
        base = AGENTS_OF_A_WARP * number
        self.generic, self.load, self.store = base + GENERIC, base + LOAD, base + STORE
        self.mma, self.bulk, self.wait = base + MMA, base + BULK, base + WAIT
        self.copy = base + COPY
        self.frontier = layout.empty()
        self.clock = 1
        self.frontier[self.generic] = 1
        self.published = layout.empty()
        self.ordered = layout.empty()
        self.instruction: Any = None
        self.unfenced = False
        self.relaxed = False
        self.narrow = False
        self.joining: Round | None = None
        self.loads: deque[tuple[int, int]] = deque()
        self.uses = np.zeros(max(sanitizer.load_count, 1), np.uint8)
        self.issued = {LOAD: 0, STORE: 0, MMA: 0, BULK: 0, COPY: 0}
        self.recorded = 0
        self.groups: list[int] = []
        self.copies: list[Access] = []
        self.copy_groups: list[int] = []
        self.met: set[int] = set()
        self.flags_read: set[int] = set()
        self.unfenced_inits: list[Any] = []
        self.generation = 0

    def access(self, kind: str, write: bool) -> Access:
        """A generic access of this warp now."""
        self.unfenced = True
        return Access(self, self.generic, self.clock, kind, write)

    def asynchronous(self, which: int, kind: str, write: bool) -> Access:
        """The next access of the warp's agent `which`."""
        self.issued[which] += 1
        agent = AGENTS_OF_A_WARP * self.number + which
        return Access(self, agent, self.issued[which], kind, write)

    def advance(self) -> None:
        """Later accesses are not covered by what has been published."""
        self.clock += 1
        self.frontier[self.generic] = self.clock

    def take(self, frontier: np.ndarray | None) -> None:
        """Learn what somebody published."""
        if frontier is not None:
            np.maximum(self.frontier, frontier, out=self.frontier)

    def offer(self, target: np.ndarray) -> None:
        """Publish to `target`, as an arrive does."""
        self.sanitizer.offering(self)
        if not self.relaxed:
            known = target[[self.load, self.store]]
            np.maximum(target, self.frontier, out=target)
            if self.sanitizer.strict:
                # Only a fence::before_thread_sync lets others know of accesses to tensor memory.
                entries = [self.load, self.store]
                target[entries] = np.maximum(known, self.published[entries])
            return
        np.maximum(target, self.published, out=target)
        waits = self.sanitizer.layout.waits()
        np.maximum(target[waits], self.frontier[waits], out=target[waits])

    def for_tensor(self) -> np.ndarray:
        """What this warp knows for its accesses to tensor memory.

        Strictly, what it has learned from others counts from the next fence::after_thread_sync on.
        """
        if not self.sanitizer.strict:
            return self.frontier
        frontier, entries = self.frontier.copy(), self.sanitizer.tensor_entries
        frontier[entries] = self.ordered[entries]
        frontier[[self.load, self.store]] = self.frontier[[self.load, self.store]]
        return frontier

    def fence(self) -> None:
        """A fence that makes everything before it part of a later relaxed arrive."""
        np.maximum(self.published, self.frontier, out=self.published)
        self.advance()

    def fence_tensor(self) -> None:
        """tcgen05.fence::before_thread_sync: the same for accesses to tensor memory."""
        entries = self.sanitizer.tensor_entries
        self.published[entries] = np.maximum(self.published[entries], self.frontier[entries])

    def fence_proxy(self) -> None:
        """fence.proxy.async: generic accesses known here become visible to async agents."""
        layout = self.sanitizer.layout
        self.frontier[layout.proxy()] = self.frontier[layout.generic()]
        self.unfenced = False
        self.advance()

    def has_used(self, clock: int) -> bool:
        """Whether the data of all loads in flight up to `clock` have been used."""
        return all(self.uses[number] for issued, number in self.loads if issued <= clock)

    def finish_copies(self, clock: int) -> None:
        """cp.async up to a clock are complete, which makes them writes of this warp at this time:
        it takes a later fence.proxy.async to show them to asynchronous agents."""
        self.frontier[self.copy] = max(int(self.frontier[self.copy]), clock)
        for access in self.copies:
            if access.clock <= clock:
                access.reissue(self.clock)
        self.copies = [access for access in self.copies if access.clock > clock]

    def finish_loads(self, everything: bool) -> None:
        """Loads are complete when waited for, or when their data have been used."""
        loads, uses = self.loads, self.uses
        while loads and (everything or uses[loads[0][1]] and not self.sanitizer.strict):
            self.frontier[self.load] = loads.popleft()[0]


class CtaState:
    """Shadow memories of a CTA, and who has accessed it from elsewhere.

    guests: agent -> latest access of an asynchronous agent or of another CTA; all must be complete
    when the CTA exits. last: merged frontiers of its warps that have exited.
    """

    def __init__(self, sanitizer: Sanitizer, cta: Any, accesses: AccessTable) -> None:
        self.cta = cta
        where = f"of CTA {cta.ctaid}"
        about = sanitizer.judge, accesses, sanitizer.layout, sanitizer.in_order
        self.smem = Shadow((cta.smem.size // 16, 4), f"shared memory {where}", *about)
        self.tmem = Shadow((512, 8), f"tensor memory {where}", *about)
        self.flat = self.smem.plane.reshape(-1)
        self.guests: dict[int, Access] = {}
        self.last = sanitizer.layout.empty()
        self.barrier_agents: dict[int, int] = {}
        self.named: dict[int, Round] = {}

    def visit(self, access: Access) -> None:
        """Note an access that must be complete before the CTA exits."""
        self.guests[access.agent] = access


class ClusterState:
    """State of the sanitizer for one cluster.

    number: of the cluster in the grid. rounds: of its hardware barrier. foreign: cluster number ->
    what its warps have learned of that cluster through global memory.
    """

    def __init__(self, sanitizer: Sanitizer, cluster: Any) -> None:
        self.cluster = cluster
        self.number: int = cluster.id
        self.foreign: dict[int, np.ndarray] = {}
        self.accesses = AccessTable()
        self.ctas = [CtaState(sanitizer, cta, self.accesses) for cta in cluster.ctas]
        self.rounds: dict[int, Round] = {}
        count = len(cluster.ctas[0].warps)
        self.warps = {
            warp: WarpState(sanitizer, warp, cta.rank * count + warp.index, self)
            for cta in cluster.ctas
            for warp in cta.warps
        }
        self.clock_base: dict[int, int] = {}

    def barrier_agent(self, address: int) -> int:
        """Agent of the copies that signal the mbarrier at a shared address."""
        rank, offset = address >> 24, address & 0xFFFFFF
        agents = self.ctas[rank].barrier_agents
        found = agents.get(offset)
        if found is None:
            sanitizer = next(iter(self.warps.values())).sanitizer
            slot = len(agents)
            if slot == clocks.BARRIERS_OF_A_CTA:
                raise sanitizer.refuse(slot)
            base = sanitizer.layout.barrier_base + rank * clocks.BARRIERS_OF_A_CTA
            found = agents[offset] = base + slot
        return found
