"""The machine that runs one launch: the grid's clusters, and the loop that gives warps turns.

A cluster is resident from its launch until its last warp has exited; `resident` of them are at
once, and the next of the grid takes the place of one that is done. A warp runs in native code
until it must wait, exits, or polls; whatever changes a barrier wakes exactly the lanes that wait
for it. When no warp can run, the policy lets a pending asynchronous operation take effect; when
there is none, the launch hangs, and the error lists who waits for what.

In a fixed order one cluster runs until nothing in it can go on (or it requested the next cluster of
the grid), because its state then stays in the CPU's caches. A random order takes any ready warp of
any resident cluster.
"""

from __future__ import annotations

import functools
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any

from sm100_sim.errors import Hang, SimulationError
from sm100_sim.native.loop import (
    DIVERGENCE,
    EXIT,
    IDLE,
    LANES_EXITED,
    OUT_OF_BUDGET,
    POLLING,
    TRAP,
)
from sm100_sim.state.barriers import MBarrier
from sm100_sim.state.events import YIELD, AsyncOp, EagerPolicy, Waiting
from sm100_sim.state.launch import LaunchConfig
from sm100_sim.state.memory import GlobalMemory
from sm100_sim.state.warp import DEFAULT_BUDGET, Pages
from sm100_sim.targets import limits_of

from .grid import Grid
from .in_step import in_step, perform_natively
from .limits import check_launch, registers_at_launch
from .native_state import NativeCluster, NativeLaunch
from .observer import Observer
from .residency import Cluster, Cta, ResidentWarp
from .stops import hang_of, stop_error

#: Rounds of polling in which nothing else happens before a launch counts as hanging; a warp that
#: has used up its budget of backward branches counts for many.
POLLING_ROUNDS = 100_000
ROUNDS_OF_A_BUDGET = 50


class Machine:
    """One launch of one kernel.

    compiled: the kernel translated to native code. config: grid, block, cluster, dynamic shared
    memory. memory: what it may touch. resident: most clusters at once. policy: when asynchronous
    operations take effect and in which order warps run. observers: who looks on; a machine
    operation goes through the executors of the last one first. grid: the clusters, where other
    machines run some of them.

    Native code does machine operations by itself in a fixed order of warps, unless an observer
    must see each of them in Python (`Observer.table`).

    counters: bytes and requests counted by instructions. seconds: of processor time, by what it
    was spent on (`report.Report.seconds`).
    """

    def __init__(
        self,
        compiled: Any,
        config: LaunchConfig,
        memory: GlobalMemory,
        resident: int,
        policy: EagerPolicy,
        observers: Iterable[Observer] = (),
        grid: Grid | None = None,
    ) -> None:
        self.compiled = compiled
        self.config = config
        self.limits = limits_of(compiled.kernel.target)
        self.memory = memory
        self.policy = policy
        self.observers = tuple(observers)
        self.counters: Counter[str] = Counter()
        self._found_in: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        self.threads = math.prod(config.block)
        self.cluster_size = math.prod(config.cluster)
        self.explicit_cluster = (
            config.explicit_cluster or self.cluster_size > 1 or compiled.kernel.explicit_cluster
        )
        self.shared_bytes = compiled.kernel.dynamic_shared_offset + config.dynamic_smem
        check_launch(compiled, config, self.threads, self.shared_bytes)
        self.registers_at_launch = registers_at_launch(compiled, config)
        self.cluster_grid = tuple(g // c for g, c in zip(config.grid, config.cluster, strict=True))
        self.clusters = math.prod(self.cluster_grid)
        self.grid = Grid(self.clusters) if grid is None else grid
        self.resident = self.limit = min(resident, self.clusters)
        self.pages = Pages()
        self.counts = compiled.new_counters()
        self.native = NativeLaunch(len(compiled.kernel.blocks))
        for observer in self.observers:
            observer.attach(self)
        self._table = self._choose_table()
        #: True if native code does machine operations by itself.
        self.by_itself = self._table is not compiled.table
        self._at_once = policy.at_once and self.by_itself
        self._budget = self._choose_budget()
        self._executors = self._bind_executors()
        #: Machine operations done in Python, by block: [executions by a warp, lanes].
        self._operations = [[0, 0] for _ in compiled.block_instruction]
        policy.bind(self._perform, self._complete)
        self._resident: dict[int, Cluster] = {}
        #: Clusters with a turn to come, in order; a number stands for one that has not begun.
        self._turns: deque[Cluster | int] = deque()
        self._polling: list[Cluster] = []
        #: Ready warps of all clusters, for a random order.
        self._ready: list[ResidentWarp] = []
        self._waiters: dict[int, list[tuple[ResidentWarp, int]]] = {}
        self._in_order = not policy.random_order
        self._alive = 0
        self._idle = 0
        self._cluster: Cluster | None = None

    def _choose_table(self) -> Any:
        """The block table: which machine operations native code does, and by which routines."""
        compiled = self.compiled
        if self.policy.random_order:
            return compiled.table
        tables = [observer.table() for observer in self.observers] or [compiled.native_table]
        # Two observers need not have routines in common.
        return compiled.table if len(tables) > 1 or tables[0] is None else tables[0]

    def _choose_budget(self) -> int:
        asked = [observer.budget for observer in self.observers if observer.budget is not None]
        return DEFAULT_BUDGET if self.by_itself else min(asked, default=DEFAULT_BUDGET)

    def _bind_executors(self) -> list[Any]:
        """Return the Python executor of each block's machine operation."""
        executors = self.compiled.executors
        for observer in self.observers:
            executors = observer.around(executors)
        found = [executors[instruction.index] for instruction in self.compiled.block_instruction]
        if not self._at_once:
            return found
        return [
            execute and in_step(self, instruction, execute)
            for instruction, execute in zip(self.compiled.block_instruction, found, strict=True)
        ]

    def cluster_position(self, number: int) -> tuple[int, int, int]:
        """Cluster coordinates of the `number`-th cluster of the grid, x fastest."""
        x, y, _ = self.cluster_grid
        return number % x, number // x % y, number // (x * y)

    def position_inside(self, rank: int) -> tuple[int, int, int]:
        """Coordinates in its cluster of the CTA of a rank."""
        x, y, _ = self.config.cluster
        return rank % x, rank // x % y, rank // (x * y)

    def ctaid(self, number: int, rank: int) -> tuple[int, int, int]:
        """Coordinates in the grid of the CTA of a rank in the `number`-th cluster."""
        position, inside = self.cluster_position(number), self.position_inside(rank)
        x, y, z = (p * c + i for p, c, i in zip(position, self.config.cluster, inside, strict=True))
        return x, y, z

    def new_queues(self) -> tuple[NativeCluster, Any]:
        """Return (native state of a new cluster with its queue of ready warps, queue of ready
        warps): that queue, or one list for all clusters in a random order."""
        warps = self.cluster_size * -(-self.threads // 32)
        queue = NativeCluster(self.native, self.cluster_size, warps, self.shared_bytes)
        return queue, queue if self._in_order else self._ready

    # ------------------------------------------------------------ called by instructions

    def new_mbarrier(self, cta: Cta, address: int, count: int) -> MBarrier:
        """The object of an mbarrier that a CTA initialises."""
        wake = functools.partial(self._wake_barrier, cta.cluster)
        record = cta.cluster.queue.new_barrier(address)
        for observer in self.observers:
            barrier = observer.new_mbarrier(address, count, wake, record)
            if barrier is not None:
                return barrier
        return MBarrier(address, count, wake, record)

    def end_mbarriers(self, cta: Cta, address: int | None) -> None:
        """The mbarrier at a shared address of a CTA, or all of them for None, is gone."""
        cta.cluster.queue.end_barriers(cta.rank, address)

    def learn_tensor_map(self, pointer: int) -> None:
        """A copy by the TMA descriptor at an address has gone well: native code may use it."""
        if self.native.learn(self, pointer):
            for observer in self.observers:
                observer.tensor_map_learned()

    def current_warp(self) -> ResidentWarp | None:
        """The warp that runs now, None between two."""
        cluster = self._cluster
        return None if cluster is None else cluster.queue.current_of(cluster.warps)

    def submit(self, operation: AsyncOp) -> None:
        """Issue an asynchronous operation."""
        for observer in self.observers:
            observer.issued(operation)
        operation.cluster = self._cluster
        self.policy.submit(operation)

    def wake(self, key: Any) -> None:
        """Something lanes may wait for has changed: let those who wait for `key` go on."""
        waiting = self._waiters.pop(id(key), None)
        if waiting is not None:
            self._idle = 0
            for warp, lanes in waiting:
                warp.unblock(lanes)
                if not warp.queued:
                    self._enqueue(warp)

    def _wake_barrier(self, cluster: Cluster, barrier: MBarrier) -> None:
        """A phase has been completed outside the run loop, which may have woken warps."""
        record, queue = barrier.record, cluster.queue.record
        if queue.progress:
            queue.progress = self._idle = cluster.polls = 0
            if not cluster.queued and cluster is not self._cluster:
                cluster.queued = True
                self._turns.append(cluster)
        if record.watched:
            record.watched = 0
            self.wake(barrier)

    def finding(self, text: str) -> None:
        """Record something wrong that does not end the run; the same text once."""
        cluster = -1 if self._cluster is None else self._cluster.id
        self._found_in[text] = min(cluster, self._found_in.get(text, cluster))

    @property
    def findings(self) -> list[str]:
        """Things that are wrong on hardware although this run could go on, by cluster."""
        return sorted(self._found_in, key=lambda text: (self._found_in[text], text))

    def all_findings(self) -> list[str]:
        """Return the findings of the launch's report."""
        found = self.findings
        for observer in self.observers:
            found = observer.findings(found)
        return found

    def end_turn(self) -> None:
        """The running cluster gives the others a turn before it goes on."""
        if self._cluster is not None:
            self._cluster.queue.record.turn_over = 1

    def cancel_cluster(self) -> tuple[int, int, int] | None:
        """Take a cluster that has not been launched, as the policy chooses, out of the grid.

        Returns the ctaid of its first CTA, or None if all have been launched or the policy refuses.
        """
        number = self.grid.cancel(self.policy.cancelled_cluster)
        if number is None:
            self.counters["clc.refused"] += not self.grid.exhausted
            return None
        position = self.cluster_position(number)
        self.grid.count_done()
        self.counters["clc.stolen"] += 1
        x, y, z = (p * c for p, c in zip(position, self.config.cluster, strict=True))
        return x, y, z

    # ------------------------------------------------------------ the run loop

    def run(self) -> None:
        """Run the launch to its end.

        Raises a SimulationError, with what was found before, at the first thing that ends it.
        """
        started = time.thread_time()
        try:
            self._launch_clusters()
            if self._in_order:
                self._run_in_order()
            else:
                self._run_random()
            for observer in self.observers:
                observer.run_ends()
        except (SimulationError, KeyboardInterrupt) as ended:
            error: Any = ended
            error.findings = tuple(self.all_findings())
            raise
        self.seconds = self.native.account(self.counters, time.thread_time() - started)
        for counts, native in zip(self._operations, self.native.done.tolist(), strict=True):
            counts[0] += native[0]
            counts[1] += native[1]

    def _launch_clusters(self) -> None:
        while self._alive < self.limit and (number := self.grid.take()) is not None:
            self._alive += 1
            if self._in_order:
                self._turns.append(number)
            else:
                self._begin(number)

    def _begin(self, number: int) -> Cluster:
        cluster = self._resident[number] = Cluster(self, number)
        cluster.queue.attach(cluster, self._table, self._at_once)
        for observer in self.observers:
            observer.cluster_begins(cluster)
        cluster.ready.extend(cluster.warps)
        return cluster

    def _enqueue(self, warp: ResidentWarp) -> None:
        warp.queued = True
        cluster = warp.cta.cluster
        cluster.polls = 0
        cluster.ready.append(warp)
        if self._in_order and not cluster.queued and cluster is not self._cluster:
            cluster.queued = True
            self._turns.append(cluster)

    def _run_in_order(self) -> None:
        turns, policy = self._turns, self.policy
        while self._resident or turns:
            if turns:
                cluster = turns.popleft()
                if isinstance(cluster, int):
                    cluster = self._begin(cluster)
                cluster.queued = False
                self._run_cluster(cluster)
            elif not policy.step():
                self._resume_polling()

    def _resume_polling(self) -> None:
        """Nothing can go on but clusters that poll: let them look again."""
        if self.limit < self.resident:
            # Clusters that do not finish make room for others, up to as many as are resident.
            self.limit += 1
            self._launch_clusters()
            return
        if not self._polling:
            raise self.hang(self.residents())
        for cluster in self._polling:
            cluster.polls = 0
            if not cluster.queued:
                cluster.queued = True
                self._turns.append(cluster)
        self._polling.clear()

    def _run_cluster(self, cluster: Cluster) -> None:
        """One turn of a cluster, in a fixed order."""
        self._cluster = cluster
        kind = self._turn(cluster)
        self._cluster = None
        if kind == POLLING:
            self._polling.append(cluster)
        elif cluster.queue:
            cluster.queued = True
            self._turns.append(cluster)

    def _run_random(self) -> None:
        ready, policy = self._ready, self.policy
        while self._resident:
            if not ready:
                if not policy.step():
                    raise self.hang(self.residents())
                continue
            policy.before_turn()
            index = policy.choose(len(ready))
            ready[index], ready[-1] = ready[-1], ready[index]
            warp = ready.pop()
            self._cluster = cluster = warp.cta.cluster
            cluster.polls = 0
            cluster.queue.append(warp)
            self._turn(cluster)
            self._cluster = None

    def _turn(self, cluster: Cluster) -> int:
        """Run the warps in the queue of a cluster, each until it waits, exits, polls or loses its
        turn. Returns why that is over: nobody is ready, all only poll, or the cluster gives way."""
        queue, native = cluster.queue, self.native
        run, record, address = native.run, queue.record, queue.address
        interrupts = None if self._in_order else self.policy.interrupts
        record.turn_over = 0
        while True:
            if interrupts is None:
                record.polls = cluster.polls
                started = time.thread_time()
                kind = run(address, self._budget)
                native.seconds += time.thread_time() - started
                cluster.polls = record.polls
                if record.progress:
                    record.progress = self._idle = 0
            else:
                # Native code neither polls nor wakes; its stretches are too short to be timed.
                kind = run(address, self._budget)
            warp = cluster.warps[record.stopped]
            if kind == TRAP:
                if not self._operate(warp):
                    record.current = 0
                elif interrupts is not None and warp.runnable and interrupts():
                    record.current = 0
                    self._ready.append(warp)
            elif kind < IDLE:
                record.current = 0
                self._stop(warp, kind)
            elif kind == LANES_EXITED:
                self._leave(warp)
                self._exit_lanes(warp)
            else:
                return kind

    def _leave(self, warp: ResidentWarp) -> None:
        """A warp does not go on: observers close its account before another one runs."""
        for observer in self.observers:
            observer.warp_leaves(warp)

    def _operate(self, warp: ResidentWarp) -> bool:
        """Do the machine operation at which native code stopped; False if the warp then polls."""
        context = warp.context
        lanes, block = context.stop_lanes, context.stop_block
        try:
            outcome = self._executors[block](warp, lanes)
        except SimulationError as error:
            raise self._placed(error, warp, block, lanes) from None
        if outcome is not None and outcome is not YIELD:
            lanes &= ~self._wait(warp, lanes, outcome)
            if not lanes:
                return True
        done = self._operations[block]
        done[0] += 1
        done[1] += lanes.bit_count()
        if outcome is YIELD:
            self._poll(warp, 1)
            return False
        return True

    def _stop(self, warp: ResidentWarp, kind: int) -> None:
        """A warp has exited or used up its budget; raises for a fault or a divergence."""
        self._leave(warp)
        if kind == EXIT:
            self._exit(warp)
        elif kind == OUT_OF_BUDGET:
            self._poll(warp, ROUNDS_OF_A_BUDGET)
        else:
            raise stop_error(warp, kind == DIVERGENCE)

    def _wait(self, warp: ResidentWarp, lanes: int, outcome: Waiting | tuple) -> int:
        """Put lanes to sleep until `wake` is called with the key of what they wait for.

        Returns the lanes that will execute the instruction again.
        """
        context = warp.context
        again = 0
        for waiting in outcome if type(outcome) is tuple else (outcome,):
            blocked = lanes if waiting.lanes is None else waiting.lanes
            if isinstance(waiting.key, MBarrier):
                waiting.key.record.watched = 1
            waiting.instruction = self.compiled.block_instruction[context.stop_block]
            if waiting.retry:
                warp.block(blocked, waiting)
                again |= blocked
            else:
                context.blocked |= blocked
                warp.waiting[blocked] = waiting
            key = id(waiting.key)
            if key in self._waiters:
                self._waiters[key].append((warp, blocked))
            else:
                self._waiters[key] = [(warp, blocked)]
        return again

    def _poll(self, warp: ResidentWarp, rounds: int) -> None:
        cluster = warp.cta.cluster
        cluster.polls += 1
        cluster.ready.append(warp)
        self._idle += rounds
        if self._idle > POLLING_ROUNDS:
            raise self.hang(self.residents())

    def _perform(self, operation: AsyncOp) -> None:
        self._idle = 0
        if not perform_natively(operation):
            operation.perform()
        operation.performed = True
        self.wake(operation)

    def _complete(self, operation: AsyncOp) -> None:
        if operation.complete is not None:
            operation.complete()
        operation.completed = True
        self.wake(operation)

    def _exit(self, warp: ResidentWarp) -> None:
        for observer in self.observers:
            observer.warp_exits(warp)
        cta = warp.cta
        cluster = cta.cluster
        self._idle = cluster.polls = 0
        try:
            cta.exit_warp(warp)
        except SimulationError as error:
            raise error.at(None, cta.ctaid, warp.index) from None
        self._exit_lanes(warp)
        cluster.running -= 1
        if not cluster.running:
            self._end_cluster(cluster)

    def _exit_lanes(self, warp: ResidentWarp) -> None:
        """Lanes have exited since the last look: the cluster barrier waits for them no more."""
        gone = warp.present & ~warp.live
        if not gone:
            return
        warp.present = warp.live
        warp.cta.cluster.barrier.exit(warp, gone)
        warp.cta.lanes_exited(warp)

    def _end_cluster(self, cluster: Cluster) -> None:
        left = [op for op in self.policy.pending() if op.cluster is cluster]
        if left:
            kinds = ", ".join(sorted({op.kind for op in left}))
            self.finding(
                f"cluster {cluster.position} exits with {len(left)} asynchronous operations still "
                f"in flight ({kinds}); wait for them before the exit"
            )
            while any(not op.completed for op in left) and self.policy.step():
                pass
        for observer in self.observers:
            observer.cluster_ends(cluster)
        if not left and not self.observers:
            cluster.give_back()
        del self._resident[cluster.id]
        self._alive -= 1
        self.grid.count_done()
        self._launch_clusters()

    def failed_cluster(self) -> int:
        """Number of the cluster whose error ended the run."""
        if self._cluster is not None:
            return self._cluster.id
        return min(self._resident, default=self.clusters)

    def absorb(self, other: Machine) -> None:
        """Add what another machine of the same launch has counted and found."""
        self.counts.blocks[:] += other.counts.blocks
        self.counts.guards[:] += other.counts.guards
        for mine, theirs in zip(self._operations, other._operations, strict=True):
            mine[0] += theirs[0]
            mine[1] += theirs[1]
        self.counters.update(other.counters)
        for name, seconds in other.seconds.items():
            self.seconds[name] += seconds
        for text, cluster in other._found_in.items():
            self._found_in[text] = min(cluster, self._found_in.get(text, cluster))

    def executed_indices(self) -> set[int]:
        """Indices of the instructions that were executed."""
        return {instruction.index for instruction, *_ in self.executed()}

    def executed(self) -> Iterator[tuple[Any, str, int, int]]:
        """Every instruction executed: (instruction, statistics class, warps, lanes).

        Machine operations count once for each time they were done, with the lanes whose guard
        held; waiting and trying again does not count.
        """
        done = {
            instruction.index: counts
            for instruction, counts in zip(
                self.compiled.block_instruction, self._operations, strict=True
            )
            if counts[0]
        }
        executors = self.compiled.executors
        for instruction, name, warps, lanes in self.compiled.executed(self.counts):
            if executors[instruction.index] is not None:
                warps, lanes = done.get(instruction.index, (0, 0))
            if warps:
                yield instruction, name, warps, lanes

    # ------------------------------------------------------------ errors

    def _placed(
        self, error: SimulationError, warp: ResidentWarp, block: int, lanes: int
    ) -> SimulationError:
        """The error with the place of the machine operation that raised it."""
        lane = (lanes & -lanes).bit_length() - 1 if not lanes & lanes - 1 else None
        instruction = self.compiled.block_instruction[block]
        return error.at(instruction, warp.cta.ctaid, warp.index, lane)

    def residents(self) -> list[Cluster]:
        """The clusters that have begun and not ended."""
        return list(self._resident.values())

    def hang(self, clusters: Iterable[Cluster]) -> Hang:
        """The error that says what these clusters, the only ones left, wait for."""
        return hang_of(clusters, self.grid.done, self.clusters)
