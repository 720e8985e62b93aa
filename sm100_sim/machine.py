"""The machine that runs one launch: clusters, CTAs and warps, and the loop that gives them turns.

A cluster is resident from its launch until its last warp has exited; as many are resident at once
as asked for, and the next one of the grid takes the place of one that is done. Ready warps run
in turn until they trap into an operation that must wait; whatever changes a barrier (or another
thing lanes can wait for) wakes exactly those who wait for it. When no warp is ready and nothing
is in flight, the launch hangs, and the error lists who waits for what.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from .barriers import ClusterBarrier, MBarrier, NamedBarrier
from .errors import (
    BarrierError,
    DivergenceError,
    Hang,
    LaunchError,
    MemoryFault,
    Misaligned,
    SimulationError,
)
from .events import AsyncOp, EagerPolicy
from .host import LaunchConfig
from .memory import GlobalMemory, poisoned_shared
from .ptx import RESERVED_SHARED_BYTES
from .tmem import Tmem
from .warp import Environment, Warp

#: Shared memory a CTA can have in all, the system's first KiB included (compute capability 10.0).
SHARED_LIMIT = 233_472
MAX_THREADS = 1024
MAX_CLUSTER = 16
MBARRIER_BYTES = 8
#: Waiting warps that a hang report lists one by one.
LISTED_WARPS = 64


class Cta:
    """One thread block: its shared memory, tensor memory, barriers and warps."""

    def __init__(self, cluster: Cluster, rank: int, index: tuple[int, int, int]) -> None:
        self.cluster = cluster
        self.rank = rank
        self.index = index
        self.smem = cluster.smem[rank]
        self.tmem = Tmem()
        self.threads = cluster.machine.threads
        self.warps: list[Warp] = []
        self.running = 0
        self.barriers: dict[int, MBarrier] = {}
        self.bulk_groups: dict = {}
        self.saw_failed_cancel = False
        self._named: dict[int, NamedBarrier] = {}

    @property
    def peer(self) -> Cta | None:
        """The other CTA of the pair: the rank that differs in bit 0."""
        ctas = self.cluster.ctas
        return ctas[self.rank ^ 1] if self.rank ^ 1 < len(ctas) else None

    def init_mbarrier(self, address: int, count: int) -> None:
        """mbarrier.init at a shared address of this CTA."""
        offset = self._barrier_offset(address)
        old = self.barriers.get(offset)
        if old is not None:
            raise BarrierError(f"mbarrier.init of a live barrier; {old.describe()}")
        self.barriers[offset] = MBarrier(address, count, self.cluster.machine.wake)

    def invalidate_mbarrier(self, address: int) -> None:
        """mbarrier.inval: the bytes may be used for something else."""
        if self.barriers.pop(self._barrier_offset(address), None) is None:
            raise BarrierError(f"mbarrier.inval at {address:#x}, where no barrier is")

    def _barrier_offset(self, address: int) -> int:
        offset = address & 0xFFFFFF
        if address >> 24 != self.rank:
            raise BarrierError(f"mbarrier at {address:#x} of another CTA cannot be initialised")
        if offset % MBARRIER_BYTES:
            raise Misaligned(f"mbarrier at shared address {address:#x}; accepted: multiples of 8")
        if offset + MBARRIER_BYTES > self.smem.size:
            raise MemoryFault(f"mbarrier at {address:#x}, outside the CTA's shared memory")
        return offset

    def named_barrier(self, number: int) -> NamedBarrier:
        """The named barrier `number`, 0 to 15."""
        if not 0 <= number < 16:
            raise BarrierError(f"named barrier {number}; accepted are 0 to 15")
        found = self._named.get(number)
        if found is None:
            found = self._named[number] = NamedBarrier(number, self.cluster.machine.wake)
        return found

    def write_shared(self, address: int, values: np.ndarray) -> None:
        """Store an array at a shared address (any CTA of the cluster)."""
        raw = values.view(np.uint8)
        offset, rank = address & 0xFFFFFF, address >> 24
        target = self.cluster.cta(rank).smem
        if offset + raw.size > target.size:
            raise MemoryFault(f"write of {raw.size} bytes at shared address {address:#x}")
        target[offset : offset + raw.size] = raw

    def exit_warp(self, warp: Warp) -> None:
        """A warp has exited; with the last one the CTA's resources must be free."""
        self.running -= 1
        if self.running == 0 and self.tmem.leaked():
            raise SimulationError(
                f"CTA exits with tensor memory still allocated: {self.tmem.leaked()} "
                "(first column: columns); every tcgen05.alloc needs a dealloc"
            )


class Cluster:
    """CTAs that run together, with their shared memory and hardware barrier."""

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine = machine
        self.id = number
        x, y, z = machine.config.cluster
        size = x * y * z
        self.smem = poisoned_shared(size, machine.shared_bytes)
        self.limits = np.full(size, machine.shared_bytes, np.uint32)
        self.barrier = ClusterBarrier(size * machine.threads, machine.wake)
        self.position = machine.cluster_position(number)
        self.ctas: list[Cta] = []
        environment = Environment(
            self.smem, self.limits, machine.memory.table, machine.memory.parameters
        )
        for rank in range(size):
            inside = (rank % x, rank // x % y, rank // (x * y))
            index = tuple(
                p * c + i
                for p, c, i in zip(self.position, machine.config.cluster, inside, strict=True)
            )
            cta = Cta(self, rank, index)
            self.ctas.append(cta)
            specials = machine.special_registers(self, rank, index, inside)
            for number_in_cta in range(-(-machine.threads // 32)):
                cta.warps.append(
                    Warp(
                        machine.compiled, cta, number_in_cta, environment, specials,
                        machine.counts,
                    )
                )
            cta.running = len(cta.warps)

    @property
    def running(self) -> int:
        return sum(cta.running for cta in self.ctas)

    def cta(self, rank: int) -> Cta:
        """The CTA of a rank; raises MemoryFault outside the cluster."""
        if rank >= len(self.ctas):
            raise MemoryFault(
                f"CTA rank {rank} in a shared::cluster address; the cluster has "
                f"{len(self.ctas)} CTAs"
            )
        return self.ctas[rank]

    def mbarrier(self, address: int) -> MBarrier:
        """The mbarrier at a shared address; raises BarrierError if none was initialised there."""
        found = self.cta(address >> 24).barriers.get(address & 0xFFFFFF)
        if found is None:
            raise BarrierError(
                f"no mbarrier has been initialised at shared offset {address & 0xFFFFFF:#x} of "
                f"CTA rank {address >> 24}"
            )
        return found


class Machine:
    """One launch of one kernel.

    compiled: the kernel translated to native code. config: grid, block, cluster, dynamic shared
    memory. resident: clusters at once. policy: when asynchronous operations are performed.
    progress: called with (clusters done, clusters in all). trace: a list that receives
    (sequence number, cta index, warp, instruction, lanes) of every machine operation, or None.
    """

    def __init__(
        self,
        compiled: Any,
        config: LaunchConfig,
        memory: GlobalMemory,
        resident: int,
        policy: EagerPolicy,
        progress: Callable[[int, int], None] | None = None,
        trace: list | None = None,
    ) -> None:
        self.compiled = compiled
        self.config = config
        self.memory = memory
        self.policy = policy
        self.progress = progress
        self.trace = trace
        self.counters: Counter[str] = Counter()
        self.threads = _product(config.block)
        self.shared_bytes = RESERVED_SHARED_BYTES + compiled.kernel.shared_bytes + (
            config.dynamic_smem
        )
        self._check()
        self.counts = compiled.new_counters()
        self.executors = compiled.executors
        x, y, z = (g // c for g, c in zip(config.grid, config.cluster, strict=True))
        self.cluster_grid = (x, y, z)
        self.num_clusters = x * y * z
        self.resident = min(resident, self.num_clusters)
        self._next = 0
        self._done = 0
        self._live: dict[int, Cluster] = {}
        self._ready: deque[Warp] = deque()
        self._queued: set[Warp] = set()
        self._waiting: dict[int, list[tuple[Warp, int]]] = {}

    def _check(self) -> None:
        config = self.config
        if any(g % c for g, c in zip(config.grid, config.cluster, strict=True)):
            raise LaunchError(f"grid {config.grid} is not a multiple of cluster {config.cluster}")
        if _product(config.cluster) > MAX_CLUSTER:
            raise LaunchError(f"cluster {config.cluster}; accepted are up to {MAX_CLUSTER} CTAs")
        if not 1 <= self.threads <= MAX_THREADS or not _product(config.grid):
            raise LaunchError(f"grid {config.grid} of blocks {config.block} cannot be launched")
        if self.shared_bytes > SHARED_LIMIT:
            raise LaunchError(
                f"{self.shared_bytes} bytes of shared memory a CTA, 1024 of them the system's; "
                f"the limit is {SHARED_LIMIT}"
            )

    def cluster_position(self, number: int) -> tuple[int, int, int]:
        """Cluster coordinates of the `number`-th cluster of the grid, x fastest."""
        x, y, _ = self.cluster_grid
        return number % x, number // x % y, number // (x * y)

    def special_registers(
        self, cluster: Cluster, rank: int, index: tuple, inside: tuple
    ) -> dict[str, int]:
        """Values of the special registers of one CTA."""
        config = self.config
        triples = {
            "%ntid": config.block, "%ctaid": index, "%nctaid": config.grid,
            "%cluster_ctaid": inside, "%cluster_nctaid": config.cluster,
            "%clusterid": cluster.position, "%nclusterid": self.cluster_grid,
        }  # fmt: skip
        values = {
            f"{name}.{axis}": value[i]
            for name, value in triples.items()
            for i, axis in enumerate("xyz")
        }
        size = _product(config.cluster)
        slot = cluster.id % max(self.resident, 1)
        return values | {
            "%cluster_ctarank": rank, "%cluster_nctarank": size, "%smid": slot * size + rank,
            "%nsmid": 148, "%nwarpid": 64, "%dynamic_smem_size": config.dynamic_smem,
            "%total_smem_size": self.shared_bytes, "%is_explicit_cluster": int(size > 1),
        }  # fmt: skip

    # ------------------------------------------------------------ called by instructions

    def submit(self, operation: AsyncOp) -> None:
        """Issue an asynchronous operation."""
        self.policy.submit(operation, self._perform)

    def wake(self, key: Any) -> None:
        """Something lanes may wait for has changed: let those who wait try again."""
        waiting = self._waiting.pop(id(key), None)
        if waiting:
            for warp, lanes in waiting:
                warp.unblock(lanes)
                self._enqueue(warp)

    def cancel_cluster(self) -> np.ndarray:
        """Take the next cluster that has not been launched; the response of try_cancel."""
        if self._next >= self.num_clusters:
            return np.zeros(4, np.uint32)
        position = self.cluster_position(self._next)
        self._next += 1
        self._done += 1
        self.counters["clc.stolen"] += 1
        first = (p * c for p, c in zip(position, self.config.cluster, strict=True))
        return np.array([1, *first], np.uint32)

    # ------------------------------------------------------------ the run loop

    def run(self) -> None:
        """Run the launch to its end. Raises a SimulationError at the first thing that is wrong."""
        self._launch_clusters()
        policy, ready = self.policy, self._ready
        while self._live:
            if not ready:
                if not policy.progress(self._perform):
                    raise self._hang()
                continue
            policy.before_turn(self._perform)
            warp = policy.pick(ready)
            self._queued.discard(warp)
            self._turn(warp)

    def _launch_clusters(self) -> None:
        while len(self._live) < self.resident and self._next < self.num_clusters:
            cluster = Cluster(self, self._next)
            self._next += 1
            self._live[cluster.id] = cluster
            for cta in cluster.ctas:
                for warp in cta.warps:
                    self._enqueue(warp)

    def _enqueue(self, warp: Warp) -> None:
        if warp not in self._queued:
            self._queued.add(warp)
            self._ready.append(warp)

    def _turn(self, warp: Warp) -> None:
        """Run a warp until it waits, exits or yields."""
        executors, policy = self.executors, self.policy
        random_turns = policy.seed is not None
        while True:
            stop = warp.resume()
            if stop.kind == "trap":
                instruction, lanes = stop.instruction, stop.lanes
                if self.trace is not None:
                    self._record(warp, instruction, lanes)
                try:
                    waiting = executors[instruction.index](warp, lanes)
                except SimulationError as error:
                    raise error.at(instruction, warp.cta.index, warp.index) from None
                if waiting is not None:
                    warp.block(lanes, waiting)
                    self._waiting.setdefault(id(waiting.key), []).append((warp, lanes))
                elif random_turns and policy.interrupts():
                    self._enqueue(warp)
                    return
            elif stop.kind == "blocked":
                return
            elif stop.kind == "exit":
                self._exit(warp)
                return
            elif stop.kind == "yield":
                self._enqueue(warp)
                return
            else:
                raise self._stop_error(warp, stop)

    def _record(self, warp: Warp, instruction: Any, lanes: int) -> None:
        self.trace.append((len(self.trace), warp.cta.index, warp.index, instruction, lanes))

    def _perform(self, operation: AsyncOp) -> None:
        operation.perform()
        operation.performed = True
        self.wake(operation)

    def _exit(self, warp: Warp) -> None:
        cta = warp.cta
        cluster = cta.cluster
        threads = min(32, self.threads - 32 * warp.index)
        try:
            cta.exit_warp(warp)
            cluster.barrier.exit(threads)
        except SimulationError as error:
            raise error.at(None, cta.index, warp.index) from None
        if not cluster.running:
            del self._live[cluster.id]
            self._done += 1
            if self.progress is not None:
                self.progress(self._done, self.num_clusters)
            self._launch_clusters()

    def _stop_error(self, warp: Warp, stop: Any) -> SimulationError:
        """The error for a fault or a divergence that native code reported."""
        place = (stop.instruction, warp.cta.index, warp.index)
        if stop.kind == "divergence":
            return DivergenceError(
                "lanes of one warp wait for each other at different aligned instructions"
            ).at(*place)
        fault = stop.fault
        kind = Misaligned if "misaligned" in fault.reason else MemoryFault
        where = f"{fault.reason}: {fault.width} bytes at address {fault.address:#x}"
        if "global access" in fault.reason:
            where += f". {self.memory.nearest(fault.address)}"
        elif "shared" in fault.reason:
            where += f" (the CTA has {self.shared_bytes} bytes)"
        return kind(where).at(*place, fault.lane)

    def _hang(self) -> Hang:
        lines = []
        for cluster in self._live.values():
            for cta in cluster.ctas:
                for warp in cta.warps:
                    for lanes, waiting in warp.waiting.items():
                        lane = (lanes & -lanes).bit_length() - 1
                        instruction = warp.instruction_of(lane)
                        text = instruction.text if instruction else "?"
                        what = getattr(waiting.key, "describe", lambda w=waiting: w.what)()
                        lines.append(
                            f"  CTA {cta.index} warp {warp.index} lanes {lanes:#010x}: `{text}` "
                            f"waits for {waiting.what.split(' of ')[0]}; {what}"
                        )
        shown = lines[:LISTED_WARPS]
        if len(lines) > LISTED_WARPS:
            shown.append(f"  and {len(lines) - LISTED_WARPS} more")
        return Hang(
            f"the launch hangs: no warp can run and no operation is in flight; "
            f"{len(self._live)} clusters are resident, {self._done} of {self.num_clusters} are "
            "done\n" + "\n".join(shown)
        )


def _product(values: tuple[int, ...]) -> int:
    result = 1
    for value in values:
        result *= value
    return result
