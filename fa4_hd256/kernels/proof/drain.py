"""A plan that cannot drain is refused before anything is compiled.

From a kernel's edges and steps follow the programs of all its roles, as lists of waits, arrivals,
copies, MMAs and uses of buffers.  `check_drains` runs them for tiles of 0, 1, 2, 3 and many steps
and refuses a plan

* in which roles wait for each other for ever (a hang);
* in which a buffer is written while somebody may still use it, or holds something else than who
  reads it expects, so that the orders of loads and MMAs differ, or what nobody has read;
* in which a barrier can run ahead of who waits for it by more than its parity tells apart, or an
  arrival can fall into the phase before its own;
* whose last signals may find that their CTA has exited;
* that does not give back every buffer as often as it was filled;
* in which a warpgroup uses the registers of an MMA of its own that may be under way, or never.

What an MMA computes, and from where a copy takes its data, is not looked at here.

NOTE [one run is all runs].  Every role is a fixed sequence, nobody chooses.  A wait is for a number
of completed phases, which only grows, so what can go on now can go on later, whatever others do
meanwhile.  Such a system is confluent (a marked graph, a Petri net without conflict): every maximal
run executes the same operations, each wait after the same arrivals, and hangs at the same place or
not at all.  So one run decides about hangs.  The other properties are about order: two operations
come in the same order in every run if and only if a path of program order, arrivals and waits leads
from one to the other, and that graph is the same for all runs.  They are checked by paths, not by
the order of this run; tests/operator/kernels/proof/test_drain.py also walks through every
interleaving of small plans and finds the same.

What the scheduler does is part of the hang check alone, as the dynamic one, which holds roles back:
its ring has two responses, a third is fetched when every role has read the first, and none before
the leader's load role wants it.  The order that it adds is not counted on elsewhere, since the
static one adds none.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..plan.edges import PAIR_SIGNALS, Edge, EdgeTable, Signal
from .programs import CTAS, LEADER, OperationKind, Programs, RoleOperation, Use
from .steps import MMA, Ring, StepTable

#: Signals that both CTAs take part in.
OF_BOTH_CTAS = (Signal.TMA_PAIR, *PAIR_SIGNALS, Signal.TMA_BOTH, Signal.WARPS_BOTH)
RESPONSES = 2  # of the dynamic scheduler, read or under way

#: `Programs.skipped`.
Skipped = Mapping[str, tuple[tuple[int, int], ...]]

#: Steps of each of a cluster's tiles, for every plan: none, few and many, in every order of two,
#: and runs of tiles without steps longer than the scheduler looks ahead.
TILES = (
    (),
    *itertools.product((0, 1, 2, 3)),
    *itertools.product((0, 1, 2, 3), repeat=2),
    (9,),
    (2, 0, 0, 0, 0, 1, 3),
    (0, 0, 0, 0, 2, 1, 1, 1),
    (3, 0, 1, 9, 2),
)


@functools.lru_cache(maxsize=256)
def check_drains(name: str, edges: EdgeTable, steps: StepTable) -> None:
    """Raise ValueError, with edge and step, for a plan that cannot drain; cached by process."""
    try:
        _check_names(edges, steps)
        for tiles in TILES:
            for skipped in _skipped(steps, tiles):
                try:
                    Run(edges, steps, tiles, skipped).check()
                except ValueError as error:
                    less = f"; left out, first and last: {skipped}" if skipped else ""
                    raise ValueError(f"{error} [steps of each tile: {tiles}{less}]") from None
    except ValueError as error:
        raise ValueError(f"{name} cannot work: {error}") from None


def _skipped(steps: StepTable, tiles: tuple[int, ...]) -> list[Skipped]:
    """List the steps that roles leave out: none, some of each, and one all."""
    names = [name for role in steps.roles if role.skip for name in role.names]
    found: list[Skipped] = [{}]
    if len(names) > 1 and any(tiles):
        halves = [n // 2 for n in tiles]
        begin, end = (tuple((n, 0) for n in halves), tuple((0, n) for n in halves))
        found.append({names[0]: begin, names[1]: end})
        found += [{name: tuple((0, n) for n in tiles)} for name in names[:2]]
    return found


def _check_names(edges: EdgeTable, steps: StepTable) -> None:
    """Every edge has a ring, and both edges of a ring as many stages."""
    declared = {edge.name for edge in edges.edges}
    used = {name for ring in steps.rings for name in (ring.full, ring.free) if name}
    if declared != used:
        unknown, left = sorted(used - declared), sorted(declared - used)
        raise ValueError(f"rings name edges that there are not: {unknown}; no ring has {left}")
    for ring in steps.rings:
        if ring.free and edges[ring.full].stages != edges[ring.free].stages:
            raise ValueError(
                f"ring {ring.name}: {ring.full} has {edges[ring.full].stages} stages, "
                f"{ring.free} {edges[ring.free].stages}; both count the same buffers"
            )
        if ring.free and not edges[ring.free].initially_complete:
            raise ValueError(f"edge {ring.free} must start complete: its buffers start free")


# ----------------------------------------------------------------------------------------- run


@dataclass
class Stage:
    """One barrier.  arrivals: events by phase of each source.  waits: (event, before it, phase)."""

    arrivers: tuple[Any, ...]
    arrivals: dict = field(default_factory=lambda: defaultdict(list))
    waits: list = field(default_factory=list)

    def complete(self, phase: int) -> bool:
        return all(len(self.arrivals[arriver]) > phase for arriver in self.arrivers)

    def of_phase(self, phase: int) -> list[int]:
        return [events[phase] for events in self.arrivals.values() if 0 <= phase < len(events)]


def check_phases(
    name: str, stage: Stage, precedes: Callable[[int, int], bool], said: Callable[[int], str]
) -> None:
    """Raise ValueError for a barrier whose phases its arrivers or its waiters may mistake.

    Who waits for a phase knows that the one before is complete, and the one behind it cannot
    complete before that wait: one of its arrivals comes after the wait in every run.  A barrier
    with both is never more than a phase away from anyone who waits for it.

    name: of the barrier.  precedes: whether an event comes before another one in every run.  said:
    an event in words.
    """
    for arriver, events in stage.arrivals.items():
        for phase, event in enumerate(events[1:]):
            if not all(precedes(other, event) for other in stage.of_phase(phase)):
                raise ValueError(
                    f"an arrival on {name} may fall into the phase before its own: "
                    f"{said(event)} (phase {phase + 1} of {arriver[0]})"
                )
    for event, last, phase in stage.waits:
        before = stage.of_phase(phase - 1) if phase > 0 else []
        knows = all(last is not None and precedes(other, last) for other in before)
        following = stage.of_phase(phase + 1)
        complete = len(following) == len(stage.arrivers)
        overtaken = complete and not any(precedes(event, other) for other in following)
        if not knows or overtaken:
            raise ValueError(
                f"the parity of {name} is ambiguous: {said(event)} while it may be "
                f"{'ahead by a whole turn' if overtaken else 'a phase behind'}"
            )


@dataclass
class Held:
    """A buffer's content: its writer, its users since, and whether any was its addressee."""

    content: tuple[Any, ...]
    ring: str
    writer: int
    users: list[int] = field(default_factory=list)
    is_taken: bool = False


class Run:
    """One run of all programs; NOTE [one run is all runs]."""

    def __init__(
        self,
        edges: EdgeTable,
        steps: StepTable,
        tiles: tuple[int, ...],
        skipped: Skipped | None = None,
    ) -> None:
        self.edges, self.steps = {edge.name: edge for edge in edges.edges}, steps
        self.programs = Programs(edges, steps, tiles, skipped or {}).all()
        self.next = dict.fromkeys(self.programs, 0)
        #: The last event of each role, None before the first.
        self.last: dict = dict.fromkeys(self.programs)
        #: For each event (role, operation), and the set of all that is before it in every run, as
        #: bits.
        self.events: list[tuple[Any, ...]] = []
        self.before: list[int] = []
        self.stages: dict[tuple[str, int, int], Stage] = {}
        #: Content of each buffer, by name.
        self.buffers: dict[tuple[str, int, int], dict[str, Held]] = defaultdict(dict)
        #: Contents that were overwritten before anybody had read them.
        self.unread: list[Held] = []
        #: The last of each tensor core, by the CTA that issues.
        self.tensor: dict[int, int | None] = dict.fromkeys(CTAS)
        #: MMAs that each role has issued for itself; by name the last, if nobody has used it.
        self.groups: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.unused: dict[tuple[str, int], dict[str, int]] = defaultdict(dict)
        #: Contents that are copied to both CTAs, a part by each.
        self.shared = {
            copy.content for _, action in steps.actions for copy in action.copies if copy.is_shared
        }
        #: Part of a role -> the role.
        self.whole = {name: role.whole for role in steps.roles for name in role.names}
        self.wanted, self.fetched = 0, 0
        self.taken = dict.fromkeys(self.programs, 0)

    def check(self) -> None:
        self._run()
        for (edge, _, index), stage in self.stages.items():
            check_phases(f"{edge} (stage {index})", stage, self._precedes, self._said)
        self._check_exit()

    # Events and their order.

    def _event(self, by: tuple[Any, ...], *causes: int | None) -> int:
        before = 0
        for cause in causes:
            if cause is not None:
                before |= self.before[cause] | 1 << cause
        self.events.append(by)
        self.before.append(before)
        return len(self.events) - 1

    def _precedes(self, first: int, second: int) -> bool:
        """Return True if an event comes before another one in every run."""
        return first == second or bool(self.before[second] >> first & 1)

    def _run(self) -> None:
        progress = True
        while progress:
            progress = False
            for role, program in self.programs.items():
                while self.next[role] < len(program):
                    if not self._execute(role, program[self.next[role]]):
                        break
                    self.next[role] += 1
                    progress = True
        stuck = [
            _text(role, program[self.next[role]])
            for role, program in self.programs.items()
            if self.next[role] < len(program)
        ]
        if stuck:
            raise ValueError(f"it hangs: {'; '.join(stuck)}")

    def _said(self, event: int) -> str:
        return _text(*self.events[event])

    def _execute(self, role: tuple[str, int], operation: RoleOperation) -> bool:
        """Execute one operation, if it need not wait."""
        kind, last = operation.kind, self.last[role]
        by = role, operation
        if kind is OperationKind.WAIT:
            return self._wait(role, operation)
        if kind is OperationKind.ADVANCE:
            if operation.number > self.fetched:
                return False
            self.taken[role] = operation.number
        elif kind is OperationKind.WANT:
            if role[1] == LEADER:
                self.wanted = operation.number
        elif kind is OperationKind.FETCH:
            if self.wanted < operation.number:
                return False
            if min(self.taken.values()) < operation.number - RESPONSES:
                return False
            self.fetched = operation.number
        elif kind is OperationKind.USE:
            self.last[role] = self._event(by, last)
            self._use(operation, self.last[role], (role[1],))
        elif kind is OperationKind.ARRIVE:
            self._arrive_role(role, operation)
        elif kind is OperationKind.COPY:
            # The copy is under way: what follows in the role need not come after it.
            landed = self._event(by, last)
            is_both = self.edges[operation.edge].signal is Signal.TMA_BOTH
            for cta in CTAS if is_both else (role[1],):
                self._use(operation, landed, (cta,))
                self._arrive(role, operation, landed, cta)
        elif kind in (OperationKind.GROUP, OperationKind.DONE, OperationKind.TOUCH):
            self._multiply(role, operation)
        elif kind is OperationKind.PRODUCT:
            event = self.tensor[role[1]] = self._event(by, last, self.tensor[role[1]])
            self._use(operation, event, self._multiplying(role))
        elif kind is OperationKind.COMMIT:
            event = self.tensor[role[1]] = self._event(by, last, self.tensor[role[1]])
            for cta in self._multiplying(role):
                self._arrive(role, operation, event, cta)
        return True

    def _multiplying(self, role: tuple[str, int]) -> tuple[int, ...]:
        """The CTAs whose memory the MMAs take that an MMA warp issues, and whose barriers its
        commits signal."""
        return (role[1],) if (MMA, CTAS[-1]) in self.programs else CTAS

    def _multiply(self, role: tuple[str, int], operation: RoleOperation) -> None:
        last, groups, by = self.last[role], self.groups[role], (role, operation)
        if operation.kind is OperationKind.GROUP:
            event = self._event(by, last, groups[-1] if groups else None)
            groups.append(event)
            self.unused[role][operation.edge] = event
            self._use(operation, event, (role[1],))
        elif operation.kind is OperationKind.DONE:
            done = groups[: len(groups) - operation.number]
            self.last[role] = self._event(by, last, done[-1] if done else None)
        else:
            product = self.unused[role].pop(operation.edge, None)
            if product is None:
                raise ValueError(f"{_text(role, operation)}, which it has not issued since")
            if last is None or not self._precedes(product, last):
                raise ValueError(
                    f"{_text(role, operation)}, which may be under way: nothing makes it wait for "
                    f"this: {self._said(product)}"
                )

    def _wait(self, role: tuple[str, int], operation: RoleOperation) -> bool:
        stage, phase = self._stage(operation, role[1])
        edge = self.edges[operation.edge]
        phase -= edge.initially_complete
        if phase >= 0 and not stage.complete(phase):
            return False
        last = self.last[role]
        event = self._event((role, operation), last, *stage.of_phase(phase))
        stage.waits.append((event, last, phase))
        self.last[role] = event
        return True

    def _arrive_role(self, role: tuple[str, int], operation: RoleOperation) -> None:
        """Record the arrival of a role's warps.  On the other CTA's barrier it happens some time
        after the instruction; on the own one at once."""
        edge, last = self.edges[operation.edge], self.last[role]
        if edge.producer not in (role[0], self.whole.get(role[0])):
            raise ValueError(f"{role[0]} arrives on {edge.name}, whose producer is {edge.producer}")
        event = self._event((role, operation), last)
        if edge.signal not in PAIR_SIGNALS:
            self.last[role] = event
        self._arrive(role, operation, event, role[1])
        if edge.signal is Signal.WARPS_BOTH:
            for cta in CTAS:
                if cta != role[1]:
                    self._arrive(role, operation, self._event((role, operation), last), cta)

    def _arrive(
        self, role: tuple[str, int], operation: RoleOperation, event: int, cta: int
    ) -> None:
        stage, phase = self._stage(operation, cta)
        if role not in stage.arrivers:
            raise ValueError(f"{_text(role, operation)}, which {role[0]} does not signal")
        assert len(stage.arrivals[role]) == phase
        stage.arrivals[role].append(event)

    def _stage(self, operation: RoleOperation, cta: int) -> tuple[Stage, int]:
        edge = self.edges[operation.edge]
        phase, index = divmod(operation.number, edge.stages)
        cta = self._home(edge, cta)
        key = edge.name, cta, index
        if key not in self.stages:
            self.stages[key] = Stage(self._arrivers(edge, cta))
        return self.stages[key], phase

    @staticmethod
    def _home(edge: Edge, cta: int) -> int:
        return LEADER if edge.signal in (Signal.TMA_PAIR, *PAIR_SIGNALS) else cta

    def _arrivers(self, edge: Edge, cta: int) -> tuple[tuple[str, int], ...]:
        name = edge.producer
        names = [part for part, whole in self.whole.items() if whole == name] or [name]
        if edge.signal in OF_BOTH_CTAS:
            return tuple((part, each) for part in names for each in CTAS)
        if edge.signal is Signal.COMMIT_PAIR:
            return ((MMA, LEADER),)
        if edge.signal is Signal.COMMIT_CTA:
            return ((MMA, cta),)
        return tuple((part, cta) for part in names)

    # Contents of buffers, and who may use them when.

    def _use(self, operation: RoleOperation, event: int, ctas: tuple[int, ...]) -> None:
        for cta in ctas:
            for use in operation.uses:
                ring = self.steps.ring(use.ring)
                stage = use.position % self.edges[ring.full].stages
                name = use.content[0] + (f" ({stage})" if ring.parts > 1 else "")
                buffer = self.buffers[self._root(ring), cta, stage // ring.parts]
                by = self.events[event][0][1]
                if not use.writes:
                    shared = use.content[0] in self.shared
                    for part in (f"{name} by {each}" for each in CTAS) if shared else (name,):
                        self._read(buffer.get(part), use, (event, operation), buffer)
                elif use.is_shared or by == cta or operation.kind is not OperationKind.COPY:
                    name += f" by {by}" if use.is_shared else ""
                    self._write(buffer, (name, use), event, operation)

    def _root(self, ring: Ring) -> str:
        return self._root(self.steps.ring(ring.over)) if ring.over else ring.name

    def _write(
        self, buffer: dict[str, Held], named: tuple[str, Use], event: int, operation: RoleOperation
    ) -> None:
        name, use = named
        for other, held in list(buffer.items()):
            if other != name and self._lie_side_by_side(held, use, event):
                continue
            if not held.is_taken and held.writer != event:
                self.unread.append(held)
            for user in (held.writer, *held.users):
                if not self._precedes(user, event):
                    raise ValueError(
                        f"{_content(use)} may overwrite {use.ring} while it is in use: nothing "
                        f"makes its writer ({operation.place}) wait for this: {self._said(user)}"
                    )
            del buffer[other]
        buffer[name] = Held(use.content, use.ring, event)

    def _lie_side_by_side(self, held: Held, use: Use, event: int) -> bool:
        if held.ring != use.ring:
            return self._are_apart(self.steps.ring(held.ring), self.steps.ring(use.ring))
        results = self.steps.results(use.ring)
        parts = self.steps.ring(use.ring).parts
        is_same = self.edges[self.steps.ring(use.ring).full].signal is Signal.TMA_BOTH and (
            held.content[1:] == use.content[1:]
        )
        return held.writer == event or parts > 1 or use.content[0] in results or is_same

    @staticmethod
    def _are_apart(one: Ring, other: Ring) -> bool:
        """Return True if two rings over the same buffers take different shares of them."""
        if not one.over or one.over != other.over:
            return False
        (i, n), (j, m) = one.share, other.share
        return (i + 1) * m <= j * n or (j + 1) * n <= i * m

    def _read(
        self,
        held: Held | None,
        use: Use,
        reader: tuple[int, RoleOperation],
        buffer: dict[str, Held],
    ) -> None:
        event, operation = reader
        if held is None or any(a != b for a, b in zip(held.content, use.content)):
            what = ", ".join(_described(held.content) for held in buffer.values()) or "nothing"
            raise ValueError(
                f"who reads {_content(use)} from {use.ring} ({operation.place}) finds {what}: "
                "loads and MMAs are not in the same order, or an edge is missing"
            )
        if not self._precedes(held.writer, event):
            raise ValueError(
                f"nothing makes who reads {_content(use)} from {use.ring} ({operation.place}) wait "
                f"for this: {self._said(held.writer)}"
            )
        held.users.append(event)
        held.is_taken |= use.takes

    # Lifetimes of barriers.

    def _check_exit(self) -> None:
        left = (held for buffer in self.buffers.values() for held in buffer.values())
        for held in (*self.unread, *left):
            if not held.is_taken:
                raise ValueError(f"nobody reads {_described(held.content)} in {held.ring}")
        ends = 0
        for last in self.last.values():
            if last is not None:
                ends |= self.before[last] | 1 << last
        for unused in self.unused.values():
            for product in unused.values():
                raise ValueError(f"nobody uses the result of an MMA: {self._said(product)}")
        self._check_given_back()
        for (edge, cta, _), stage in self.stages.items():
            for events in stage.arrivals.values():
                for event in events:
                    # Work of a thread before the CTAs meet is done when they have met.
                    is_met = self.steps.meets and self.events[event][1].kind is OperationKind.ARRIVE
                    if not ends >> event & 1 and not is_met:
                        raise ValueError(
                            f"nobody waits for the last signal of {edge}, so CTA {cta} may exit "
                            f"before it: {self._said(event)}"
                        )

    def _check_given_back(self) -> None:
        for ring in self.steps.rings:
            for cta in CTAS if ring.free else ():
                filled, given = (self._counts(edge, cta) for edge in (ring.full, ring.freed))
                if len(filled | given) > 1:
                    raise ValueError(
                        f"ring {ring.name} is filled {max(filled)} times, and given back "
                        f"{min(given)} times"
                    )

    def _counts(self, edge: str, cta: int) -> set[int]:
        cta = self._home(self.edges[edge], cta)
        counts: dict[tuple[str, int], int] = defaultdict(int)
        for (name, where, _), stage in self.stages.items():
            for arriver in stage.arrivers if (name, where) == (edge, cta) else ():
                counts[arriver] += len(stage.arrivals[arriver])
        return set(counts.values()) or {0}


def _text(role: tuple[str, int], operation: RoleOperation) -> str:
    name, cta = role
    who = name if name == MMA else f"{name} of CTA {cta}"
    what = operation.edge or str(operation.number)
    if operation.kind in (OperationKind.USE, OperationKind.COPY):
        what = ", ".join(dict.fromkeys(use.content[0] for use in operation.uses))
    where = f" ({operation.place})" if operation.place else ""
    return f"{who} {operation.kind.value} {what}{where}"


def _content(use: Use) -> str:
    return _described(use.content)


def _described(content: tuple[Any, ...]) -> str:
    name, tile, step, *_ = content
    return f"{name} of tile {tile}" if step is None else f"{name} of step {step} of tile {tile}"
