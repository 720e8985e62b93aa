"""mbarriers, named barriers, the cluster barrier and the register pool: state and rules.

PTX ISA 9.3: "Parallel Synchronization and Communication Instructions: mbarrier", "bar, barrier",
"barrier.cluster"; "setmaxnreg". Nothing here knows of instructions; the machine operations are in
`isa.sync`. Every object calls its `wake` with itself when lanes that wait for it may go on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from sm100_sim.devices import REGISTER_FILE
from sm100_sim.errors import BarrierError
from sm100_sim.native.barriers import TRANSACTION_LIMIT as MAX_COUNT
from sm100_sim.native.barriers import change
from sm100_sim.native.calling import callable_of
from sm100_sim.native.layout import Barrier

NAMED_BARRIERS = 16
#: A CTA gets whole granules of registers per thread; at most 255 are named.
REGISTER_GRANULE = 8
MAX_REGISTERS = 255
_STATE_MARK = 0x5B


def _recorded(name: str, meaning: str) -> property:
    """A property whose value is in the native record."""
    return property(
        lambda self: getattr(self.record, name),
        lambda self, value: setattr(self.record, name, value),
        doc=meaning,
    )


class MBarrier:
    """One mbarrier object in shared memory.

    address: shared address (CTA rank << 24 | offset). A phase completes when no arrival is
    pending and the tx-count is 0; then `phase` grows by one and the expected arrivals are pending
    again. record: where the state is, for native code to work on it, too.
    """

    __slots__ = ("address", "record", "_wake")

    def __init__(
        self,
        address: int,
        count: int,
        wake: Callable[[Any], None],
        record: Barrier | None = None,
    ) -> None:
        if not 1 <= count <= MAX_COUNT:
            raise BarrierError(f"mbarrier.init with count {count}; accepted are 1 to {MAX_COUNT}")
        self.address = address
        self.record = Barrier() if record is None else record
        self.record.address = address
        self.expected = self.pending = count
        self.transactions = self.phase = 0
        self._wake = wake

    expected = _recorded("expected", "arrivals of a phase")
    pending = _recorded("pending", "arrivals still pending in the current phase")
    transactions = _recorded("transactions", "bytes that the current phase still waits for")
    phase = _recorded("phase", "phases completed")

    def describe(self) -> str:
        """State in words."""
        return (
            f"mbarrier at shared offset {self.address & 0xFFFFFF:#x} of CTA rank "
            f"{self.address >> 24}: phase {self.phase} (parity {self.phase & 1}), "
            f"{self.pending} of {self.expected} arrivals pending, {self.transactions} bytes pending"
        )

    def untouched(self) -> bool:
        """Return True if nothing has happened since the init."""
        return not self.phase and self.pending == self.expected and not self.transactions

    def _change(self, arrivals: int, nbytes: int) -> None:
        """Arrivals and bytes that the phase takes, by the routine that native code has for them.

        It wakes the warps that native code let wait.
        """
        record, phase = self.record, self.phase
        callable_of(change)(ctypes.addressof(record), arrivals, nbytes)
        if record.phase != phase:
            self._completed()

    def _completed(self) -> None:
        """A phase has been completed."""
        self._wake(self)

    def arrive(self, count: int = 1) -> int:
        """`count` arrivals (release); returns the state before them, see `state`."""
        pending = self.pending
        if not 1 <= count <= pending:
            raise BarrierError(
                f"{count} arrivals where {pending} are pending in this phase; {self.describe()}"
            )
        state = self.state()
        self._change(count, 0)
        return state

    def arrive_no_complete(self, count: int) -> int:
        """`count` arrivals that must not complete the phase."""
        if count >= self.pending:
            raise BarrierError(
                f"arrive.noComplete of {count} would complete the phase; {self.describe()}"
            )
        return self.arrive(count)

    def expect_arrivals(self, count: int) -> None:
        """`count` more arrivals pend in this phase (cp.async.mbarrier.arrive without .noinc)."""
        if self.pending + count > MAX_COUNT:
            raise BarrierError(f"{self.pending + count} arrivals would pend; {self.describe()}")
        self.pending += count

    def arrive_drop(self, count: int = 1) -> int:
        """`count` arrivals by threads that take no part in later phases."""
        if count > self.pending:
            raise BarrierError(f"arrive_drop of {count}; {self.describe()}")
        self.expected -= count
        return self.arrive(count)

    def expect_tx(self, nbytes: int) -> None:
        """Expect `nbytes` more in the current phase."""
        total = self.transactions + nbytes
        if not -MAX_COUNT <= total <= MAX_COUNT:
            raise BarrierError(
                f"the tx-count would become {total}; its range is +-{MAX_COUNT}; {self.describe()}"
            )
        self._change(0, nbytes)

    def complete_tx(self, nbytes: int) -> None:
        """`nbytes` have arrived; they may come before they are expected."""
        self.expect_tx(-nbytes)

    def parity_complete(self, parity: int) -> bool:
        """Return True if the phase of this parity, the current or the preceding one, is
        complete."""
        return (self.phase ^ parity) & 1 == 1

    def state(self) -> int:
        """The opaque 64-bit state of the current phase, as arrive returns it."""
        return _STATE_MARK << 56 | (self.phase & 0xFFFFFFFF) << 20 | self.pending

    def state_complete(self, state: int) -> bool:
        """Return True if the phase in which `state` was taken is complete.

        Raises BarrierError for a foreign value and for a phase before the preceding one, where the
        result is undefined.
        """
        behind = (self.phase - _phase_of(state)) & 0xFFFFFFFF
        if behind > 1:
            raise BarrierError(
                f"wait with a state of phase {_phase_of(state)}, which is neither the current nor "
                f"the preceding one; {self.describe()}"
            )
        return behind == 1


def _phase_of(state: int) -> int:
    if state >> 56 != _STATE_MARK:
        raise BarrierError(f"{state:#x} is not a state that mbarrier.arrive returned")
    return state >> 20 & 0xFFFFFFFF


def pending_count(state: int) -> int:
    """Arrivals that were pending when `state` was taken (mbarrier.pending_count)."""
    _phase_of(state)
    return state & MAX_COUNT


class NamedBarrier:
    """One of the 16 barriers of a CTA: threads arrive, and those that sync also wait.

    `expected` is the thread count of the round in progress; None means every thread of the CTA
    that has not exited. A warp counts as 32 threads, once all of its lanes that have not exited
    have come (on an H200 half a warp completes nothing until the other half exits).
    """

    __slots__ = (
        "number", "arrived", "expected", "partial", "_present", "_results", "_wake", "_ayes",
        "_votes",
    )  # fmt: skip

    def __init__(
        self, number: int, present: Callable[[], int], wake: Callable[[Any], None]
    ) -> None:
        self.number = number
        self.arrived = 0
        self.expected: int | None = None
        #: warp -> its lanes that have come while others have not
        self.partial: dict[Any, int] = {}
        self._present = present
        self._results: list[Callable[[int, int], None]] = []
        self._wake = wake
        self._ayes = self._votes = 0

    def describe(self) -> str:
        """State in words."""
        expected = self._present() if self.expected is None else self.expected
        return f"barrier {self.number}: {self.arrived} of {expected} threads have arrived"

    def come(self, warp: Any, lanes: int, expected: int | None) -> bool:
        """Lanes of a warp arrive at a barrier of `expected`; whether that completes it."""
        come = self.partial.get(warp, 0) | lanes
        if come & warp.live == warp.live:
            self.partial.pop(warp, None)
            return self.arrive(32, expected)
        self.arrive(0, expected)
        self.partial[warp] = come
        return False

    def lanes_exited(self, warp: Any) -> None:
        """Lanes of a warp have exited: it may have arrived with those that are left."""
        come = self.partial.get(warp)
        if come is not None and warp.live and come & warp.live == warp.live:
            del self.partial[warp]
            self.arrive(32, self.expected)

    def arrive(self, threads: int, expected: int | None) -> bool:
        """`threads` threads arrive at a barrier of `expected`; whether that completes it."""
        if expected is not None and (expected < 1 or expected % 32):
            raise BarrierError(
                f"barrier {self.number} with a thread count of {expected}; accepted are positive "
                "multiples of 32"
            )
        if (self.arrived or self.partial) and self.expected != expected:
            raise BarrierError(
                f"barrier {self.number} with a thread count of "
                f"{'all threads' if expected is None else expected}, while {self.arrived} threads "
                f"have arrived at it with {'all' if self.expected is None else self.expected}"
            )
        self.expected = expected
        self.arrived += threads
        return self.settle()

    def vote(self, ayes: int, votes: int, result: Callable[[int, int], None]) -> None:
        """Take part in a reduction: `result(ayes, votes)` gets the totals on completion."""
        self._ayes += ayes
        self._votes += votes
        self._results.append(result)

    def settle(self) -> bool:
        """Complete the round if everybody has arrived; also called when threads exit."""
        expected = self._present() if self.expected is None else self.expected
        if self.arrived < expected or not self.arrived:
            return False
        if self.arrived > expected:
            raise BarrierError(
                f"barrier {self.number}: {self.arrived} threads arrived, {expected} were expected"
            )
        for result in self._results:
            result(self._ayes, self._votes)
        self._results.clear()
        self.arrived = self._ayes = self._votes = 0
        self._wake(self)
        return True


class ClusterBarrier:
    """The cluster's hardware barrier: every thread that has not exited arrives, then waits."""

    __slots__ = ("threads", "arrived", "generation", "_tokens", "_wake")

    def __init__(self, threads: int, wake: Callable[[Any], None]) -> None:
        self.threads = threads
        self.arrived = 0
        self.generation = 0
        #: warp -> {generation: lanes that arrived in it and have not waited yet}
        self._tokens: dict[Any, dict[int, int]] = {}
        self._wake = wake

    def describe(self) -> str:
        """State in words."""
        return f"cluster barrier: {self.arrived} of {self.threads} threads have arrived"

    def arrive(self, warp: Any, lanes: int) -> None:
        """Lanes of a warp arrive; each must wait before it arrives again."""
        tokens = self._tokens.setdefault(warp, {})
        twice = lanes & _union(tokens)
        if twice:
            raise BarrierError(
                f"barrier.cluster.arrive twice without a wait between, by lanes {twice:#010x}"
            )
        tokens[self.generation] = tokens.get(self.generation, 0) | lanes
        self.arrived += lanes.bit_count()
        self._settle()

    def wait(self, warp: Any, lanes: int) -> int:
        """The lanes whose round is not complete yet; the others have waited with success."""
        tokens = self._tokens.get(warp, {})
        missing = lanes & ~_union(tokens)
        if missing:
            raise BarrierError(
                f"barrier.cluster.wait without an arrive before it, by lanes {missing:#010x}"
            )
        for generation in list(tokens):
            if generation < self.generation:
                tokens[generation] &= ~lanes
                if not tokens[generation]:
                    del tokens[generation]
        return lanes & tokens.get(self.generation, 0)

    def exit(self, warp: Any, lanes: int) -> None:
        """Lanes have exited: nobody waits for them any more."""
        token = self._tokens.get(warp, {}).get(self.generation, 0)
        self.arrived -= (token & lanes).bit_count()
        if token:
            self._tokens[warp][self.generation] = token & ~lanes
        self.threads -= lanes.bit_count()
        self._settle()

    def _settle(self) -> None:
        if self.threads and self.arrived == self.threads:
            self.arrived = 0
            self.generation += 1
            self._wake(self)


def _union(tokens: dict[int, int]) -> int:
    found = 0
    for lanes in tokens.values():
        found |= lanes
    return found


def whole_granules(registers: int) -> int:
    """Registers a thread as the hardware allots them."""
    return -(-registers // REGISTER_GRANULE) * REGISTER_GRANULE


def most_registers(threads: int, ctas_per_sm: int = 1) -> int:
    """Registers that each of a CTA's threads can be launched with at most, in whole granules.

    The warps are dealt out to the quarters of the SM, each of which has a quarter of the file.
    """
    warps = ctas_per_sm * -(-threads // 32)
    of_a_quarter = -(-warps // RegisterPool.QUARTERS)
    share = REGISTER_FILE // RegisterPool.QUARTERS // (32 * of_a_quarter)
    return min(share, MAX_REGISTERS + 1) // REGISTER_GRANULE * REGISTER_GRANULE


class RegisterPool:
    """Registers of one CTA that setmaxnreg moves between its warps.

    per_thread: registers that each thread is launched with, the kernel's own number. Each of the
    SM's four quarters has a pool of its own, for the warps whose number has its remainder by four.
    The pools begin empty: what the SM's register file has left over belongs to nobody, and a warp
    that exits takes its registers along (all measured on an H200, docs/facts.md).
    """

    __slots__ = ("free", "_launched", "_warps", "_counts", "_wake")

    QUARTERS = 4

    def __init__(self, warps: int, per_thread: int, wake: Callable[[Any], None]) -> None:
        self.free = [0] * self.QUARTERS
        self._launched = per_thread
        self._warps = warps
        self._counts: dict[int, int] = {}
        self._wake = wake

    def describe(self) -> str:
        """State in words."""
        launched = whole_granules(self._launched)
        total = 32 * self._warps * launched
        free = str(self.free[0]) if len(set(self.free)) == 1 else " / ".join(map(str, self.free))
        return (
            f"{free} registers are free in the CTA's pool of each quarter of the SM (warp number "
            f"modulo {self.QUARTERS}); the launch gave the CTA {total}, {launched} a thread, "
            "and setmaxnreg moves only those"
        )

    def _held(self, warp: int) -> int:
        return self._counts.get(warp, self._launched)

    def increase(self, warp: int, count: int) -> bool:
        """Give a warp `count` registers per thread; False while the pool lacks them."""
        held = self._held(warp)
        if count < held:
            raise BarrierError(
                f"setmaxnreg.inc to {count} registers; the warp has {held}, and must have no more "
                "than it asks for (the hardware ends the kernel with an illegal instruction)"
            )
        wanted = 32 * (count - whole_granules(held))
        if wanted > self.free[warp % self.QUARTERS]:
            return False
        self.free[warp % self.QUARTERS] -= wanted
        self._counts[warp] = count
        return True

    def decrease(self, warp: int, count: int) -> None:
        """Leave a warp `count` registers per thread and put the rest into the pool."""
        held = self._held(warp)
        if count > held:
            raise BarrierError(
                f"setmaxnreg.dec to {count} registers; the warp has {held}, and must have as many "
                "or more (the hardware ends the kernel with an illegal instruction)"
            )
        self.free[warp % self.QUARTERS] += 32 * (whole_granules(held) - count)
        self._counts[warp] = count
        self._wake(self)
