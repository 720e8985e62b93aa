"""The programs of a kernel's roles, as lists of operations, from its edges and steps.

The load role counts its buffers, the MMA role keeps a state for each ring (`Turns`), as the kernels
do.  `drain` runs the programs.
"""

from __future__ import annotations

import enum
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..plan.edges import EdgeTable
from .steps import Action, Advance, Issue, Load, Product, Role, StepTable, Verb, Want, When

CTAS = (0, 1)
LEADER = 0


class OperationKind(enum.Enum):
    WAIT = "waits for"
    SKIP = "skips"
    ARRIVE = "arrives on"
    USE = "uses"
    COPY = "copies"
    PRODUCT = "multiplies"
    COMMIT = "commits"
    ADVANCE = "takes the tile"
    WANT = "wants the tile"
    FETCH = "fetches the tile"
    GROUP = "issues"
    DONE = "waits for its MMAs but the latest"
    TOUCH = "touches the registers of"


class Use(NamedTuple):
    """A use of a buffer.  position: use of its ring; content: what it holds then, or is to; takes:
    who reads it is one for whom it was made; is_shared: `Copy.is_shared`."""

    ring: str
    position: int
    content: tuple[Any, ...]
    writes: bool
    takes: bool = True
    is_shared: bool = False


@dataclass(frozen=True)
class RoleOperation:
    """One operation of a role.  edge: of GROUP and TOUCH the MMA. number: of the wait for or
    arrival on an edge, from 0 on, or of the tile; of DONE the MMAs that may be under way. place:
    where in the steps, for messages."""

    kind: OperationKind
    edge: str = ""
    number: int = 0
    uses: tuple[Use, ...] = ()
    place: str = ""


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


class Turns:
    """Position of the MMA warp in each ring: a state for each ring, as the MMA role of every kernel
    keeps it, which the MMAs advance when they are done with a buffer.

    The check follows the states, and not what the table means, so that it sees a wait for a phase
    that was waited for before, or a buffer that is never left.
    """

    def __init__(self, edges: EdgeTable, steps: StepTable) -> None:
        self.edges, self.steps = edges, steps
        self._turns: dict[str, int] = defaultdict(int)
        self._commits: dict[tuple[str, int], int] = defaultdict(int)

    def of(self, ring: str) -> int:
        return self._turns[ring]

    def of_edge(self, edge: str) -> int:
        return self._turns[self.steps.ring_of(edge).name]

    def buffer(self, ring: str) -> int:
        return self._turns[ring] % self.edges[self.steps.ring(ring).full].stages

    def advance(self, ring: str) -> None:
        self._turns[ring] += 1

    def enter(self, edge: str) -> int:
        """The number of the wait for a buffer that serves a whole tile; the phase of a ring's only
        buffer is that of the next tile at once."""
        number = self.of_edge(edge)
        if self.edges[edge].stages == 1:
            self.advance(self.steps.ring_of(edge).name)
        return number

    def leave_tile(self, is_ahead: bool) -> None:
        """Advance, at a tile's end, the rings of several buffers of which one served the tile."""
        products = [p for p in self.steps.products if p.is_ahead == is_ahead]
        for name in dict.fromkeys(o.ring for product in products for o in product.operands):
            several = self.edges[self.steps.mma_edge(self.steps.ring(name))].stages > 1
            if several and self.steps.resident(name):
                self.advance(name)

    def commit(self, edge: str) -> int:
        """The number of an arrival on the stage in use."""
        stages = self.edges[edge].stages
        stage = self.of_edge(edge) % stages
        self._commits[edge, stage] += 1
        return stage + stages * (self._commits[edge, stage] - 1)


@dataclass
class Programs:
    """The programs of all roles of both CTAs, for tiles of so many steps each.

    skipped: role -> for each tile how many of its first and of its last steps the role takes no
    part in; those that are not named take part in all.
    """

    edges: EdgeTable
    steps: StepTable
    tiles: tuple[int, ...]
    skipped: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def all(self) -> dict[tuple[str, int], list[RoleOperation]]:
        """Return the programs by (role, CTA); parts of a role are roles."""
        programs = {}
        for cta in CTAS:
            if self.steps.products and (cta == LEADER or self.edges.multiplies_alone):
                programs["mma", cta] = list(self._mma())
        for cta in CTAS:
            if self.steps.products:
                programs["load", cta] = list(self._load())
            for role in self.steps.roles:
                for name in role.names:
                    programs[name, cta] = list(self._written(role, name))
        programs["scheduler", LEADER] = [
            operation
            for tile in range(1, len(self.tiles) + 1)
            for operation in (RoleOperation(OperationKind.FETCH, number=tile), _advance(tile))
        ]
        return programs

    def _load(self) -> Iterator[RoleOperation]:
        counters, in_order = Counters(), not self.steps.looks_ahead
        for item in self.steps.walk(self.tiles):
            if isinstance(item, Advance):
                yield _advance(item.tile)
                continue
            if isinstance(item, Want):
                yield RoleOperation(OperationKind.WANT, number=item.tile)
                continue
            loads = item.product.loads
            if in_order:
                firsts = self.steps.loads if item.product is self.steps.products[0] else ()
                loads = (
                    *(load for load in firsts if load.when is When.FIRST),
                    *(load for load in loads if load.when is not When.FIRST),
                )
            for load in loads:
                if load.when.applies(item.is_first, item.is_last):
                    yield from self._fill(load, item, counters)
        for ring in self.steps.loaded_rings:
            yield from self._tail(ring.freed, itertools.count(counters.count("wait", ring.freed)))

    def _fill(self, load: Load, issue: Issue, counters: Counters) -> Iterator[RoleOperation]:
        step = None if load.when is When.FIRST else issue.step
        yield from self._copies(load, (issue.tile, step), counters, f"for {issue}")

    def _copies(
        self, load: Load, which: tuple[int, int | None], counters: Counters, place: str
    ) -> Iterator[RoleOperation]:
        """The copies of a load.  which: (tile, step)."""
        ring = self.steps.ring(load.ring)
        for piece in range(load.pieces):
            number = counters.next("wait", ring.freed)
            yield RoleOperation(OperationKind.WAIT, ring.freed, number, place=place)
            position = counters.next("arrive", ring.full)
            uses = tuple(
                Use(
                    ring.name,
                    position,
                    (copy.content, *which, piece),
                    True,
                    is_shared=copy.is_shared,
                )
                for copy in load.copies
            )
            yield RoleOperation(OperationKind.COPY, ring.full, position, uses, place)

    def _tail(self, edge: str, numbers: Iterator[int]) -> Iterator[RoleOperation]:
        for _ in range(self.edges[edge].stages):
            yield RoleOperation(OperationKind.WAIT, edge, next(numbers), place="at the end")

    def _mma(self) -> Iterator[RoleOperation]:
        turns = Turns(self.edges, self.steps)
        for item in self.steps.walk(self.tiles):
            if isinstance(item, Issue):
                yield from self._product(item, turns)
                continue
            if isinstance(item, Want):
                continue
            if self.tiles[item.tile - 1]:
                turns.leave_tile(is_ahead=True)
            yield _advance(item.tile)
        for name in self.steps.mma_tail(self.edges):
            edge = self.steps.mma_edge(self.steps.ring(name))
            yield from self._tail(edge, itertools.count(turns.of(name)))

    @staticmethod
    def _commit(edge: str, turns: Turns, place: str) -> RoleOperation:
        return RoleOperation(OperationKind.COMMIT, edge, turns.commit(edge), place=place)

    def _product(self, issue: Issue, turns: Turns) -> Iterator[RoleOperation]:
        """Yield the operations of the MMA warp for one MMA."""
        product, place = issue.product, str(issue)
        if issue.is_first:
            for edge in product.waits_for(When.FIRST):
                yield RoleOperation(OperationKind.WAIT, edge, turns.enter(edge), place=place)
        ring = self.steps.ring(product.b.ring)
        for piece in range(product.pieces):
            for edge in product.waits_for(When.EACH):
                if piece == 0 or edge == ring.full:
                    yield RoleOperation(OperationKind.WAIT, edge, turns.of_edge(edge), place=place)
            uses = self._uses(product, issue, piece, turns)
            yield RoleOperation(OperationKind.PRODUCT, uses=uses, place=place)
            if piece < product.pieces - 1:
                yield self._commit(ring.freed, turns, place)
                turns.advance(ring.name)
        for use in product.commits:
            if use.when is When.EACH:
                yield self._commit(use.edge, turns, place)
                turns.advance(self.steps.ring_of(use.edge).name)
        for name in self.steps.left_after(product):
            turns.advance(name)
        for use in product.commits:
            if use.when is When.LAST and issue.is_last:
                yield self._commit(use.edge, turns, place)
        behind = [each for each in self.steps.products if not each.is_ahead]
        if issue.is_last and behind and product is behind[-1]:
            turns.leave_tile(is_ahead=False)

    def _uses(self, product: Product, issue: Issue, piece: int, turns: Turns) -> tuple[Use, ...]:
        """Return the uses of an MMA: what it reads, then what it writes, or adds to."""
        uses = []
        for operand, part in ((product.a, 0), (product.b, piece)):
            step = None if self.steps.is_of_tile(operand.content) else issue.step
            content = (operand.content, issue.tile, step, part)
            uses.append(Use(operand.ring, turns.buffer(operand.ring), content, False))
        result = product.result
        position = turns.buffer(result.ring)
        made = (result.content, issue.tile, issue.step)
        if piece > 0 or product.overwrites is None:
            uses.append(Use(result.ring, position, made, False))
        elif product.overwrites is When.FIRST and not issue.is_first:
            before = (result.content, issue.tile, issue.step - 1)
            uses.append(Use(result.ring, position, before, False))
        uses.append(Use(result.ring, position, made, True))
        return tuple(uses)

    def _written(self, role: Role, name: str) -> Iterator[RoleOperation]:
        """A role written by hand; name: of its part."""
        counters, skipped = Counters(), self.skipped.get(name)
        yield from self._actions(role.begin, (0, 0), counters)
        before = None
        for tile, num_steps in enumerate(self.tiles):
            if role.claims is not None and num_steps < role.claims:
                yield RoleOperation(OperationKind.WANT, number=tile + 1)
            if num_steps:
                yield from self._actions(role.enter, (tile, 0), counters)
                first, last = skipped[tile] if skipped else (0, 0)
                for step in range(first):
                    yield from self._actions(role.skip, (tile, step), counters)
                if first + last < num_steps:
                    own = range(first, num_steps - last)
                    yield from self._tile(role, (tile, own), before, counters)
                else:
                    yield from self._actions(role.idle, (tile, 0), counters)
                for step in range(num_steps - last, num_steps):
                    yield from self._actions(role.skip, (tile, step), counters)
                before = tile
            yield _advance(tile + 1)
        if before is not None:
            for act in role.acts:
                if act.of_tile_before:
                    place = before, self.tiles[before] - 1
                    yield from self._actions(act.actions, place, counters)
        yield from self._actions(role.end, (len(self.tiles), 0), counters)

    def _tile(
        self, role: Role, which: tuple[int, range], before: int | None, counters: Counters
    ) -> Iterator[RoleOperation]:
        """Yield a role's operations in a tile.  which: (tile, steps)."""
        tile, steps = which
        first, last = steps.start, steps.stop - 1
        for act in role.acts:
            if act.is_ahead and act.when.applies(True, last == first):
                yield from self._actions(act.actions, (tile, first), counters)
        for step in steps:
            if step + (role.claims or 0) == self.tiles[tile]:
                yield RoleOperation(OperationKind.WANT, number=tile + 1)
            for act in role.acts:
                if act.is_ahead:
                    if step < last and act.when.applies(False, step + 1 == last):
                        yield from self._actions(act.actions, (tile, step + 1), counters)
                elif not act.when.applies(step == first, step == last):
                    continue
                elif not act.of_tile_before:
                    yield from self._actions(act.actions, (tile, step), counters)
                elif before is not None:
                    place = before, self.tiles[before] - 1
                    yield from self._actions(act.actions, place, counters)

    def _actions(
        self, actions: tuple[Action, ...], where: tuple[int, int], counters: Counters
    ) -> Iterator[RoleOperation]:
        tile, step = where
        place = f"in step {step} of tile {tile}"
        for action in actions:
            verb, name = action.verb, action.where
            if verb in (Verb.WAIT, Verb.SKIP):
                kind = OperationKind.WAIT if verb is Verb.WAIT else OperationKind.SKIP
                yield RoleOperation(kind, name, counters.next("wait", name), place=place)
            elif verb is Verb.AGAIN:
                number = counters.count("wait", name) - 1
                yield RoleOperation(OperationKind.WAIT, name, number, place=place)
            elif verb is Verb.ARRIVE:
                number = counters.next("arrive", name)
                yield RoleOperation(OperationKind.ARRIVE, name, number, place=place)
            elif action.load is not None:
                which = tile, None if self.steps.is_of_tile(action.load.copies[0].content) else step
                yield from self._copies(action.load, which, counters, place)
            elif verb is Verb.MULTIPLY:
                uses = tuple(self._buffer(each, where, counters) for each in action.operands)
                yield RoleOperation(OperationKind.GROUP, action.content, uses=uses, place=place)
            elif verb is Verb.DONE:
                yield RoleOperation(OperationKind.DONE, number=action.pending, place=place)
            elif verb is Verb.TOUCH:
                yield RoleOperation(OperationKind.TOUCH, action.content, place=place)
            else:
                use = self._buffer(action, where, counters)
                yield RoleOperation(OperationKind.USE, uses=(use,), place=place)

    def _buffer(self, action: Action, where: tuple[int, int], counters: Counters) -> Use:
        """Return the buffer that an action uses.  where: (tile, step)."""
        (tile, step), ring = where, self.steps.ring(action.where)
        writes = action.verb is Verb.WRITE
        if writes:
            turn = counters.count("arrive", ring.full)
        elif action.is_oldest:
            turn = counters.count("arrive", ring.freed)
        else:
            turn = counters.count("wait", ring.full) - 1
        is_of_tile = self.steps.is_of_tile(action.content)
        content = (action.content, tile, None if is_of_tile else step, action.piece)
        return Use(ring.name, turn, content, writes, action.verb is not Verb.CHANGE)


def _advance(tile: int) -> RoleOperation:
    return RoleOperation(OperationKind.ADVANCE, number=tile)
