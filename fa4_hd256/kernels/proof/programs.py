"""The programs of a kernel's roles, as lists of operations, from its edges and steps; `drain` runs
them."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..plan.edges import COMMIT_SIGNALS, EdgeTable, Signal
from .steps import MMA, Action, Role, StepTable, Verb

CTAS = (0, 1)
LEADER = 0


class OperationKind(enum.Enum):
    WAIT = "waits for"
    ARRIVE = "arrives on"
    USE = "uses"
    COPY = "copies"
    PRODUCT = "multiplies"  # by the MMA warp
    COMMIT = "commits"
    ADVANCE = "takes the tile"
    WANT = "wants the tile"
    FETCH = "fetches the tile"
    GROUP = "issues"  # by a warpgroup
    DONE = "waits for its MMAs but the latest"
    TOUCH = "touches the registers of"


class Use(NamedTuple):
    """A use of a buffer.  position: of its ring; takes: the reader is its addressee."""

    ring: str
    position: int
    content: tuple[Any, ...]
    writes: bool
    takes: bool = True
    is_shared: bool = False


@dataclass(frozen=True)
class RoleOperation:
    """One operation of a role.  edge: of PRODUCT, GROUP and TOUCH the MMA. number: of the wait for
    or arrival on an edge, from 0 on, or of the tile; of DONE the MMAs that may be under way. place:
    where in the steps, for messages."""

    kind: OperationKind
    edge: str = ""
    number: int = 0
    uses: tuple[Use, ...] = ()
    place: str = ""


class Place(NamedTuple):
    """A step of a tile, for a role: whether it is the first or the last in which it takes part."""

    tile: int
    step: int
    is_first: bool
    is_last: bool


class Counters:
    """Counts of a role's waits for, and arrivals on, each edge."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = defaultdict(int)

    def next(self, verb: str, edge: str) -> int:
        """The number of the coming one, which then is the last one."""
        self._counts[verb, edge] += 1
        return self._counts[verb, edge] - 1

    def count(self, verb: str, edge: str) -> int:
        return self._counts[verb, edge]


@dataclass
class Programs:
    """The programs of all roles of both CTAs, for tiles of so many steps each. skipped: role -> for
    each tile how many of its first and of its last steps the role takes no part in; those that are
    not named take part in all."""

    edges: EdgeTable
    steps: StepTable
    tiles: tuple[int, ...]
    skipped: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def all(self) -> dict[tuple[str, int], list[RoleOperation]]:
        """Return the programs by (role, CTA), parts being roles; the leader issues MMAs."""
        alone = any(edge.signal is Signal.COMMIT_CTA for edge in self.edges.edges)
        programs = {
            (name, cta): list(self._program(role, name))
            for role in self.steps.roles
            for cta in CTAS
            if role.name != MMA or cta == LEADER or alone
            for name in role.names
        }
        programs["scheduler", LEADER] = [
            operation
            for tile in range(1, len(self.tiles) + 1)
            for operation in (RoleOperation(OperationKind.FETCH, number=tile), _advance(tile))
        ]
        return programs

    def _program(self, role: Role, name: str) -> Iterator[RoleOperation]:
        """Yield a role's operations.  name: of its part."""
        counters, skipped = Counters(), self.skipped.get(name)
        before: Place | None = None
        for tile, num_steps in enumerate(self.tiles):
            if not (num_steps and role.crosses):
                yield from _want(role, tile + 1, num_steps < (role.claims or 0))
            if num_steps:
                first, last = skipped[tile] if skipped else (0, 0)
                places = [Place(tile, n, n == 0, n == num_steps - 1) for n in range(num_steps)]
                yield from self._actions(role.enter, places[0], counters)
                for at in places[:first]:
                    yield from self._actions(role.skip, at, counters)
                if first + last < num_steps:
                    own = range(first, num_steps - last)
                    yield from self._tile(role, (tile, own), before, counters)
                else:
                    yield from self._actions(role.idle, places[0], counters)
                for at in places[num_steps - last :]:
                    yield from self._actions(role.skip, at, counters)
                before = places[-1]
            if not (num_steps and role.crosses):
                yield _advance(tile + 1)
        if before is not None:
            for act in role.acts:
                if act.of_tile_before:
                    yield from self._actions(act.actions, before, counters)
        yield from self._actions(role.end, Place(len(self.tiles), 0, True, True), counters)

    def _tile(
        self, role: Role, which: tuple[int, range], before: Place | None, counters: Counters
    ) -> Iterator[RoleOperation]:
        tile, steps = which
        places = [Place(tile, n, n == steps.start, n == steps.stop - 1) for n in steps]
        following = [*places[1:], self._first_of(tile + 1) if role.crosses else None]
        if not (role.crosses and self._first_of(tile - 1)):
            yield from self._acts(role, None, places[0], before, counters)
        # A role that crosses is at the step ahead already.
        claims = (role.claims or 0) + role.crosses
        yield from _want(role, tile + 1, role.crosses and self.tiles[tile] < claims)
        for here, ahead in zip(places, following):
            yield from _want(role, tile + 1, here.step + claims == self.tiles[tile])
            if role.crosses and here.is_last:
                yield _advance(tile + 1)
            yield from self._acts(role, here, ahead, before, counters)

    def _first_of(self, tile: int) -> Place | None:
        if not (0 <= tile < len(self.tiles) and self.tiles[tile]):
            return None
        return Place(tile, 0, True, self.tiles[tile] == 1)

    def _acts(
        self,
        role: Role,
        here: Place | None,
        ahead: Place | None,
        before: Place | None,
        counters: Counters,
    ) -> Iterator[RoleOperation]:
        """Yield operations: acts ahead for step `ahead`, others for `here`; None for none."""
        is_beside = here is not None and ahead is not None
        for act in role.acts:
            at = ahead if act.is_ahead else here
            if act.beside not in (None, is_beside):
                continue
            if at is not None and act.when.applies(at.is_first, at.is_last):
                place = before if act.of_tile_before else at
                if place is not None:
                    yield from self._actions(act.actions, place, counters)

    def _actions(
        self, actions: tuple[Action, ...], at: Place, counters: Counters
    ) -> Iterator[RoleOperation]:
        place = f"in step {at.step} of tile {at.tile}"
        for action in actions:
            verb, name = action.verb, action.where
            if verb is Verb.WAIT:
                number = counters.next("wait", name)
                yield RoleOperation(OperationKind.WAIT, name, number, place=place)
            elif verb is Verb.WAIT_ALL:
                for _ in range(self.edges[name].stages):
                    number = counters.next("wait", name)
                    yield RoleOperation(OperationKind.WAIT, name, number, place="at the end")
            elif verb is Verb.AGAIN:
                number = counters.count("wait", name) - 1
                yield RoleOperation(OperationKind.WAIT, name, number, place=place)
            elif verb is Verb.ARRIVE:
                is_commit = self.edges[name].signal in COMMIT_SIGNALS
                kind = OperationKind.COMMIT if is_commit else OperationKind.ARRIVE
                yield RoleOperation(kind, name, counters.next("arrive", name), place=place)
            elif verb is Verb.FILL:
                yield from self._copies(action, at, counters, place)
            elif verb is Verb.MULTIPLY:
                uses = tuple(use for o in action.operands for use in self._uses(o, at, counters))
                yield RoleOperation(self._issues, action.content, uses=uses, place=place)
            elif verb is Verb.DONE:
                yield RoleOperation(OperationKind.DONE, number=action.pending, place=place)
            elif verb is Verb.TOUCH:
                yield RoleOperation(OperationKind.TOUCH, action.content, place=place)
            else:
                uses = tuple(self._uses(action, at, counters))
                yield RoleOperation(OperationKind.USE, uses=uses, place=place)

    @property
    def _issues(self) -> OperationKind:
        commits = any(edge.signal in COMMIT_SIGNALS for edge in self.edges.edges)
        return OperationKind.PRODUCT if commits else OperationKind.GROUP

    def _copies(
        self, action: Action, at: Place, counters: Counters, place: str
    ) -> Iterator[RoleOperation]:
        """Yield the operations by which buffers are filled, one for each piece."""
        ring = self.steps.ring(action.where)
        for piece in range(action.pieces):
            number = counters.next("wait", ring.freed)
            yield RoleOperation(OperationKind.WAIT, ring.freed, number, place=place)
            position = counters.next("arrive", ring.full)
            uses = tuple(
                Use(
                    ring.name,
                    position,
                    (copy.content, at.tile, self._step(copy.content, at), piece),
                    True,
                    is_shared=copy.is_shared,
                )
                for copy in action.copies
            )
            yield RoleOperation(OperationKind.COPY, ring.full, position, uses, place)

    def _uses(self, action: Action, at: Place, counters: Counters) -> Iterator[Use]:
        """Yield the uses of a buffer by an action: of a sum the read comes before the write."""
        ring, verb = self.steps.ring(action.where), action.verb
        content = (action.content, at.tile, self._step(action.content, at), action.piece)
        if verb in (Verb.WRITE, Verb.ADD, Verb.EXTEND):
            position = counters.count("arrive", ring.full)
            if verb is Verb.EXTEND:
                yield Use(ring.name, position, content, False)
            elif verb is Verb.ADD and not at.is_first:
                before = (action.content, at.tile, at.step - 1, action.piece)
                yield Use(ring.name, position, before, False)
            yield Use(ring.name, position, content, True)
            return
        if action.is_oldest:
            position = counters.count("arrive", ring.freed)
        else:
            position = counters.count("wait", ring.full) - 1
        yield Use(ring.name, position, content, False, verb is not Verb.CHANGE)

    def _step(self, content: str, at: Place) -> int | None:
        return None if self.steps.is_of_tile(content) else at.step


def _want(role: Role, tile: int, is_time: bool) -> Iterator[RoleOperation]:
    if role.claims is not None and is_time:
        yield RoleOperation(OperationKind.WANT, number=tile)


def _advance(tile: int) -> RoleOperation:
    return RoleOperation(OperationKind.ADVANCE, number=tile)
