"""The machine that runs one launch: the grid's clusters, and the loop that gives warps turns.

A cluster is resident from its launch until its last warp has exited; `resident` of them are at
once, and the next of the grid takes the place of one that is done. A warp runs in native code
until it must wait, exits, or polls; whatever changes a barrier wakes exactly the lanes that wait
for it. When no warp can run, the policy lets a pending asynchronous operation take effect; when
there is none, the launch hangs, and the error lists who waits for what.

In a fixed order one cluster runs until nothing in it can go on (or it asked for the next cluster
of the grid), because its state then stays in the CPU's caches. A random order takes any ready warp
of any resident cluster.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any

from sm100_sim.devices import MAX_THREADS, REGISTER_FILE, SHARED_OF_AN_SM
from sm100_sim.errors import (
    CtaExited,
    DivergenceError,
    Hang,
    LaunchError,
    MemoryFault,
    Misaligned,
    SimulationError,
)
from sm100_sim.isa.sync import most_asked
from sm100_sim.state.barriers import (
    MAX_REGISTERS,
    MBarrier,
    RegisterPool,
    most_registers,
    whole_granules,
)
from sm100_sim.state.events import YIELD, AsyncOp, EagerPolicy, Waiting
from sm100_sim.state.launch import LaunchConfig
from sm100_sim.state.memory import GlobalMemory
from sm100_sim.state.warp import DEFAULT_BUDGET
from sm100_sim.trace.records import Trace

from .grid import Grid
from .residency import Cluster, Cta, ResidentWarp

#: Threads in z; CTAs in x, y and z (CUDA Programming Guide, "Technical Specifications per Compute
#: Capability").
MAX_BLOCK_Z = 64
MAX_GRID = 2**31 - 1, 65535, 65535
MAX_CLUSTER = 16
#: CTAs of a cluster without a function attribute.
PORTABLE_CLUSTER = 8
#: Bytes of a kernel's parameters (CUDA 12.1 and later).
MAX_PARAMETERS = 32_764
#: Rounds of polling in which nothing else happens before a launch counts as hanging; a warp that
#: has used up its budget of backward branches counts for many.
POLLING_ROUNDS = 100_000
ROUNDS_OF_A_BUDGET = 50
#: Waiting warps that the report of a hang lists.
LISTED_WARPS = 64

#: Indices of the kinds of stop that native code returns (`warp.Stop`).
_TRAP, _EXIT, _YIELD, _FAULT, _BLOCKED, _DIVERGENCE = range(6)


class Machine:
    """One launch of one kernel.

    compiled: the kernel translated to native code. config: grid, block, cluster, dynamic shared
    memory. memory: what it may touch. resident: most clusters at once. policy: when asynchronous
    operations take effect and in which order warps run. trace: records machine operations, or None.
    grid: the clusters, where other machines run some of them.

    counters: bytes and requests counted by instructions.
    """

    #: Backward branches that a warp may take before it loses its turn.
    budget = DEFAULT_BUDGET

    def __init__(
        self,
        compiled: Any,
        config: LaunchConfig,
        memory: GlobalMemory,
        resident: int,
        policy: EagerPolicy,
        trace: Trace | None = None,
        grid: Grid | None = None,
    ) -> None:
        self.compiled = compiled
        self.config = config
        self.memory = memory
        self.policy = policy
        self.counters: Counter[str] = Counter()
        self.trace = trace
        self._found_in: dict[str, int] = {}
        #: Where native code spent the time of the run (`report.Report.seconds`).
        self.seconds: dict[str, float] = {}
        self.threads = math.prod(config.block)
        self.cluster_size = math.prod(config.cluster)
        self.shared_bytes = compiled.kernel.dynamic_shared_offset + config.dynamic_smem
        self._check(compiled.kernel)
        self.cluster_grid = tuple(g // c for g, c in zip(config.grid, config.cluster, strict=True))
        self.clusters = math.prod(self.cluster_grid)
        self.grid = Grid(self.clusters) if grid is None else grid
        self.resident = self.limit = min(resident, self.clusters)
        self.counts = compiled.new_counters()
        executors = compiled.executors if trace is None else trace.wrapped(compiled)
        self._executors = [executors[i.index] for i in compiled.block_instruction]
        #: Machine operations done, by block: [executions by a warp, lanes].
        self._operations = [[0, 0] for _ in compiled.block_instruction]
        policy.bind(self._perform, self._complete)
        self._resident: dict[int, Cluster] = {}
        #: Clusters with a turn to come, in order; a number stands for one that has not begun.
        self._turns: deque[Cluster | int] = deque()
        self._polling: list[Cluster] = []
        self._ready: list[ResidentWarp] = []
        self._waiters: dict[int, list[tuple[ResidentWarp, int]]] = {}
        self._in_order = not policy.random_order
        self._alive = 0
        self._idle = 0
        self._turn_over = False
        self._cluster: Cluster | None = None

    def _check(self, kernel: Any) -> None:
        config = self.config
        if any(g % c for g, c in zip(config.grid, config.cluster, strict=True)):
            raise LaunchError(f"grid {config.grid} is not a multiple of cluster {config.cluster}")
        if any(size > most for size, most in zip(config.grid, MAX_GRID, strict=True)):
            raise LaunchError(
                f"grid {config.grid}; accepted are up to {MAX_GRID[0]} CTAs in x and {MAX_GRID[1]} "
                "in y and z"
            )
        if not 1 <= math.prod(config.cluster) <= MAX_CLUSTER:
            raise LaunchError(f"cluster {config.cluster}; accepted are up to {MAX_CLUSTER} CTAs")
        if math.prod(config.cluster) > PORTABLE_CLUSTER and not config.non_portable_cluster:
            raise LaunchError(
                f"cluster {config.cluster}; more than {PORTABLE_CLUSTER} CTAs need the function "
                "attribute cudaFuncAttributeNonPortableClusterSizeAllowed"
            )
        if config.dynamic_smem > config.shared_limit:
            raise LaunchError(
                f"{config.dynamic_smem} bytes of dynamic shared memory; the kernel may have "
                f"{config.shared_limit}: set cudaFuncAttributeMaxDynamicSharedMemorySize first"
            )
        if not 1 <= self.threads <= MAX_THREADS or not math.prod(config.grid):
            raise LaunchError(f"grid {config.grid} of blocks {config.block} cannot be launched")
        if config.block[2] > MAX_BLOCK_Z:
            raise LaunchError(f"block {config.block}; threads in z: up to {MAX_BLOCK_Z}")
        if kernel.reqntid is not None and tuple(kernel.reqntid) != tuple(config.block):
            raise LaunchError(
                f"block {config.block} for a kernel compiled for blocks of {kernel.reqntid}"
            )
        if kernel.maxntid is not None and self.threads > math.prod(kernel.maxntid):
            raise LaunchError(
                f"block {config.block} for a kernel compiled for blocks of up to {kernel.maxntid}"
            )
        if whole_granules(self.registers_at_launch) > most_registers(self.threads):
            raise LaunchError(
                f"{self.threads} threads with {self.registers_at_launch} registers each, as the "
                f"kernel was compiled; an SM has {REGISTER_FILE}"
            )
        if kernel.param_bytes > MAX_PARAMETERS:
            raise LaunchError(
                f"{kernel.param_bytes} bytes of parameters; accepted are up to {MAX_PARAMETERS}"
            )
        if self.shared_bytes > SHARED_OF_AN_SM:
            raise LaunchError(
                f"{self.shared_bytes} bytes of shared memory a CTA, the system's 1024 included; "
                f"the limit is {SHARED_OF_AN_SM}"
            )

    @functools.cached_property
    def registers_at_launch(self) -> int:
        """Registers of each thread at launch; the hardware allots whole granules of them.

        The kernel's own number where its machine code is known; else the most that its PTX lets
        ptxas give it, which is what kernels that use setmaxnreg are compiled for. That is no more
        than the largest setmaxnreg.inc asks for (seen of ptxas 13.0 and on an H200).
        """
        kernel, known = self.compiled.kernel, self.config.registers
        if known is not None:
            return known
        threads = math.prod(kernel.reqntid or kernel.maxntid or self.config.block)
        most = min(most_registers(threads, kernel.min_ctas_per_sm), MAX_REGISTERS)
        return min(kernel.max_registers or most,
                   most_asked(self.compiled.instructions) or MAX_REGISTERS)

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
        return tuple(
            p * c + i for p, c, i in zip(position, self.config.cluster, inside, strict=True)
        )

    def ready_list(self) -> Any:
        """Where a cluster keeps its ready warps: one list for all of them in a random order."""
        return deque() if self._in_order else self._ready

    # ------------------------------------------------------------ called by instructions

    def new_mbarrier(self, cta: Cta, address: int, count: int) -> MBarrier:
        """The object of an mbarrier that a CTA initialises."""
        return MBarrier(address, count, self.wake)

    def end_mbarriers(self, cta: Cta, address: int | None) -> None:
        """The mbarrier at a shared address of a CTA, or all of them for None, is gone."""

    def submit(self, operation: AsyncOp) -> None:
        """Issue an asynchronous operation."""
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

    def finding(self, text: str) -> None:
        """Record something wrong that does not end the run; the same text once."""
        cluster = -1 if self._cluster is None else self._cluster.id
        self._found_in[text] = min(cluster, self._found_in.get(text, cluster))

    @property
    def findings(self) -> list[str]:
        """Things that are wrong on hardware although this run could go on, by cluster."""
        return sorted(self._found_in, key=lambda text: (self._found_in[text], text))

    def all_findings(self) -> list[str]:
        """What the report of the launch lists."""
        return self.findings

    def end_turn(self) -> None:
        """The running cluster gives the others a turn before it goes on."""
        self._turn_over = True

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
        return tuple(p * c for p, c in zip(position, self.config.cluster, strict=True))

    # ------------------------------------------------------------ the run loop

    def run(self) -> None:
        """Run the launch to its end.

        Raises a SimulationError, with what was found before, at the first thing that ends it.
        """
        try:
            self._launch_clusters()
            if self._in_order:
                self._run_in_order()
            else:
                self._run_random()
        except (SimulationError, KeyboardInterrupt) as error:
            error.findings = tuple(self.all_findings())
            raise

    def _launch_clusters(self) -> None:
        while self._alive < self.limit and (number := self.grid.take()) is not None:
            self._alive += 1
            if self._in_order:
                self._turns.append(number)
            else:
                self._begin(number)

    def _begin(self, number: int) -> Cluster:
        cluster = self._resident[number] = Cluster(self, number)
        for cta in cluster.ctas:
            cluster.ready.extend(cta.warps)
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
        self._turn_over = False
        ready = cluster.ready
        while ready:
            if cluster.polls > len(ready):
                self._polling.append(cluster)
                break
            self._run_warp(ready.popleft())
            if self._turn_over:
                break
        self._cluster = None
        if ready and cluster not in self._polling:
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
            self._cluster = warp.cta.cluster
            self._run_warp(warp)
            self._cluster = None

    def _run_warp(self, warp: ResidentWarp) -> None:
        """Run a warp until it waits, exits, polls or loses its turn."""
        context, run, address = warp.context, warp.compiled.run, warp.address
        interrupts = None if self._in_order else self.policy.interrupts
        context.budget = self.budget
        while True:
            kind = run(address)
            if kind == _TRAP:
                if not self._operate(warp):
                    return
                if interrupts is not None and warp.runnable and interrupts():
                    warp.cta.cluster.ready.append(warp)
                    return
            elif kind == _BLOCKED:
                warp.queued = False
                warp.cta.cluster.polls = 0
                if context.live != warp.present:
                    self._exit_lanes(warp)
                return
            else:
                self._stop(warp, kind)
                return

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
        if kind == _EXIT:
            self._exit(warp)
        elif kind == _YIELD:
            self._poll(warp, ROUNDS_OF_A_BUDGET)
        else:
            raise self._stop_error(warp, kind)

    def _wait(self, warp: ResidentWarp, lanes: int, outcome: Waiting | tuple) -> int:
        """Put lanes to sleep until `wake` is called with the key of what they wait for.

        Returns the lanes that will execute the instruction again.
        """
        context = warp.context
        again = 0
        for waiting in outcome if type(outcome) is tuple else (outcome,):
            blocked = lanes if waiting.lanes is None else waiting.lanes
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
        operation.perform()
        operation.performed = True
        self.wake(operation)

    def _complete(self, operation: AsyncOp) -> None:
        if operation.complete is not None:
            operation.complete()
        operation.completed = True
        self.wake(operation)

    def _exit(self, warp: ResidentWarp) -> None:
        cta = warp.cta
        cluster = cta.cluster
        self._idle = cluster.polls = 0
        try:
            cta.exit_warp()
        except SimulationError as error:
            raise error.at(None, cta.ctaid, warp.index) from None
        self._exit_lanes(warp)
        cluster.running -= 1
        if not cluster.running:
            self._end_cluster(cluster)

    def _exit_lanes(self, warp: ResidentWarp) -> None:
        """Lanes have exited since the last look: the cluster barrier waits for them no more."""
        gone = warp.present & ~warp.live
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
        for text, cluster in other._found_in.items():
            self._found_in[text] = min(cluster, self._found_in.get(text, cluster))

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

    def _stop_error(self, warp: ResidentWarp, kind: int) -> SimulationError:
        """The error for a fault or a divergence that native code reported."""
        context, compiled = warp.context, self.compiled
        if kind == _DIVERGENCE:
            return DivergenceError(
                "lanes of one warp wait for each other at different instructions that all of them "
                f"must execute together; lanes {context.stop_lanes:#010x} are at the one named here"
            ).at(compiled.block_instruction[context.stop_block], warp.cta.ctaid, warp.index)
        fault = warp.fault()
        text = f"{fault.reason}: {fault.width} bytes at address {fault.address:#x}"
        if "global" in fault.reason:
            text += f". {self.memory.nearest(fault.address)}"
        elif "shared::cta" in fault.reason:
            text += (
                f" (CTA rank {fault.address >> 24 & 0xFF}, executed in CTA rank {warp.cta.rank}); "
                "only .shared::cluster and generic addresses reach other CTAs"
            )
        elif "shared" in fault.reason:
            text += (
                f" (CTA rank {fault.address >> 24 & 0xFF}, offset {fault.address & 0xFFFFFF:#x}; "
                f"a CTA has {self.shared_bytes} bytes, of which the first 1024 are the system's)"
            )
        instruction = compiled.instructions[context.fault_instruction]
        error = Misaligned if "misaligned" in fault.reason else MemoryFault
        if "allocated bytes" in fault.reason:
            target = warp.cta.cluster.cta(fault.address >> 24 & 0xFF)
            if not target.running:
                what = (
                    f"{fault.width} bytes at its shared offset {fault.address & 0xFFFFFF:#x} are "
                    "accessed"
                )
                error, text = CtaExited, target.gone(what)
        return error(text).at(instruction, warp.cta.ctaid, warp.index, fault.lane)

    def residents(self) -> list[Cluster]:
        """The clusters that have begun and not ended."""
        return list(self._resident.values())

    def hang(self, clusters: Iterable[Cluster]) -> Hang:
        """The error that says what these clusters, the only ones left, wait for."""
        left = sorted(clusters, key=lambda cluster: cluster.id)
        warps = [warp for cluster in left for warp in cluster.warps]
        # Who waits for registers comes first: the others often wait for such a warp.
        warps.sort(key=lambda warp: not _waits_for_registers(warp))
        lines = [line for warp in warps for line in _waiting_lines(warp)]
        shown = lines[:LISTED_WARPS]
        if len(lines) > LISTED_WARPS:
            shown.append(f"  and {len(lines) - LISTED_WARPS} more")
        return Hang(
            "the launch hangs: no warp can go on and no asynchronous operation is in flight; "
            f"{len(left)} clusters are resident, {self.grid.done} of {self.clusters} are "
            "done. Waiting:\n" + "\n".join(shown)
        )


def _waits_for_registers(warp: ResidentWarp) -> bool:
    return any(isinstance(waiting.key, RegisterPool) for _, waiting in warp.all_waiting())


def _waiting_lines(warp: ResidentWarp) -> list[str]:
    """What the lanes of a warp wait for, one line for each thing."""
    name = f"  CTA {warp.cta.ctaid} warp {warp.index}"
    lines = []
    for lanes, waiting in warp.all_waiting():
        instruction = waiting.instruction
        source = f", {instruction.source[0]}:{instruction.source[1]}" if instruction.source else ""
        lines.append(
            f"{name} lanes {lanes:#010x} at `{instruction.text}` (PTX line {instruction.line}"
            f"{source}) waits for {waiting.describe()}"
        )
    if not lines and warp.live:
        lane = (warp.live & -warp.live).bit_length() - 1
        instruction = warp.instruction_of(lane)
        text = f"polls near `{instruction.text}` (PTX line {instruction.line})"
        lines.append(f"{name} lanes {warp.live:#010x} {text}")
    return lines
