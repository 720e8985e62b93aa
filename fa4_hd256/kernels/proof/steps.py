"""Steps as data: what the load warp and the MMA warp of a kernel do, as one list of MMAs.

The roles themselves are written out in the kernels.  A table of their MMAs is there for the check
that a plan drains (`drain`), also of configurations that users make, for the timing model and for
the timeline in the documentation; traces of compiled kernels hold the two to each other
(tests/operator/kernels/proof/test_step_traces.py).

A table lists the MMAs of a step in the order of their issue: their operands, where the results go,
which edges are waited for and committed, what has to be loaded, and which MMAs run one step ahead
of the others. An MMA that is *ahead* is issued for step i + 1 before those that are not are issued
for step i, also across the end of a tile: for the first step of the next tile, if that has any.  So
a tile of n steps is issued as

    start   the MMAs that are ahead, for step 0, of the first tile or after one without steps
    body    for i = 1 .. n - 1 every MMA in order: those ahead for step i, the others for i - 1
    end     every MMA in order: those ahead for step 0 of the next tile, the others for n - 1

A table without such MMAs issues every step by itself; what is waited for in a tile's first step, or
committed in its last one, then stands before and after the tile's loop.
"""

from __future__ import annotations

import enum
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from ..context import CLAIM_STEPS
from ..plan.edges import EdgeTable


class When(enum.Enum):
    """Steps of a tile in which something happens."""

    EACH = "each step"
    FIRST = "first step"
    LAST = "last step"
    NOT_LAST = "each step but the last"
    NOT_FIRST = "each step but the first"

    def applies(self, is_first: bool, is_last: bool) -> bool:
        """Return True if a step is among them."""
        return {
            When.EACH: True,
            When.FIRST: is_first,
            When.LAST: is_last,
            When.NOT_LAST: not is_last,
            When.NOT_FIRST: not is_first,
        }[self]


@dataclass(frozen=True)
class EdgeUse:
    """An edge that an MMA waits for, or commits, in some steps of a tile."""

    edge: str
    when: When = When.EACH


def each(edge: str) -> EdgeUse:
    return EdgeUse(edge)


def first(edge: str) -> EdgeUse:
    return EdgeUse(edge, When.FIRST)


def last(edge: str) -> EdgeUse:
    return EdgeUse(edge, When.LAST)


@dataclass(frozen=True)
class Ring:
    """Buffers used in turn, and the two edges between those who fill and those who empty them.

    full: the edge that says that a buffer holds what it should.  free: the edge that says that it
    may be filled again; None where the order of the MMAs alone says so, since the tensor core
    executes them in the order of their issue.  Both edges have as many stages as there are buffers.
    over: the ring whose buffers these lie over.  parts: stages that lie over one buffer of that.
    share: (which, of how many) parts of each buffer of that ring they lie over. regions: of the
    SMEM or TMEM plan, each with so many buffers; the ring's name if none is given.
    """

    name: str
    full: str
    free: str | None = None
    over: str | None = None
    parts: int = 1
    share: tuple[int, int] = (0, 1)
    regions: tuple[str, ...] = ()

    @property
    def freed(self) -> str:
        """The edge `free`, for who waits to fill the buffers; ValueError where there is none."""
        if self.free is None:
            raise ValueError(f"ring {self.name} has no edge `free`, so nothing may wait to fill it")
        return self.free


@dataclass(frozen=True)
class Copy:
    """One TMA copy of each CTA.

    content: what it brings, in the words of the timeline.  box: the kernel's TMA tensor.  memory:
    the kernel's view of shared memory that it goes to.  is_shared: it goes to both CTAs, each of
    which copies a part.
    """

    content: str
    box: str
    memory: str
    is_shared: bool = False


@dataclass(frozen=True)
class Load:
    """Copies that fill one buffer of a ring together.

    when: in every step, or in a tile's first one.  pieces: buffers that are filled so, one after
    the other, with as many parts of the content.
    """

    ring: str
    copies: tuple[Copy, ...]
    when: When = When.EACH
    pieces: int = 1

    @classmethod
    def one(
        cls,
        content: str,
        box: str,
        memory: str,
        ring: str,
        when: When = When.EACH,
        pieces: int = 1,
    ) -> Load:
        return cls(ring, (Copy(content, box, memory),), when, pieces)

    @property
    def content(self) -> str:
        return " ".join(copy.content for copy in self.copies)


@dataclass(frozen=True)
class Operand:
    """Operand or result of an MMA.

    content: in the words of the timeline.  ring: whose buffer it is.
    """

    content: str
    ring: str


@dataclass(frozen=True)
class Product:
    """One MMA of a step: result = A B, or result += A B.

    waits: edges waited for before it, in this order; those of the result before it is written,
        those of the operands before they are read.  commits: edges signalled when it is done, in
        this order.
    loads: what the load warp fetches for it, in this order.
    is_ahead: issued one step before the MMAs that are not (module's docstring).
    overwrites: in which steps the result is overwritten, and not added to: in each, in a tile's
        first one, or in none (None), where an MMA before it has.
    pieces: parts of the sum; each takes a buffer of B's ring of its own, and a part of A's buffer.
        Only the edge of B's ring is waited for and committed for each.
    """

    name: str
    result: Operand
    a: Operand
    b: Operand
    waits: tuple[EdgeUse, ...]
    commits: tuple[EdgeUse, ...]
    loads: tuple[Load, ...] = ()
    is_ahead: bool = False
    overwrites: When | None = When.EACH
    pieces: int = 1

    @property
    def operands(self) -> tuple[Operand, Operand, Operand]:
        return self.result, self.a, self.b

    def waits_for(self, *when: When) -> tuple[str, ...]:
        return tuple(use.edge for use in self.waits if use.when in when)


class Verb(enum.Enum):
    """Verbs of a hand-written role's actions on an edge or on a buffer of a ring."""

    WAIT = "waits for"
    AGAIN = "waits again for"
    SKIP = "passes over"
    ARRIVE = "arrives on"
    READ = "reads"
    LEAVE = "leaves"
    CHANGE = "changes"
    WRITE = "writes"
    FILL = "fills"
    MULTIPLY = "multiplies"
    DONE = "waits for products"
    TOUCH = "touches the registers of"


@dataclass(frozen=True)
class Action:
    """One action of a role.  where: an edge, or a ring; content: of the ring's buffer, or the name
    of an MMA. piece: of a content that takes several buffers.  is_oldest: the buffer is the oldest
    that the role has not given back, not the latest that it waited for.  load: of FILL.  operands:
    of MULTIPLY.  pending: of DONE.
    """

    verb: Verb
    where: str = ""
    content: str = ""
    piece: int = 0
    is_oldest: bool = False
    load: Load | None = None
    operands: tuple[Action, ...] = ()
    pending: int = 0


def wait(edge: str) -> Action:
    return Action(Verb.WAIT, edge)


def skip(edge: str) -> Action:
    """Count the next phase of an edge without waiting: something else says that it is complete."""
    return Action(Verb.SKIP, edge)


def again(edge: str) -> Action:
    """Wait for the phase of an edge that was waited for last."""
    return Action(Verb.AGAIN, edge)


def arrive(edge: str) -> Action:
    return Action(Verb.ARRIVE, edge)


def read(ring: str, content: str, piece: int = 0) -> Action:
    """Read the buffer that was waited for last."""
    return Action(Verb.READ, ring, content, piece)


def leave(ring: str, content: str) -> Action:
    """Do without what is in the buffer that was waited for last."""
    return Action(Verb.LEAVE, ring, content)


def read_oldest(ring: str, content: str) -> Action:
    """Read the oldest buffer that the role has not given back."""
    return Action(Verb.READ, ring, content, is_oldest=True)


def fill(load: Load) -> Action:
    """Wait for free buffers and copy into them, one for each piece.  The act says when."""
    return Action(Verb.FILL, load.ring, load.content, load=load)


def multiply(product: str, *operands: Action) -> Action:
    """Issue an MMA as a group of its own, which reads its operands until it is done.

    operands: reads of buffers; an operand in registers is none.
    """
    return Action(Verb.MULTIPLY, content=product, operands=operands)


def done(pending: int) -> Action:
    """Wait until at most so many of the latest MMAs are not done."""
    return Action(Verb.DONE, pending=pending)


def touch(product: str) -> Action:
    """Use the registers of the last MMA of a name: its result, or write what it reads."""
    return Action(Verb.TOUCH, content=product)


def change(ring: str, content: str) -> Action:
    """Change the buffer that was waited for last in place; somebody else has yet to read it."""
    return Action(Verb.CHANGE, ring, content)


def write(ring: str, content: str) -> Action:
    """Fill the buffer whose edge is signalled next."""
    return Action(Verb.WRITE, ring, content)


@dataclass(frozen=True)
class Act:
    """Part of what a role does in a step.

    is_ahead: for the following step of the same tile; the first step's comes before all else.
    of_tile_before: acts on the last step of the tile before; once more after the last tile.
    """

    actions: tuple[Action, ...]
    when: When = When.EACH
    is_ahead: bool = False
    of_tile_before: bool = False


@dataclass(frozen=True)
class Role:
    """Use of the edges by a hand-written role, for the check of the plan.

    begin, end: before the first, after the last tile.  In a tile without steps it does nothing.
    parts: groups of its warps that do so, each by itself.  of: the role that it is such a group of,
    where these are not alike.  enter: in a tile with steps, before all else.  skip: instead of a
    step that it takes no part in, at a tile's beginning or end; idle: in a tile without any step
    that it takes part in, before it skips them.  claims: it lets the scheduler request the next
    tile when so many steps are left of one, at its beginning where it has fewer.
    """

    name: str
    acts: tuple[Act, ...]
    begin: tuple[Action, ...] = ()
    end: tuple[Action, ...] = ()
    parts: int = 1
    of: str = ""
    enter: tuple[Action, ...] = ()
    skip: tuple[Action, ...] = ()
    idle: tuple[Action, ...] = ()
    claims: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of its parts."""
        if self.parts == 1:
            return (self.name,)
        return tuple(f"{self.name} {part}" for part in range(self.parts))

    @property
    def whole(self) -> str:
        """The role that edges name."""
        return self.of or self.name


@dataclass(frozen=True)
class Issue:
    """An MMA issued for a step.  step: of the tile; num_steps: of that tile."""

    product: Product
    tile: int
    step: int
    num_steps: int

    @property
    def is_first(self) -> bool:
        return self.step == 0

    @property
    def is_last(self) -> bool:
        return self.step == self.num_steps - 1

    def __str__(self) -> str:
        return f"{self.product.name} of step {self.step} of tile {self.tile}"


@dataclass(frozen=True)
class Advance:
    """A role requests its next tile from the scheduler.  tile: its number."""

    tile: int


@dataclass(frozen=True)
class Want:
    """The load role lets the scheduler request the tile with this number."""

    tile: int


@dataclass(frozen=True)
class StepTable:
    """The MMAs of a kernel's step in the order of their issue, the rings they use, and the other
    roles, as far as they use the same edges.

    meets: before a CTA of a cluster exits, its threads wait for those of the other.
    """

    rings: tuple[Ring, ...]
    products: tuple[Product, ...] = ()
    roles: tuple[Role, ...] = ()
    meets: bool = False

    def role(self, name: str) -> Role:
        """Return the role of that name, or with a part of that name."""
        return next(role for role in self.roles if name in (role.name, *role.names))

    @property
    def fills(self) -> tuple[tuple[Load, When], ...]:
        """Return all loads, with the steps in which they happen."""
        return (
            *((load, load.when) for load in self.loads),
            *(
                (action.load, act.when)
                for role in self.roles
                for act in role.acts
                for action in act.actions
                if action.load
            ),
        )

    @property
    def copies(self) -> tuple[Copy, ...]:
        return tuple(copy for load, _ in self.fills for copy in load.copies)

    def is_of_tile(self, content: str) -> bool:
        """Return True if a content is loaded, or written by a role, once a tile."""
        loaded = any(
            copy.content == content and when is When.FIRST
            for load, when in self.fills
            for copy in load.copies
        )
        return loaded or any(
            action.verb is Verb.WRITE and action.content == content
            for role in self.roles
            for act in role.acts
            if act.when is When.FIRST
            for action in act.actions
        )

    def ring(self, name: str) -> Ring:
        return next(ring for ring in self.rings if ring.name == name)

    def ring_of(self, edge: str) -> Ring:
        return next(ring for ring in self.rings if edge in (ring.full, ring.free))

    @property
    def looks_ahead(self) -> bool:
        """Return True if any MMA is ahead, and so a tile's first step begun in the tile before."""
        return any(product.is_ahead for product in self.products)

    @property
    def loads(self) -> tuple[Load, ...]:
        return tuple(load for product in self.products for load in product.loads)

    @property
    def loaded_rings(self) -> tuple[Ring, ...]:
        names = {load.ring for load in self.loads}
        return tuple(ring for ring in self.rings if ring.name in names)

    @property
    def multiplied_rings(self) -> tuple[Ring, ...]:
        names = {operand.ring for product in self.products for operand in product.operands}
        return tuple(ring for ring in self.rings if ring.name in names)

    @property
    def waited_edges(self) -> tuple[str, ...]:
        return tuple({use.edge: None for product in self.products for use in product.waits})

    def mma_edge(self, ring: Ring) -> str:
        """The edge of a ring by whose barriers the MMA warp counts: the one that it waits for."""
        waited = [edge for edge in (ring.free, ring.full) if edge in self.waited_edges]
        return waited[0] if waited else ring.full

    def mma_tail(self, edges: EdgeTable) -> tuple[str, ...]:
        """Rings on whose edge the MMA warp awaits every last phase: those whose first pass did not
        block, so that as many signals are outstanding."""
        return tuple(
            ring.name
            for ring in self.multiplied_rings
            if edges[self.mma_edge(ring)].initially_complete
            and self.mma_edge(ring) in self.waited_edges
        )

    def left_after(self, product: Product) -> tuple[str, ...]:
        """Rings whose buffer the MMA warp is done with after an MMA, without committing it."""
        kept = {
            self.ring_of(use.edge).name
            for each in self.products
            for use in each.commits
            if use.when is When.EACH
        }
        last = {operand.ring: each for each in self.products for operand in each.operands}
        return tuple(
            ring
            for ring, user in last.items()
            if user is product and ring not in kept and not self.resident(ring)
        )

    def resident(self, ring: str) -> bool:
        """Return True if one buffer of a ring serves the MMA warp for a whole tile."""
        pair = self.ring(ring)
        uses = [u for p in self.products for u in p.waits if u.edge in (pair.full, pair.free)]
        return any(use.when is When.FIRST for use in uses)

    def walk(self, tiles: tuple[int, ...]) -> Iterator[Issue | Advance | Want]:
        """Yield what the load and MMA warps go through for tiles of so many steps each.

        The loops of these roles in plain Python, for the check of the plan.
        """
        return self._look_ahead(tiles) if self.looks_ahead else self._in_order(tiles)

    def _in_order(self, tiles: tuple[int, ...]) -> Iterator[Issue | Advance | Want]:
        for tile, num_steps in enumerate(tiles):
            if num_steps < CLAIM_STEPS:
                yield Want(tile + 1)
            for step in range(num_steps):
                if step + CLAIM_STEPS == num_steps:
                    yield Want(tile + 1)
                for product in self.products:
                    yield Issue(product, tile, step, num_steps)
            yield Advance(tile + 1)

    def _look_ahead(self, tiles: tuple[int, ...]) -> Iterator[Issue | Advance | Want]:
        tile = yield from self._next_with_steps(tiles, 0)
        yield from self._start(tiles, tile)
        while tile < len(tiles):
            num_steps = tiles[tile]
            if num_steps <= CLAIM_STEPS:
                yield Want(tile + 1)
            for step in range(1, num_steps):
                if step + CLAIM_STEPS == num_steps:
                    yield Want(tile + 1)
                for product in self.products:
                    yield Issue(product, tile, step if product.is_ahead else step - 1, num_steps)
            following = tile + 1
            yield Advance(following)
            is_ahead = following < len(tiles) and tiles[following] > 0
            for product in self.products:
                if not product.is_ahead:
                    yield Issue(product, tile, num_steps - 1, num_steps)
                elif is_ahead:
                    yield Issue(product, following, 0, tiles[following])
            tile = following
            if not is_ahead:
                tile = yield from self._next_with_steps(tiles, tile)
                yield from self._start(tiles, tile)

    @staticmethod
    def _next_with_steps(tiles: tuple[int, ...], tile: int) -> Generator[Advance | Want, None, int]:
        while tile < len(tiles) and tiles[tile] == 0:
            tile += 1
            yield Want(tile)
            yield Advance(tile)
        return tile

    def _start(self, tiles: tuple[int, ...], tile: int) -> Iterator[Issue]:
        if tile < len(tiles):
            for product in self.products:
                if product.is_ahead:
                    yield Issue(product, tile, 0, tiles[tile])
