"""Sanitizer's state of the warps and clusters of a launch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np

from sm100_sim.native.calling import callable_of
from sm100_sim.native.language import Native

from . import clocks
from .clocks import AGENTS_OF_A_WARP, BULK, COPY, GENERIC, LOAD, MMA, STORE, WAIT, Layout
from .compiled import frontiers
from .compiled.records import ClusterRecord, CtaRecord, WarpRecord
from .memory.shadow import Access, AccessTable, Shadow
from .rules import Rules


class Round:
    """One round of a named or cluster barrier: what those who arrive publish."""

    __slots__ = ("frontier",)

    def __init__(self, layout: Layout) -> None:
        self.frontier = layout.empty()


class Loads:
    """The tcgen05.ld in flight of a warp, oldest first: (clock, number of the instruction)."""

    def __init__(self, record: WarpRecord) -> None:
        self._record = record
        self._resize(256)

    def _resize(self, room: int) -> None:
        left = list(self) if self._record.load_room else []
        self._pairs = np.zeros((room, 2), np.int32)
        self._pairs[: len(left)] = np.array(left, np.int32).reshape(-1, 2)
        self._record.loads, self._record.load_room = self._pairs.ctypes.data, room
        self._record.load_first, self._record.load_end = 0, len(left)

    def __len__(self) -> int:
        return self._record.load_end - self._record.load_first

    def __getitem__(self, place: int) -> tuple[int, int]:
        end = self._record.load_end if place < 0 else self._record.load_first
        clock, number = self._pairs[end + place].tolist()
        return clock, number

    def make_room(self) -> None:
        """Let native code note one more."""
        if self._record.load_end == self._record.load_room:
            self._resize(2 * len(self) + 64)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return (self[place] for place in range(len(self)))


def _recorded(name: str) -> property:
    """An attribute that native code shares."""
    return property(
        lambda self: getattr(self.record, name),
        lambda self, value: setattr(self.record, name, value),
    )


class WarpState:
    """Frontier of a warp and what it has in flight.

    frontier: what the warp has seen complete. clock: of its generic accesses, also
    `frontier[generic]`; it grows whenever something is published. published: what a relaxed arrive
    publishes: what the last fences covered. ordered: the frontier at the last
    tcgen05.fence::after_thread_sync (strict reading only). joining: round of a barrier whose result
    is taken in before the warp does anything else. loads: (clock, number of the instruction) of
    tcgen05.ld in flight. uses: flags that native code sets when loaded data are used. recorded:
    MMAs of the open chain already recorded. groups: by agent, BULK, MMA (wgmma) or COPY (cp.async),
    the clock of the last operation of each committed group. copies: accesses of cp.async in flight;
    tracked: clock of the last one that an mbarrier tracks. unfenced: generic accesses were made
    since the last fence.proxy.async. record: what native code shares, with a mask of the ranks of
    CTAs known to have started. flags_read: addresses of relaxed reads since the last fence.
    """

    def __init__(self, sanitizer: Rules, warp: Any, number: int, cluster: ClusterState) -> None:
        layout = sanitizer.layout
        self.warp, self.number, self.cluster = warp, number, cluster
        self.sanitizer = sanitizer
        base = AGENTS_OF_A_WARP * number
        self.generic, self.load, self.store = base + GENERIC, base + LOAD, base + STORE
        self.mma, self.bulk, self.wait = base + MMA, base + BULK, base + WAIT
        self.copy = base + COPY
        self.frontier, self.published = layout.empty(), layout.empty()
        self.record = WarpRecord(
            frontier=self.frontier.ctypes.data,
            published=self.published.ctypes.data,
            number=number,
            rank=warp.cta.rank,
            clock=1,
            met=1 << warp.cta.rank,
            cluster=cluster.address,
        )
        self.frontier[self.generic] = 1
        self.ordered = layout.empty()
        self.instruction: Any = None
        self.relaxed = False
        self.narrow = False
        self._joining: Round | None = None
        self.loads = Loads(self.record)
        self.uses = np.zeros(max(sanitizer.load_count, 1), np.uint8)
        self.issued = self.record.issued
        self.groups: dict[int, list[int]] = {BULK: [], MMA: [], COPY: []}
        self.copies: list[Access] = []
        self.tracked = 0
        self.flags_read: set[int] = set()
        self.unfenced_inits: list[Any] = []
        self.generation = 0

    def entry(self, agent: int) -> int:
        """Return the index of an asynchronous agent of this warp in frontiers."""
        return AGENTS_OF_A_WARP * self.number + agent

    clock, recorded, unfenced = map(_recorded, ("clock", "recorded", "unfenced"))

    @property
    def joining(self) -> Round | None:
        return self._joining if self.record.joining else None

    @joining.setter
    def joining(self, joined: Round | None) -> None:
        self._joining = joined
        self.record.joining = 0 if joined is None else joined.frontier.ctypes.data

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
        self._call(frontiers.advance)

    def take(self, frontier: np.ndarray | None) -> None:
        """Learn what somebody published."""
        if frontier is not None:
            self._call(frontiers.learn, frontier.ctypes.data)

    def offer(self, target: np.ndarray) -> None:
        """Publish to `target`, as an arrive does."""
        self.sanitizer.offering(self)
        if self.relaxed:
            self._call(frontiers.publish_fenced, target.ctypes.data)
            return
        entries = [self.load, self.store]
        known = target[entries]
        self._call(frontiers.publish, target.ctypes.data)
        if self.sanitizer.strict:
            # Only a fence::before_thread_sync lets others know of accesses to tensor memory.
            target[entries] = np.maximum(known, self.published[entries])

    def for_tensor(self) -> np.ndarray:
        """Return the frontier of this warp for its accesses to tensor memory.

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

    def fence_shared(self) -> None:
        """fence.release.sync_restrict::shared::cta: the same for accesses to shared memory."""
        self._call(frontiers.fence_shared)

    def fence_tensor(self) -> None:
        """tcgen05.fence::before_thread_sync: the same for accesses to tensor memory."""
        self._call(frontiers.fence_tensor)

    def fence_proxy(self) -> None:
        """fence.proxy.async: generic accesses known here become visible to async agents."""
        self._call(frontiers.fence_proxy)

    def has_used(self, clock: int) -> bool:
        """Return True if the data of all loads in flight up to `clock` have been used."""
        return all(self.uses[number] for issued, number in self.loads if issued <= clock)

    def track_copies(self) -> None:
        """An mbarrier tracks cp.async of this warp, which are its writes at this time for who waits
        for that phase; those that an earlier one tracks are complete with that."""
        for access in reversed(self.copies):
            if access.clock <= self.tracked:
                break
            access.reissue(self.clock)
        self.tracked = self.issued[COPY]

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
        if everything or not self.sanitizer.strict:
            record = ctypes.addressof(self.record)
            context = ctypes.addressof(self.warp.context)
            callable_of(frontiers.finish_loads)(context, record, everything)

    def _call(self, routine: Native, *arguments: int) -> None:
        """A native routine on the record of this warp."""
        callable_of(routine)(ctypes.addressof(self.record), *arguments)


class CtaState:
    """Shadow memories of a CTA, and who has accessed it from elsewhere.

    guests: accesses of asynchronous agents or of other CTAs; all must be complete when the CTA
    exits. last: merged frontiers of its warps that have exited.
    """

    def __init__(self, sanitizer: Rules, cta: Any, accesses: AccessTable) -> None:
        self.cta = cta
        where = f"of CTA {cta.ctaid}"
        about = sanitizer.judge, accesses, sanitizer.layout, sanitizer.in_order
        self.smem = Shadow((cta.smem.size // 16, 4), f"shared memory {where}", *about)
        self.tmem = Shadow((cta.tmem.columns, 8), f"tensor memory {where}", *about)
        self.flat = self.smem.plane.reshape(-1)
        self._accesses = accesses
        self._guests = np.zeros(sanitizer.layout.agents + 1, np.int32)
        self.record = CtaRecord(
            smem=self.smem.address, tmem=self.tmem.address, guests=self._guests.ctypes.data
        )
        self.last = sanitizer.layout.empty()
        self.barrier_agents: dict[int, int] = {}
        self.named: dict[int, Round] = {}

    def visit(self, access: Access) -> None:
        """Note an access that must be complete before the CTA exits."""
        self._guests[access.agent] = self._accesses.add(access)

    @property
    def guests(self) -> list[Access]:
        """The latest access of each agent that has accessed the CTA from elsewhere."""
        return [self._accesses[number] for number in self._guests[self._guests > 0].tolist()]


class ClusterState:
    """State of the sanitizer for one cluster.

    number: of the cluster in the grid. rounds: of its hardware barrier. foreign: cluster number ->
    what its warps have learned of that cluster through global memory.
    """

    def __init__(self, sanitizer: Rules, cluster: Any) -> None:
        self.cluster = cluster
        self.number: int = cluster.id
        self.foreign: dict[int, np.ndarray] = {}
        self.accesses = AccessTable(self._issuer)
        self.ctas = [CtaState(sanitizer, cta, self.accesses) for cta in cluster.ctas]
        self.rounds: dict[int, Round] = {}
        self._sanitizer, layout = sanitizer, sanitizer.layout
        self._cta_records = (CtaRecord * len(self.ctas))(*(cta.record for cta in self.ctas))
        self.record = ClusterRecord(
            memory=cluster.smem.ctypes.data,
            row=cluster.smem.strides[0],
            bytes=cluster.smem.nbytes,
            ctas=ctypes.addressof(self._cta_records),
            accesses=self.accesses.buffer.address,
            ordered=sanitizer.ordered.ctypes.data,
            writes=sanitizer.writes.address,
            warps=layout.ctas * layout.warps,
            agents=layout.agents,
            size=layout.size,
            number=self.number,
        )
        self.address = ctypes.addressof(self.record)
        count = len(cluster.ctas[0].warps)
        self.warps = {
            warp: WarpState(sanitizer, warp, cta.rank * count + warp.index, self)
            for cta in cluster.ctas
            for warp in cta.warps
        }
        self.by_number = list(self.warps.values())
        self.clock_base: dict[int, int] = {}

    def _issuer(self, number: int, index: int) -> tuple[Any, int, Any]:
        warp = self.by_number[number].warp
        return warp.cta.ctaid, warp.index, self._sanitizer.machine.compiled.instructions[index]

    def barrier_agent(self, address: int) -> int:
        """Agent of the copies that signal the mbarrier at a shared address."""
        rank, offset = address >> 24, address & 0xFFFFFF
        agents = self.ctas[rank].barrier_agents
        found = agents.get(offset)
        if found is None:
            sanitizer, slot = self._sanitizer, len(agents)
            if slot == clocks.BARRIERS_OF_A_CTA:
                raise sanitizer.refuse(slot)
            base = sanitizer.layout.barrier_base + rank * clocks.BARRIERS_OF_A_CTA
            found = agents[offset] = base + slot
        return found
