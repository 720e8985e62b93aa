"""The barriers of a dynamic scheduler, which are no edges of a kernel, proved as those are.

`schedulers.clc` and `schedulers.counter` hand out tiles through a ring of slots in the shared
memory of each CTA.  A slot has a barrier `full` in each CTA and, in the leader, `empty` and
`wanted`.  What the warps do with them is the same for every kernel: `check_ring` runs it and
refuses a ring that hangs, whose phases somebody may mistake (`drain.check_phases`), or in which a
slot is written that has not been read.  Warps of a CTA that only read do all the same: one stands
for all of them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from fa4_hd256.kernels.proof.drain import Stage, check_phases
from fa4_hd256.kernels.proof.programs import CTAS, LEADER

#: Requests of a run: none, as many as there are slots, and several turns of the ring.
REQUESTS = range(9)

#: A warp: what it is, and its CTA.
Warp = tuple[str, int]
#: A barrier of a slot: its name and its CTA.
Place = tuple[str, int]
SCHEDULER, WANTS, HARDWARE = ("scheduler", LEADER), ("load", LEADER), ("hardware", LEADER)


class RingOperation(NamedTuple):
    """verb: "wait", "arrive", "write" or "read".  place: the barrier, or the slots of a CTA.
    number: of the request."""

    verb: str
    place: Place
    number: int


def programs(stages: int, requests: int) -> dict[Warp, list[RingOperation]]:
    """Return what the warps do for so many requests, in their order.

    The scheduler's warp waits until the tile is wanted and the slot is free, arms the barriers of
    all CTAs and sends the request, which the hardware answers in each of them.  Then it reads the
    answer like every other warp.
    """

    def reads(cta: int, number: int) -> list[RingOperation]:
        return [
            RingOperation("wait", ("full", cta), number),
            RingOperation("read", ("slot", cta), number),
            RingOperation("arrive", ("empty", LEADER), number),
        ]

    found: dict[Warp, list[RingOperation]] = {SCHEDULER: [], HARDWARE: [], WANTS: []}
    found |= {("reader", cta): [] for cta in CTAS}
    for n in range(requests):
        full = [("full", cta) for cta in CTAS]
        found[SCHEDULER] += [
            RingOperation("wait", ("wanted", LEADER), n),
            RingOperation("wait", ("empty", LEADER), n - stages),
            *(RingOperation("arrive", place, n) for place in full),
            RingOperation("arrive", ("request", LEADER), n),
            *reads(LEADER, n),
        ]
        found[HARDWARE] += [
            RingOperation("wait", ("request", LEADER), n),
            *(RingOperation("write", ("slot", cta), n) for cta in CTAS),
            *(RingOperation("arrive", place, n) for place in full),
        ]
        found[WANTS] += [RingOperation("arrive", ("wanted", LEADER), n), *reads(LEADER, n)]
        for cta in CTAS:
            found["reader", cta] += reads(cta, n)
    first = max(0, requests - stages)
    found[SCHEDULER] += [
        RingOperation("wait", ("empty", LEADER), n) for n in range(first, requests)
    ]
    return found


@dataclass
class RingRun:
    """One run of all warps, which is every run: `drain` NOTE [one run is all runs]."""

    stages: int
    programs: dict[Warp, list[RingOperation]]
    events: list[tuple[Warp, RingOperation]] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    barriers: dict[tuple[Place, int], Stage] = field(default_factory=dict)
    last: dict[Warp, int | None] = field(default_factory=dict)
    #: Of each slot: the event that wrote it, and those that have read it since.
    written: dict[tuple[int, int], int] = field(default_factory=dict)
    read: dict[tuple[int, int], list[int]] = field(default_factory=lambda: defaultdict(list))

    def check(self) -> None:
        """Run to the end.  Raise ValueError for what cannot work."""
        self.last = dict.fromkeys(self.programs)
        following, moves = dict.fromkeys(self.programs, 0), True
        while moves:
            moves = False
            for warp, program in self.programs.items():
                while following[warp] < len(program) and self._execute(
                    warp, program[following[warp]]
                ):
                    following[warp] += 1
                    moves = True
        stuck = [w for w, program in self.programs.items() if following[w] < len(program)]
        if stuck:
            waiting = (f"{w[0]} of CTA {w[1]}: {self.programs[w][following[w]]}" for w in stuck)
            raise ValueError(f"the scheduler's ring hangs: {'; '.join(waiting)}")
        for (place, index), stage in self.barriers.items():
            # The hardware answers each request; it is asked by no barrier.
            if place[0] != "request":
                check_phases(f"{place[0]} (slot {index})", stage, self._precedes, self._said)

    def _execute(self, warp: Warp, operation: RingOperation) -> bool:
        verb, place, number = operation
        phase, index = divmod(number, self.stages)
        if verb in ("write", "read"):
            self._use(warp, operation, (place[1], index))
            return True
        stage = self.barriers.setdefault((place, index), Stage(self._arrivers(place)))
        last = self.last[warp]
        if verb == "arrive":
            # It lands some time later: what follows in the warp need not come after it.
            stage.arrivals[warp].append(self._event(warp, operation, last))
            return True
        if phase >= 0 and not stage.complete(phase):
            return False
        event = self._event(warp, operation, last, *stage.of_phase(phase))
        stage.waits.append((event, last, phase))
        self.last[warp] = event
        return True

    def _arrivers(self, place: Place) -> tuple[Warp, ...]:
        """Return the warps that a barrier counts."""
        return tuple(
            warp
            for warp, program in programs(self.stages, 1).items()
            if any(o.verb == "arrive" and o.place == place for o in program)
        )

    def _use(self, warp: Warp, operation: RingOperation, slot: tuple[int, int]) -> None:
        event = self.last[warp] = self._event(warp, operation, self.last[warp])
        if operation.verb == "read":
            if slot not in self.written or not self._precedes(self.written[slot], event):
                raise ValueError(f"{self._said(event)}, which may not have been written")
            self.read[slot].append(event)
            return
        for reader in self.read.pop(slot, ()):
            if not self._precedes(reader, event):
                raise ValueError(f"{self._said(event)}, before this: {self._said(reader)}")
        self.written[slot] = event

    def _event(self, warp: Warp, operation: RingOperation, *causes: int | None) -> int:
        before = 0
        for cause in causes:
            if cause is not None:
                before |= self.before[cause] | 1 << cause
        self.events.append((warp, operation))
        self.before.append(before)
        return len(self.events) - 1

    def _precedes(self, first: int, second: int) -> bool:
        return first == second or bool(self.before[second] >> first & 1)

    def _said(self, event: int) -> str:
        (name, cta), (verb, place, number) = self.events[event]
        return f"{name} of CTA {cta}: {verb} {place[0]} of CTA {place[1]}, request {number}"


def check_ring(stages: int) -> None:
    """Raise ValueError for a ring of so many slots that cannot work."""
    for requests in REQUESTS:
        RingRun(stages, programs(stages, requests)).check()
