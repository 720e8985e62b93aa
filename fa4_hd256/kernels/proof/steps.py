"""Steps as data: what each warp role of a kernel does to its barriers and buffers.

The roles themselves are written out in the kernels.  Their tables are there for the check that a
plan drains (`drain`), also of configurations that users make, and for the timeline in the
documentation; traces of compiled kernels hold the two to each other
(tests/operator/kernels/proof/test_step_traces.py).

A role goes through the steps of its tiles, and does its acts in each of them, in their order.  An
act that is *ahead* is done for step i + 1 where the others are done for step i.  So a tile of n
steps is

    start   the acts that are ahead, for step 0
    body    for i = 1 .. n - 1 every act in order: those ahead for step i, the others for i - 1
    end     the others for n - 1

A role that *crosses* tiles does the acts that are ahead for step 0 of the next tile, if that has
any step, in this one's end; its start is that of the first tile, and of one after a tile without
steps.

An act may be limited by its `beside`.  With True it is done only where acts ahead and others are
done together: in the body, and in an end that crosses.  With False it is done only in a start, or
in an end that does not cross.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

#: The role whose MMAs are the tensor core's of Blackwell, which executes them in their order.
MMA = "mma"


class When(enum.Enum):
    """Steps of a tile in which something happens."""

    EACH = "each step"
    FIRST = "first step"
    LAST = "last step"
    NOT_LAST = "each step but the last"
    NOT_FIRST = "each step but the first"

    def applies(self, is_first: bool, is_last: bool) -> bool:
        return {
            When.EACH: True,
            When.FIRST: is_first,
            When.LAST: is_last,
            When.NOT_LAST: not is_last,
            When.NOT_FIRST: not is_first,
        }[self]


@dataclass(frozen=True)
class Ring:
    """Buffers used in turn, and the two edges between those who fill and those who empty them.

    full: the edge that says that a buffer holds what it should.  free: the edge that says that it
    may be filled again; None where the order of the MMAs alone says so, since the tensor core
    executes them in the order of their issue.  Both edges have as many stages as there are buffers.
    over: the ring whose buffers these lie over.  parts: stages that lie over one buffer of that.
    share: (which, of how many) parts of each buffer of that ring they lie over. regions: of the
    SMEM or TMEM plan, each with so many buffers; the ring's name if none is given.  is_permit:
    there are none: `full` says that something else may go on.
    """

    name: str
    full: str
    free: str | None = None
    over: str | None = None
    parts: int = 1
    share: tuple[int, int] = (0, 1)
    regions: tuple[str, ...] = ()
    is_permit: bool = False

    @property
    def freed(self) -> str:
        """The edge `free`, for who waits to fill the buffers; ValueError where there is none."""
        if self.free is None:
            raise ValueError(f"ring {self.name} has no edge `free`, so nothing may wait to fill it")
        return self.free


def loaded(name: str, *regions: str) -> Ring:
    """Return a ring that loads fill. regions: `Ring.regions`."""
    return Ring(name, f"{name}_loaded", f"{name}_free", regions=regions)


@dataclass(frozen=True)
class Copy:
    """One copy of each CTA to shared memory. content: what it brings, in the words of the timeline.
    region: of the SMEM plan; the ring's name if none is given. is_shared: it goes to both CTAs,
    each of which copies a part."""

    content: str
    region: str = ""
    is_shared: bool = False


class Verb(enum.Enum):
    """Verbs of a role's actions on an edge or on a buffer of a ring."""

    WAIT = "waits for"
    WAIT_ALL = "waits for all of"
    AGAIN = "waits again for"
    ARRIVE = "arrives on"
    READ = "reads"
    LEAVE = "leaves"
    CHANGE = "changes"
    WRITE = "writes"
    ADD = "adds to"
    EXTEND = "adds more to"
    FILL = "fills"
    MULTIPLY = "multiplies"
    DONE = "waits for products"
    TOUCH = "touches the registers of"


@dataclass(frozen=True)
class Action:
    """One action of a role.  where: an edge, or a ring; content: of the ring's buffer, or the name
    of an MMA. piece: of a content that takes several buffers.  is_oldest: the buffer is the oldest
    that the role has not given back, not the latest that it waited for.  copies, pieces: of FILL.
    operands: of MULTIPLY.  pending: of DONE.
    """

    verb: Verb
    where: str = ""
    content: str = ""
    piece: int = 0
    is_oldest: bool = False
    copies: tuple[Copy, ...] = ()
    pieces: int = 1
    operands: tuple[Action, ...] = ()
    pending: int = 0


def wait(edge: str) -> Action:
    return Action(Verb.WAIT, edge)


def wait_all(edge: str) -> Action:
    """Wait for the next phase of each of the edge's barriers, before the role's CTA may exit."""
    return Action(Verb.WAIT_ALL, edge)


def again(edge: str) -> Action:
    """Wait for the phase of an edge that was waited for last."""
    return Action(Verb.AGAIN, edge)


def arrive(edge: str) -> Action:
    """Signal an edge; where tcgen05.commit does so, when the MMAs issued so far are done."""
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


def fill(ring: str, *copies: Copy | str, pieces: int = 1) -> Action:
    """Wait for a free buffer and copy its pieces into it."""
    made = tuple(Copy(copy) if isinstance(copy, str) else copy for copy in copies)
    content = " ".join(copy.content for copy in made)
    return Action(Verb.FILL, ring, content, copies=made, pieces=pieces)


def multiply(product: str, *operands: Action) -> Action:
    """Issue an MMA, a group, which uses its operands until done; registers are none."""
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


def add(ring: str, content: str) -> Action:
    """Add to the step before's buffer, signalled next; a tile's first step overwrites it."""
    return Action(Verb.ADD, ring, content)


def extend(ring: str, content: str) -> Action:
    """Add to what an MMA before it has made of the same step."""
    return Action(Verb.EXTEND, ring, content)


@dataclass(frozen=True)
class Act:
    """Part of a role's step. is_ahead: for the following one. of_tile_before: of its last step.
    beside: the act is done only where a step has (True) or lacks (False) a step beside it, see the
    module's docstring; None: everywhere."""

    actions: tuple[Action, ...]
    when: When = When.EACH
    is_ahead: bool = False
    of_tile_before: bool = False
    beside: bool | None = None


def act(*actions: Action, when: When = When.EACH, is_ahead: bool = False) -> Act:
    return Act(actions, when, is_ahead)


@dataclass(frozen=True)
class Role:
    """Use of the edges by a role, for the check of the plan.  In a tile without steps it does
    nothing.

    end: after the last tile.  parts: groups of its warps that do so, each by itself.  of: the role
    that it is such a group of, where these are not alike.  enter: in a tile with steps, before all
    else.  skip: instead of a step that it takes no part in, at a tile's beginning or end; idle: in
    a tile without any step that it takes part in, before it skips them.  claims: it lets the
    scheduler request the next tile when so many steps are left of one, at its beginning where it
    has fewer.  crosses: see the module's docstring.
    """

    name: str
    acts: tuple[Act, ...]
    end: tuple[Action, ...] = ()
    parts: int = 1
    of: str = ""
    enter: tuple[Action, ...] = ()
    skip: tuple[Action, ...] = ()
    idle: tuple[Action, ...] = ()
    claims: int | None = None
    crosses: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        if self.parts == 1:
            return (self.name,)
        return tuple(f"{self.name} {part}" for part in range(self.parts))

    @property
    def whole(self) -> str:
        """The role that edges name."""
        return self.of or self.name


@dataclass(frozen=True)
class StepTable:
    """The rings and roles of a kernel. meets: CTAs of a cluster wait for each other to exit."""

    rings: tuple[Ring, ...]
    roles: tuple[Role, ...]
    meets: bool = False

    @property
    def actions(self) -> tuple[tuple[When, Action], ...]:
        return tuple(
            (act.when, action) for role in self.roles for act in role.acts for action in act.actions
        )

    def is_of_tile(self, content: str) -> bool:
        """Return True if a content is loaded, or written by a role, once a tile."""
        return any(
            when is When.FIRST
            and (
                (action.verb is Verb.WRITE and action.content == content)
                or any(copy.content == content for copy in action.copies)
            )
            for when, action in self.actions
        )

    def results(self, ring: str) -> set[str]:
        """Return the contents that MMAs make in the buffers of a ring."""
        return {
            operand.content
            for _, action in self.actions
            for operand in action.operands
            if operand.where == ring and operand.verb in (Verb.WRITE, Verb.ADD, Verb.EXTEND)
        }

    def ring(self, name: str) -> Ring:
        return next(ring for ring in self.rings if ring.name == name)
