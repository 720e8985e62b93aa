"""The clusters of a launch, and which kernels let several machines share them.

Clusters of a kernel that only read what the host wrote, and write what no other cluster reads, may
run at the same time on several threads: native code runs without Python's lock. What can be
observed stays as with one thread: results, counts, findings, and which error is reported.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from sm100_sim.isa.table import row_of


class Grid:
    """Clusters by number, x fastest: each is taken once, by a machine or by a cancel request.

    progress: called with (clusters done, clusters in all), if not None.
    """

    def __init__(self, clusters: int) -> None:
        self.clusters = clusters
        self.progress: Callable[[int, int], None] | None = None
        self.done = 0
        self._next = 0
        self._end = clusters
        #: Cancelled, from `_next` on.
        self._cancelled: set[int] = set()
        self._lock = threading.Lock()

    def take(self) -> int | None:
        """The next cluster that has not been launched; None if there is none left."""
        with self._lock:
            return self._take(self._next)

    def cancel(self, choose: Callable[[int, int], int | None]) -> int | None:
        """A cluster that has not been launched and now never will be.

        choose: given the first and the end of the numbers that come into question, the one from
        which on to look for it, or None to refuse. Returns None if it refuses or none is left.
        """
        with self._lock:
            self._skip()
            if self._next == self._end:
                return None
            start = choose(self._next, self._end)
            return None if start is None else self._take(start)

    @property
    def exhausted(self) -> bool:
        """Return True if every cluster has been launched or cancelled."""
        with self._lock:
            self._skip()
            return self._next == self._end

    def _take(self, start: int) -> int | None:
        """The first cluster from `start` on, cyclically, that has not been taken."""
        self._skip()
        if self._next == self._end:
            return None
        number = max(start, self._next)
        while number in self._cancelled:
            number = number + 1 if number + 1 < self._end else self._next
        if number == self._next:
            self._next += 1
        else:
            self._cancelled.add(number)
        return number

    def _skip(self) -> None:
        """Step over cancelled clusters."""
        while self._next in self._cancelled:
            self._cancelled.remove(self._next)
            self._next += 1

    def close(self) -> None:
        """No more clusters are launched."""
        with self._lock:
            self._end = self._next
            self._cancelled.clear()

    def count_done(self) -> None:
        """One more cluster is done."""
        with self._lock:
            self.done += 1
            if self.progress is not None:
                self.progress(self.done, self.clusters)


def clusters_are_independent(instructions: Iterable[Any]) -> bool:
    """Return True if nothing in a kernel lets its clusters communicate, or makes their order
    matter.

    Atomics and reductions in global memory, global accesses that are not weak (volatile, relaxed,
    acquire, release) or bypass caches (cv, wt), fences of GPU or system scope and cluster launch
    control do. What is left are weak accesses; those of two clusters to one address, one of them a
    write, are then a data race (PTX ISA, memory consistency model), which no kernel may rely on. An
    access whose state space is not named counts as global.
    """
    return not any(row_of(i).ties.binds(i.modifiers) for i in instructions)
