"""The run loop of one cluster in native code (`machine` has the rules)."""

from __future__ import annotations

from .language import External, cycles, i32, native, ptr, u32, u64
from .layout import Cluster, Context
from .operands import lane_count

#: Reasons why `run` returns. TRAP: lanes are at a machine operation. EXIT: every lane has exited.
#: OUT_OF_BUDGET: that of backward branches is used up. FAULT: an access was refused. BLOCKED: every
#: lane that could run is blocked. DIVERGENCE: lanes wait for each other at different aligned
#: instructions. What `run_cluster` adds: no warp is ready; all ready ones only poll; the turn is
#: over; lanes of a warp that waits have exited (or, with the sanitizer, left accesses in the log).
(TRAP, EXIT, OUT_OF_BUDGET, FAULT, BLOCKED, DIVERGENCE, IDLE, POLLING, TURN_OVER,
 LANES_EXITED) = range(10)  # fmt: skip

run = External("run", i32, (ptr[Context],))


@native
def run_cluster(k: ptr[Cluster], budget: u64) -> i32:
    """Run the warps of a cluster in turn until Python is needed; `budget` as in `Context`.

    k.current goes on first, if there is one; k.stopped tells the warp that Python must look at.
    """
    started = cycles()
    kind = run_warps(k, budget)
    k.machine.all_ticks += cycles() - started
    return kind


@native
def run_warps(k: ptr[Cluster], budget: u64) -> i32:
    """Run the ready warps; return why that is over.  `run_cluster` counts its time."""
    while True:
        c = k.current
        if not c:
            if k.turn_over != 0:
                return TURN_OVER
            if k.waiting == 0:
                return IDLE
            if k.polls > k.waiting:
                return POLLING
            c = ptr[Context](k.ring[k.head])
            k.waiting -= 1
            k.head = u32(0) if k.head + 1 == k.capacity else k.head + 1
            k.current = c
            c.budget = budget
        kind = run(c)
        k.stopped = c.number
        if kind != BLOCKED:
            return kind
        c.queued = u32(0)
        k.polls = u32(0)
        k.current = ptr[Context](u64(0))
        if c.live != c.present or c.watch != 0 and ptr[u32](c.log)[0] != 0:
            return LANES_EXITED


@native
def count_operation(c: ptr[Context], block: u64, lanes: u32) -> None:
    """Count a machine operation that native code has done."""
    row = c.cluster.machine.operations + block * 2
    row[0] += 1
    row[1] += lane_count(lanes)
