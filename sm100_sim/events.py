"""Asynchronous operations as objects, and the policies that decide when they are performed.

An operation (TMA copy, run of MMAs, commit, CLC request) is *issued* by a warp, *performed* once,
moving its data and then signalling, and with that *completed*. Operations of one queue are
performed in the order of their issue; all others may be performed in any order. Eager, lazy and
random schedules are policies over the same objects.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any


class Waiting:
    """Why lanes cannot go on: `what` in words, `key` the object whose change wakes them."""

    __slots__ = ("what", "key")

    def __init__(self, what: str, key: Any) -> None:
        self.what = what
        self.key = key


class AsyncOp:
    """One asynchronous operation.

    kind: for reports. perform: moves the data and signals. queue: operations with an equal,
    not-None key are performed in the order of issue. performed: whether that has happened.
    """

    __slots__ = ("kind", "perform", "queue", "performed")

    def __init__(
        self, kind: str, perform: Callable[[], None], queue: Hashable | None = None
    ) -> None:
        self.kind = kind
        self.perform = perform
        self.queue = queue
        self.performed = False


class EagerPolicy:
    """Every operation is performed when it is issued; ready warps run in turn."""

    seed: int | None = None

    def submit(self, operation: AsyncOp, run: Callable[[AsyncOp], None]) -> None:
        """Take an issued operation; `run` performs it."""
        run(operation)

    def before_turn(self, run: Callable[[AsyncOp], None]) -> None:
        """Called before a warp runs."""

    def progress(self, run: Callable[[AsyncOp], None]) -> bool:
        """Perform something although no warp can run; False if nothing is pending."""
        return False

    def pending(self) -> list[AsyncOp]:
        """Operations issued and not performed."""
        return []

    def pick(self, ready: deque) -> Any:
        """Take the next warp out of the nonempty deque of ready ones."""
        return ready.popleft()

    def interrupts(self) -> bool:
        """Whether the running warp loses its turn after an instruction."""
        return False

    def spurious_failure(self) -> bool:
        """Whether a try_wait that could succeed returns false."""
        return False


class LazyPolicy(EagerPolicy):
    """Operations are performed as late as allowed: when no warp can run, oldest first."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[AsyncOp]] = {}
        self._count = 0

    def submit(self, operation: AsyncOp, run: Callable[[AsyncOp], None]) -> None:
        self._count += 1
        key = ("single", self._count) if operation.queue is None else operation.queue
        self._queues.setdefault(key, deque()).append(operation)

    def _perform(self, key: Hashable, run: Callable[[AsyncOp], None]) -> None:
        queue = self._queues[key]
        operation = queue.popleft()
        if not queue:
            del self._queues[key]
        run(operation)

    def progress(self, run: Callable[[AsyncOp], None]) -> bool:
        if not self._queues:
            return False
        self._perform(next(iter(self._queues)), run)
        return True

    def pending(self) -> list[AsyncOp]:
        return [operation for queue in self._queues.values() for operation in queue]


class RandomPolicy(LazyPolicy):
    """A seeded adversary: random warp order, completions early or late, spurious failures.

    Each stretch of the run draws how likely pending operations are to be performed before a turn,
    so that some stretches are nearly eager and others nearly lazy. One seed gives one run.
    """

    STRETCH = 200

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self._random = random.Random(seed)
        self._left = 0
        self._likelihood = 0.0

    def before_turn(self, run: Callable[[AsyncOp], None]) -> None:
        if self._left == 0:
            self._left = self.STRETCH
            self._likelihood = self._random.choice((0.02, 0.2, 0.5, 0.95))
        self._left -= 1
        while self._queues and self._random.random() < self._likelihood:
            self.progress(run)

    def progress(self, run: Callable[[AsyncOp], None]) -> bool:
        if not self._queues:
            return False
        self._perform(self._random.choice(list(self._queues)), run)
        return True

    def pick(self, ready: deque) -> Any:
        index = self._random.randrange(len(ready))
        ready.rotate(-index)
        return ready.popleft()

    def interrupts(self) -> bool:
        return self._random.random() < 0.1

    def spurious_failure(self) -> bool:
        return self._random.random() < 0.05
