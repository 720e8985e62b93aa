"""Asynchronous operations as objects, and the policies that decide when they take effect.

An operation (TMA copy, run of MMAs, commit, CLC request) is *issued* by a warp, then *performed*
(its data moves) and *completed* (it signals). Operations of one queue take effect in the order of
their issue; all others in any order. Eager, lazy and random schedules are policies over the same
objects, so they are the same machine with other timing.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple


class Waiting:
    """Reason why lanes cannot go on.

    what: in words, used where `key` cannot describe itself. key: the object whose change wakes them
    (`Machine.wake`). lanes: which of the executing lanes wait, None for all. retry: whether the
    instruction is executed again on wake-up; otherwise the lanes go on behind it. instruction: set
    by the run loop, for reports.
    """

    __slots__ = ("what", "key", "lanes", "retry", "instruction")

    def __init__(self, what: str, key: Any, lanes: int | None = None, retry: bool = True) -> None:
        self.what = what
        self.key = key
        self.lanes = lanes
        self.retry = retry
        self.instruction: Any = None

    def describe(self) -> str:
        """Describe the object that is waited for and its present state."""
        describe = getattr(self.key, "describe", None)
        return f"{self.what}; {describe()}" if describe else self.what


#: Outcome of an instruction that is done but polls: the warp gives the others a turn.
YIELD = object()


class Touches(NamedTuple):
    """Accesses of an asynchronous operation, with the place of its issue.

    writes: (CTA, shared offset, bytes, shared address of the mbarrier signalled) of each tile
    written to shared memory. reads: (CTA, shared offset, bytes) read. mmas: the instructions of a
    tcgen05 run. cells: (CTA, first column, columns, lanes, 16-byte chunks of shared memory read, or
    None) of tcgen05.cp and shift. commits: shared addresses at which a commit arrives. stored,
    loaded: (tensor map, coordinates) or (start, bytes) of global memory written, None for a
    reduction, or read. descriptor: address of the tensor map that is used, 0 for none.
    """

    warp: Any
    instruction: Any
    writes: tuple = ()
    reads: tuple = ()
    mmas: Any = ()
    cells: tuple = ()
    commits: Any = ()
    stored: tuple | None = None
    loaded: tuple | None = None
    descriptor: int = 0


class AsyncOp:
    """One asynchronous operation.

    kind: its effect in the instruction table. perform: moves the data and, without a `complete` of
    its own, signals. complete: signals, after `perform`. queue: operations with an equal, not-None
    key take effect in the order of issue. `performed` and `completed` tell the state; `cluster` is
    the one whose warp issued it. `touches` tells the sanitizer what the operation accesses (see
    `Touches`).
    """

    __slots__ = (
        "kind", "perform", "queue", "complete", "performed", "completed", "cluster", "touches",
    )  # fmt: skip

    def __init__(
        self,
        kind: Any,
        perform: Callable[[], None],
        queue: Hashable | None = None,
        complete: Callable[[], None] | None = None,
    ) -> None:
        self.kind = kind
        self.perform = perform
        self.queue = queue
        self.complete = complete
        self.performed = False
        self.completed = False
        self.cluster: Any = None
        self.touches: Touches | None = None

    @property
    def state(self) -> str:
        """ "issued", "performed" or "completed"."""
        return "completed" if self.completed else "performed" if self.performed else "issued"


class EagerPolicy:
    """Every operation takes effect when it is issued; warps run in a fixed order."""

    name = "eager"
    seed: int | None = None
    #: True if operations take effect where they are issued; native code may then perform them.
    at_once = True
    #: True if the order of warps is random: the run loop then calls `choose` and `interrupts`.
    random_order = False

    def __init__(self) -> None:
        self.perform: Callable[[AsyncOp], None] = _unbound
        self.complete: Callable[[AsyncOp], None] = _unbound

    def bind(self, perform: Callable[[AsyncOp], None], complete: Callable[[AsyncOp], None]) -> None:
        """Set what performs and what completes an operation; called once by the machine."""
        self.perform, self.complete = perform, complete

    def submit(self, operation: AsyncOp) -> None:
        """Take an issued operation."""
        self.perform(operation)
        self.complete(operation)

    def step(self) -> bool:
        """Let one operation take effect because no warp can run; False if none is pending."""
        return False

    def before_turn(self) -> None:
        """Called before a warp runs, with a random order only."""

    def pending(self) -> list[AsyncOp]:
        """Operations issued and not completed."""
        return []

    def choose(self, count: int) -> int:
        """Index of the warp to run among `count` ready ones, with a random order only."""
        return 0

    def interrupts(self) -> bool:
        """Return True if the running warp loses its turn after an instruction, in a random
        order."""
        return False

    def spurious_failure(self) -> bool:
        """Return True if a try_wait that could succeed shall return false (PTX ISA: it may)."""
        return False

    def cancelled_cluster(self, first: int, end: int) -> int | None:
        """The cluster that a cancel request gets of those that have not been launched.

        They are among `first` to `end` - 1. None: the request fails although clusters are left.
        """
        return first


def _unbound(operation: AsyncOp) -> None:
    raise RuntimeError("the policy belongs to no machine")


class LazyPolicy(EagerPolicy):
    """Operations take effect as late as allowed: when no warp can run, oldest first."""

    name = "lazy"
    at_once = False

    def __init__(self) -> None:
        super().__init__()
        self._queues: dict[Hashable, deque[AsyncOp]] = {}
        self._count = 0

    def submit(self, operation: AsyncOp) -> None:
        self._count += 1
        key = ("alone", self._count) if operation.queue is None else operation.queue
        self._queues.setdefault(key, deque()).append(operation)

    def _advance(self, key: Hashable, together: bool = True) -> None:
        """Perform the head of a queue, or complete it if it has been; `together`: both."""
        queue = self._queues[key]
        operation = queue[0]
        if not operation.performed:
            self.perform(operation)
            if not together and operation.complete is not None:
                return
        queue.popleft()
        if not queue:
            del self._queues[key]
        self.complete(operation)

    def step(self) -> bool:
        if not self._queues:
            return False
        self._advance(next(iter(self._queues)))
        return True

    def pending(self) -> list[AsyncOp]:
        return [operation for queue in self._queues.values() for operation in queue]


#: Share of cancel requests that a seeded schedule refuses although clusters are left.
REFUSED_CANCELS = 0.1


class RandomPolicy(LazyPolicy):
    """A seeded adversary: random warp order, effects early or late, spurious failures.

    A cancel request gets any cluster that has not been launched, or is refused: no order is
    promised, and the hardware may need the SM for another kernel.

    The run is cut into stretches; each draws how likely pending operations are to take effect
    before a turn, so that some stretches are nearly eager and others nearly lazy. Data may move
    long before its completion is signalled. One seed gives one run.
    """

    name = "random"
    random_order = True
    #: Turns of warps in one stretch.
    STRETCH = 100

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self._random = random.Random(seed)
        self._launch_control = random.Random(f"launch control {seed}")
        self._left = 0
        self._likelihood = self._interruption = 0.0

    def before_turn(self) -> None:
        draw = self._random.random
        if self._left == 0:
            self._left = self.STRETCH
            self._likelihood = self._random.choice((0.02, 0.2, 0.5, 0.95))
            self._interruption = self._random.choice((0.0, 0.05, 0.5))
        self._left -= 1
        while self._queues and draw() < self._likelihood:
            self.step()

    def step(self) -> bool:
        if not self._queues:
            return False
        keys = list(self._queues)
        self._advance(keys[int(self._random.random() * len(keys))], self._random.random() < 0.5)
        return True

    def choose(self, count: int) -> int:
        return int(self._random.random() * count)

    def interrupts(self) -> bool:
        return self._random.random() < self._interruption

    def spurious_failure(self) -> bool:
        return self._random.random() < 0.05

    def cancelled_cluster(self, first: int, end: int) -> int | None:
        if self._launch_control.random() < REFUSED_CANCELS:
            return None
        return self._launch_control.randrange(first, end)
