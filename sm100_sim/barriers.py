"""mbarriers, named barriers and the cluster barrier: state and rules, without instructions.

PTX ISA 9.7.13.15 (mbarrier), 9.7.13.1 (barrier), 9.7.13.4 (barrier.cluster).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import BarrierError

#: Largest expected arrival count and largest magnitude of the tx-count (PTX ISA 9.7.13.15.1).
MAX_COUNT = (1 << 20) - 1


class MBarrier:
    """One mbarrier object in shared memory.

    A phase completes when no arrival is pending and the tx-count is 0; then the phase number
    grows and the expected arrivals are pending again. `wake` is called at each completion.
    """

    __slots__ = ("address", "expected", "pending", "transactions", "phase", "_wake")

    def __init__(self, address: int, count: int, wake: Callable[[Any], None]) -> None:
        if not 1 <= count <= MAX_COUNT:
            raise BarrierError(
                f"mbarrier.init with count {count}; accepted are 1 to {MAX_COUNT}"
            )
        self.address = address
        self.expected = count
        self.pending = count
        self.transactions = 0
        self.phase = 0
        self._wake = wake

    def describe(self) -> str:
        """State in words."""
        return (
            f"mbarrier at shared offset {self.address & 0xFFFFFF:#x} of CTA rank "
            f"{self.address >> 24}: phase {self.phase} (parity {self.phase & 1}), "
            f"{self.pending} of {self.expected} arrivals pending, {self.transactions} bytes pending"
        )

    def _settle(self) -> None:
        if self.pending == 0 and self.transactions == 0:
            self.phase += 1
            self.pending = self.expected
            self._wake(self)

    def arrive(self, count: int = 1) -> int:
        """`count` arrivals; returns the phase they belong to."""
        phase = self.phase
        if count < 1 or count > self.pending:
            raise BarrierError(
                f"{count} arrivals, but only {self.pending} are pending in this phase; "
                + self.describe()
            )
        self.pending -= count
        self._settle()
        return phase

    def arrive_drop(self, count: int = 1) -> int:
        """`count` arrivals that no longer take part in later phases."""
        if count > self.expected - 1 and count > self.pending:
            raise BarrierError(f"arrive_drop of {count}; {self.describe()}")
        self.expected -= count
        return self.arrive(count)

    def expect_tx(self, nbytes: int) -> None:
        """Expect `nbytes` more."""
        total = self.transactions + nbytes
        if abs(total) > MAX_COUNT:
            raise BarrierError(
                f"tx-count would become {total}; its range is +-{MAX_COUNT}; {self.describe()}"
            )
        self.transactions = total
        self._settle()

    def complete_tx(self, nbytes: int) -> None:
        """`nbytes` have arrived; they may come before they are expected."""
        self.expect_tx(-nbytes)

    def parity_complete(self, parity: int) -> bool:
        """try_wait.parity: whether the phase of this parity, current or preceding, is complete."""
        return (self.phase & 1) != (parity & 1)

    def phase_complete(self, phase: int) -> bool:
        """try_wait with a state: whether the phase the state was taken in is complete."""
        return self.phase > phase


class NamedBarrier:
    """One of the 16 barriers of a CTA: threads arrive, and those that sync also wait."""

    __slots__ = ("number", "expected", "arrived", "generation", "_tokens", "_wake", "_votes",
                 "results")

    def __init__(self, number: int, wake: Callable[[Any], None]) -> None:
        self.number = number
        self.expected = 0
        self.arrived = 0
        self.generation = 0
        self.results: dict[int, tuple[int, int]] = {}
        self._tokens: dict[tuple[int, int], int] = {}
        self._votes = [0, 0]
        self._wake = wake

    def describe(self) -> str:
        return (
            f"barrier {self.number}: {self.arrived} of {self.expected} threads have arrived"
        )

    def arrive(self, threads: int, expected: int, vote: tuple[int, int] = (0, 0)) -> int:
        """`threads` threads of a barrier of `expected`; returns the generation they are in.

        vote: (threads with true predicate, threads that voted), for reductions.
        """
        if expected < 1 or expected % 32:
            raise BarrierError(
                f"barrier {self.number} with a thread count of {expected}; accepted are "
                "positive multiples of 32"
            )
        if self.arrived and self.expected != expected:
            raise BarrierError(
                f"barrier {self.number} with a thread count of {expected}, while "
                f"{self.arrived} threads have arrived at it with a count of {self.expected}"
            )
        generation = self.generation
        self.expected = expected
        self.arrived += threads
        self._votes[0] += vote[0]
        self._votes[1] += vote[1]
        if self.arrived > expected:
            raise BarrierError(
                f"barrier {self.number}: {self.arrived} threads arrived, {expected} were expected"
            )
        if self.arrived == expected:
            self.results = {generation: (self._votes[0], self._votes[1])}
            self.arrived, self._votes = 0, [0, 0]
            self.generation += 1
            self._wake(self)
        return generation

    def sync(self, warp: int, lanes: int, expected: int, vote: tuple[int, int] = (0, 0)) -> bool:
        """Arrive once, then tell whether the generation arrived in is complete; retried."""
        token = self._tokens.get((warp, lanes))
        if token is None:
            token = self.arrive(lanes.bit_count(), expected, vote)
            self._tokens[warp, lanes] = token
        if self.generation == token:
            return False
        del self._tokens[warp, lanes]
        return True


class ClusterBarrier:
    """The cluster's hardware barrier: every thread that has not exited arrives, then waits."""

    __slots__ = ("threads", "arrived", "generation", "_tokens", "_wake")

    def __init__(self, threads: int, wake: Callable[[Any], None]) -> None:
        self.threads = threads
        self.arrived = 0
        self.generation = 0
        self._tokens: dict[tuple[int, int, int], int] = {}
        self._wake = wake

    def describe(self) -> str:
        return f"cluster barrier: {self.arrived} of {self.threads} threads have arrived"

    def arrive(self, rank: int, warp: int, lanes: int) -> None:
        """The lanes of a warp of CTA `rank` arrive; each must wait before it arrives again."""
        for lane in _bits(lanes):
            if (rank, warp, lane) in self._tokens:
                raise BarrierError(
                    f"barrier.cluster.arrive twice without a wait between, lane {lane}"
                )
            self._tokens[rank, warp, lane] = self.generation
        self.arrived += lanes.bit_count()
        self._settle()

    def wait(self, rank: int, warp: int, lanes: int) -> bool:
        """Whether the phase these lanes arrived in is complete."""
        for lane in _bits(lanes):
            token = self._tokens.get((rank, warp, lane))
            if token is None:
                raise BarrierError(
                    f"barrier.cluster.wait without an arrive before it, lane {lane}"
                )
            if token == self.generation:
                return False
        for lane in _bits(lanes):
            del self._tokens[rank, warp, lane]
        return True

    def exit(self, threads: int) -> None:
        """Threads have exited: they count as arrived from now on."""
        self.threads -= threads
        self._settle()

    def _settle(self) -> None:
        if self.threads and self.arrived == self.threads:
            self.arrived = 0
            self.generation += 1
            self._wake(self)


def _bits(lanes: int):
    while lanes:
        low = lanes & -lanes
        yield low.bit_length() - 1
        lanes ^= low
