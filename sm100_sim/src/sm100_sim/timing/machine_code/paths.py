"""The path of a warp through the SASS, found from the events of a simulated run.

A simulated run executes PTX; what is replayed is SASS. The two agree in the order of the warp's
synchronisation and asynchronous instructions, so the run's sequence of these (the *events*) picks
a path through the control-flow graph: between two events, a way from the one site to the next that
passes no other site. The one exception known: ptxas moves a store to tensor memory up over an
arrival in front of it. Where several ways pass the same events, the one whose mix of arithmetic is
closest to what the warp executed in the PTX is taken (`mixes`). What does not fit is counted:
events without a site, sites without an event, and choices that the mixes do not decide.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sm100_sim.isa.columns import Event as PtxEvent

from .events import is_soft, retries, sites
from .mixes import FEATURES, Feature, apart, sass_prefix
from .sass import SassFunction

ENTRY, END = -1, -2
#: Ways between two sites that are weighed, the shortest ones.
_WAYS = 6
#: Price of an event without a site or a site without an event, and of two events exchanged.
_SKIP, _SOFT_SKIP, _EXCHANGE = 60.0, 1.0, 1.0
#: States kept: those at most this much worse than the best, and no more than so many.
_SLACK, _STATES = 250.0, 24
#: Sites in a row that may be passed without an event.
_PASSED = 40
#: Two ways whose prices differ by less are not told apart.
_DECIDED = 1.0
#: Least part of the mix that a round of a loop without sites must explain.
_NOTICEABLE = 2.0


@dataclass(frozen=True)
class Event:
    """One event of a warp: kind (`events`), the run's entry, mix of the PTX since the last one, and
    how often the PTX block was run since then that was run most often."""

    kind: str
    entry: Any
    mix: np.ndarray
    repeats: int = 1


@dataclass
class WarpPath:
    """The SASS instructions a warp executes, in order.

    numbers: int32, instruction numbers in the function. event_of: int32 of the same length, the
    index of the event an instruction stands for, -1 for all others. missing_events, extra_sites:
    events without a site and sites passed without an event, by kind (soft kinds too).
    ambiguous: choices between ways that neither events nor mixes decide.
    """

    numbers: np.ndarray
    event_of: np.ndarray
    missing_events: dict[str, int] = field(default_factory=dict)
    extra_sites: dict[str, int] = field(default_factory=dict)
    ambiguous: int = 0

    @property
    def unmatched(self) -> int:
        """Events and sites of hard kinds without a counterpart."""
        counted = (*self.missing_events.items(), *self.extra_sites.items())
        return sum(count for kind, count in counted if not is_soft(kind))


@dataclass(frozen=True)
class _Cycle:
    """A loop without a site on a way: before the range `place` its `ranges` can be gone round."""

    place: int
    ranges: tuple[tuple[int, int], ...]
    mix: np.ndarray

    def rounds(self, drift: np.ndarray, most: int) -> int:
        """Rounds, at most `most`, that bring the mix closest to `drift`, what the way lacks."""
        counted = self.mix > 0
        if not counted.any():
            return 0
        exact = np.clip(drift[counted] / self.mix[counted], 0, most)
        rounded = np.concatenate([np.floor(exact), np.ceil(exact)]).astype(int)
        candidates = {0, *rounded.tolist()}
        left = {n: apart(drift - n * self.mix) for n in sorted(candidates)}
        best = min(left, key=left.__getitem__)
        return best if left[0] - left[best] >= _NOTICEABLE else 0


@dataclass(frozen=True)
class _Way:
    """Way from behind a site to `site`: ranges of instructions passed, and their mix."""

    site: int
    ranges: tuple[tuple[int, int], ...]
    mix: np.ndarray
    length: int
    cycles: tuple[_Cycle, ...] = ()

    def repeated(self, drift: np.ndarray, most: int) -> _Way:
        """The way with as many rounds of its cycles as the missing mix requires."""
        ranges, mix, inserted = list(self.ranges), self.mix, 0
        for cycle in self.cycles:
            rounds = cycle.rounds(drift, most)
            drift = drift - rounds * cycle.mix
            mix = mix + rounds * cycle.mix
            place = cycle.place + inserted
            ranges[place:place] = cycle.ranges * rounds
            inserted += len(cycle.ranges) * rounds
        return replace(self, ranges=tuple(ranges), mix=mix, cycles=())


class _State:
    """The best way found so far to a site."""

    __slots__ = ("site", "price", "drift", "score", "before", "way", "event", "note", "tied")

    def __init__(self, site: int, price: float, drift: np.ndarray, before: _State | None) -> None:
        self.site, self.price, self.drift, self.before = site, price, drift, before
        #: Compared score: the price of everything skipped, and how far the mixes are apart.
        self.score = price + apart(drift)
        self.way: _Way | None = None
        self.event = -1
        self.note: str | None = None
        self.tied = False


class PathFinder:
    """Finds paths through one kernel.

    features: by which ways are told apart, `mixes.FEATURES` or what begins with these.
    """

    def __init__(self, function: SassFunction, features: tuple[Feature, ...] = FEATURES) -> None:
        self.function = function
        self.sites = sites(function)
        self._retries = retries(function, self.sites)
        self._prefix = sass_prefix(function, features)
        self._known: dict[int, tuple[_Way, ...]] = {}

    def find(self, events: Sequence[Event], tail: Event | None = None) -> WarpPath:
        """Return the path of a warp with these events.

        tail: what the warp executes behind the last of them. Raises ValueError if no path leads to
        an exit.
        """
        start = _State(ENTRY, 0.0, np.zeros(self._prefix.shape[1]), None)
        states = {ENTRY: start}
        before: dict[int, _State] = {}
        for number, event in enumerate(events):
            reached = self._with_passed(states)
            found = self._after_event(reached, number, event)
            if number and _exchanges(events[number - 1], event):
                self._after_exchanged(before, found, number, events)
            states, before = self._pruned(found), reached
            if not states:
                raise ValueError(
                    f"no path of {self.function.name} fits the events up to number {number}, "
                    f"{event.entry.text!r}"
                )
        ends: dict[int, _State] = {}
        for state in self._with_passed(states).values():
            for way in self._ways(state.site):
                if way.site == END:
                    self._offer(ends, self._stepped(state, way, tail))
        if not ends:
            raise ValueError(f"no exit of {self.function.name} fits the events")
        if not events and tail:
            return self._traced(self._shortest(start, tail))
        return self._traced(ends[END])

    def _shortest(self, start: _State, tail: Event) -> _State:
        """Return the end of a warp without events, over the way of fewest instructions among those
        that its mix does not tell apart: an unrolled loop, not the one for the remainder."""
        found = [self._stepped(start, way, tail) for way in self._ways(ENTRY) if way.site == END]
        least = min(state.score for state in found)
        near = [state for state in found if state.score < least + _DECIDED]
        return min(near, key=lambda state: _length(state))

    # ------------------------------------------------------------ steps of the search

    def _after_event(
        self, states: dict[int, _State], number: int, event: Event
    ) -> dict[int, _State]:
        found: dict[int, _State] = {}
        for state in states.values():
            for way in self._ways(state.site):
                if self.sites.get(way.site) == event.kind:
                    step = self._stepped(state, way, event)
                    step.event = number
                    self._offer(found, step)
            price = _SOFT_SKIP if is_soft(event.kind) else _SKIP
            stay = _State(state.site, state.price + price, state.drift + event.mix, state)
            stay.note = f"missing {event.kind}"
            self._offer(found, stay)
        return found

    def _after_exchanged(
        self,
        before: dict[int, _State],
        found: dict[int, _State],
        number: int,
        events: Sequence[Event],
    ) -> None:
        """Offer to `found` the states in which event `number` has its site in front of the one
        before it. before: the states in front of both."""
        for state in before.values():
            for way in self._ways(state.site):
                if self.sites.get(way.site) != events[number].kind:
                    continue
                first = self._stepped(state, way, events[number - 1])
                first.event = number
                first.price += _EXCHANGE
                for following in self._ways(first.site):
                    if self.sites.get(following.site) == events[number - 1].kind:
                        second = self._stepped(first, following, events[number])
                        second.event = number - 1
                        self._offer(found, second)

    def _with_passed(self, states: dict[int, _State]) -> dict[int, _State]:
        """The states, and those reached by passing sites without an event."""
        found = dict(states)
        edge = list(states.values())
        best = min(state.score for state in edge)
        for _ in range(_PASSED):
            following: dict[int, _State] = {}
            for state in edge:
                for way in self._ways(state.site):
                    kind = self.sites.get(way.site)
                    if kind is None:
                        continue
                    step = self._stepped(state, way, None)
                    step.price += _SOFT_SKIP if is_soft(kind) else _SKIP
                    step.score += _SOFT_SKIP if is_soft(kind) else _SKIP
                    step.note = f"extra {kind}"
                    known = found.get(way.site)
                    if step.score < best + _SLACK and (known is None or step.score < known.score):
                        found[way.site] = following[way.site] = step
            if not following:
                break
            edge = list(following.values())
        return found

    def _stepped(self, state: _State, way: _Way, event: Event | None) -> _State:
        # A loop is gone round only where the PTX has gone round one.
        if way.cycles and event is not None and event.repeats > 1:
            way = way.repeated(event.mix - way.mix, event.repeats)
        drift = state.drift - way.mix
        if event is not None:
            drift = drift + event.mix
        step = _State(way.site, state.price, drift, state)
        step.way = way
        return step

    @staticmethod
    def _offer(found: dict[int, _State], state: _State) -> None:
        known = found.get(state.site)
        if known is None:
            found[state.site] = state
            return
        better, worse = (known, state) if known.score <= state.score else (state, known)
        if worse.score - better.score < _DECIDED and _differ(better, worse):
            better.tied = True
        found[state.site] = better

    @staticmethod
    def _pruned(states: dict[int, _State]) -> dict[int, _State]:
        """The states worth going on from: the best ones, and the best of those that have skipped
        no more than the very best.

        A drift may pass: where ptxas has moved the arithmetic between two events in front of the
        first, the right state lacks all of it until the second. What was skipped stays skipped.
        """
        ranked = sorted(states.values(), key=lambda state: state.score)
        if not ranked:
            return {}
        best = ranked[0]
        near = [state for state in ranked if state.score <= best.score + _SLACK]
        faithful = [state for state in ranked if state.price <= best.price]
        return {state.site: state for state in (*near[:_STATES], *faithful[:_STATES])}

    # ------------------------------------------------------------ ways between sites

    def _ways(self, site: int) -> tuple[_Way, ...]:
        """Shortest ways from behind a site to the sites that can come next, and to an exit."""
        if site not in self._known:
            self._known[site] = self._search_ways(site)
        return self._known[site]

    def _search_ways(self, site: int) -> tuple[_Way, ...]:
        if site == END:
            return ()
        function = self.function
        first = site + 1
        if first >= len(function.instructions):
            return ()
        begin = 0 if site == ENTRY else first
        queue: list[tuple[int, int, int, tuple]] = [(0, 0, begin, ())]
        visits: dict[int, int] = {}
        found: dict[int, list[_Way]] = {}
        cycles: dict[int, tuple[tuple[int, int], ...]] = {}
        pushed = 0
        while queue:
            length, _, number, ranges = heapq.heappop(queue)
            block = function.blocks[function.block_of[number]]
            key = number if number != block.start else -1 - block.index
            visits[key] = visits.get(key, 0) + 1
            if visits[key] > _WAYS:
                continue
            stop = self._scan(number, block.stop, ranges, found)
            if stop is not None:
                continue
            walked = (*ranges, (number, block.stop))
            for successor in block.successors:
                target = function.blocks[successor].start
                if successor in self._retries:
                    continue
                entered = [place for place, (begin, _) in enumerate(walked) if begin == target]
                if entered:
                    cycles.setdefault(target, walked[entered[0] :])
                    continue
                pushed += 1
                entry = (length + block.stop - number, pushed, target, walked)
                heapq.heappush(queue, entry)
        chosen = (way for ways in found.values() for way in ways[:_WAYS])
        return tuple(self._with_cycles(way, cycles) for way in chosen)

    def _with_cycles(self, way: _Way, cycles: dict[int, tuple[tuple[int, int], ...]]) -> _Way:
        met = tuple(
            _Cycle(place, cycles[begin], self._mix(cycles[begin]))
            for place, (begin, _) in enumerate(way.ranges)
            if begin in cycles
        )
        return replace(way, cycles=met) if met else way

    def _mix(self, ranges: tuple[tuple[int, int], ...]) -> np.ndarray:
        nothing = np.zeros(self._prefix.shape[1])
        return sum((self._prefix[b] - self._prefix[a] for a, b in ranges), nothing)

    def _scan(
        self, number: int, stop: int, ranges: tuple, found: dict[int, list[_Way]]
    ) -> int | None:
        """Note the sites of a block up to the first that is not predicated; None if none is."""
        for here in range(number, stop):
            instruction = self.function.instructions[here]
            is_exit = instruction.base == "EXIT"
            if not is_exit and here not in self.sites:
                continue
            walked = (*ranges, (number, here + 1 if is_exit else here))
            target = END if is_exit else here
            length = sum(b - a for a, b in walked)
            found.setdefault(target, []).append(_Way(target, walked, self._mix(walked), length))
            if not instruction.guard:
                return here
        return None

    # ------------------------------------------------------------ the result

    def _traced(self, last: _State) -> WarpPath:
        states = []
        state: _State | None = last
        while state is not None:
            states.append(state)
            state = state.before
        numbers: list[int] = []
        event_of: list[int] = []
        path = WarpPath(np.zeros(0, np.int32), np.zeros(0, np.int32))
        for state in reversed(states):
            if state.way is not None:
                for begin, stop in state.way.ranges:
                    numbers += range(begin, stop)
                event_of += [-1] * (len(numbers) - len(event_of))
                if state.site >= 0:
                    numbers.append(state.site)
                    event_of.append(state.event)
            if state.note:
                which, kind = state.note.split(" ")
                counts = path.missing_events if which == "missing" else path.extra_sites
                counts[kind] = counts.get(kind, 0) + 1
            path.ambiguous += state.tied
        path.numbers, path.event_of = np.array(numbers, np.int32), np.array(event_of, np.int32)
        return path


def _length(state: _State) -> int:
    """Return the instructions of the last way of a state."""
    return sum(stop - begin for begin, stop in state.way.ranges) if state.way else 0


def _exchanges(earlier: Event, later: Event) -> bool:
    """Return True if ptxas may issue the later of two events first."""
    return earlier.kind == PtxEvent.ARRIVE and later.kind.split(".")[0] == PtxEvent.TMEM_STORE


def _differ(one: _State, other: _State) -> bool:
    """Return True if two states are reached over different instructions."""
    if one.before is not other.before:
        return True
    return (one.way.ranges if one.way else None) != (other.way.ranges if other.way else None)
