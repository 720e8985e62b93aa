"""Resident state of the machine: clusters, their CTAs and warps."""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from typing import Any, Protocol

import numpy as np

from sm100_sim import devices
from sm100_sim.errors import BarrierError, CtaExited, MemoryFault, Misaligned, TmemError
from sm100_sim.state.barriers import (
    NAMED_BARRIERS,
    ClusterBarrier,
    MBarrier,
    NamedBarrier,
    RegisterPool,
)
from sm100_sim.state.events import EagerPolicy, Waiting
from sm100_sim.state.launch import LaunchConfig
from sm100_sim.state.memory import GlobalMemory, poisoned_shared
from sm100_sim.state.tmem import Tmem
from sm100_sim.state.warp import FAULT_KINDS, Environment, Fault, Pages, Warp, WarpBank
from sm100_sim.targets import Limits

MBARRIER_BYTES = 8


class Host(Protocol):
    """Machine as the clusters resident on it see it."""

    compiled: Any
    config: LaunchConfig
    limits: Limits
    memory: GlobalMemory
    policy: EagerPolicy
    counters: Counter[str]
    counts: Any
    threads: int
    shared_bytes: int
    registers_at_launch: int
    cluster_grid: tuple[int, ...]
    explicit_cluster: bool
    resident: int
    pages: Pages

    def cluster_position(self, number: int) -> tuple[int, int, int]:
        """Cluster coordinates of a cluster of the grid."""

    def position_inside(self, rank: int) -> tuple[int, int, int]:
        """Coordinates in its cluster of the CTA of a rank."""

    def ctaid(self, number: int, rank: int) -> tuple[int, int, int]:
        """Coordinates in the grid of the CTA of a rank in a cluster."""

    def new_queues(self) -> tuple[Any, Any]:
        """Return (native state of a new cluster, queue of its ready warps)."""

    def new_mbarrier(self, cta: Cta, address: int, count: int) -> MBarrier:
        """The object of an mbarrier that a CTA initialises."""

    def end_mbarriers(self, cta: Cta, address: int | None) -> None:
        """An mbarrier of a CTA, or all of them for None, is gone."""

    def wake(self, key: Any) -> None:
        """Something lanes may wait for has changed."""

    def finding(self, text: str) -> None:
        """Record something wrong that does not end the run."""


class ResidentWarp(Warp):
    """A warp with what the run loop keeps of it; `address`: of the context native code gets."""

    __slots__ = ("address",)

    def __init__(self, *state: Any) -> None:
        super().__init__(*state)
        self.queued = True
        self.present = self.live
        self.address = ctypes.addressof(self.context)

    @property
    def queued(self) -> bool:
        """Return True if it is ready or running."""
        return self.context.queued != 0

    @queued.setter
    def queued(self, value: bool) -> None:
        self.context.queued = value

    @property
    def present(self) -> int:
        """Lanes that barriers still count."""
        return self.context.present

    @present.setter
    def present(self, lanes: int) -> None:
        self.context.present = lanes

    def all_waiting(self) -> list[tuple[int, Any]]:
        """Return (lanes, `events.Waiting`) of all lanes that sleep."""
        found = list(self.waiting.items())
        context = self.context
        if context.wait_lanes:
            native = next(
                barrier
                for barrier in self.cta.cluster.mbarriers.values()
                if ctypes.addressof(barrier.record) == context.wait_on
            )
            waiting = Waiting(f"parity {native.phase & 1}", native)
            lane = (context.wait_lanes & -context.wait_lanes).bit_length() - 1
            waiting.instruction = self.instruction_of(lane)
            found.append((context.wait_lanes, waiting))
        return found

    def fault(self) -> Fault:
        """The refused access that native code has just reported."""
        context = self.context
        return Fault(
            FAULT_KINDS[context.fault_kind],
            context.fault_lane,
            context.fault_address,
            context.fault_width,
        )


class Cta:
    """One thread block.

    rank: position in its cluster. ctaid: (x, y, z) in the grid. smem: uint8, index = shared
    offset. tmem: its tensor memory. barriers: shared offset -> mbarrier. running: warps that have
    not exited. peer: the CTA whose rank differs in bit 0, or None.
    """

    def __init__(self, cluster: Cluster, rank: int, ctaid: tuple[int, int, int]) -> None:
        machine = cluster.machine
        self.cluster = cluster
        self.rank = rank
        self.ctaid = ctaid
        self.smem = cluster.smem[rank]
        self.tmem = Tmem(machine.pages, machine.limits.columns)
        self.peer: Cta | None = None
        self.warps: list[ResidentWarp] = []
        self.running = -(-machine.threads // 32)
        self.barriers: dict[int, MBarrier] = {}
        self.bulk_groups: dict = {}
        #: Warpgroups by number that have executed a wgmma instruction.
        self.warpgroups: dict = {}
        #: query_cancel has told a warp of this CTA that its request failed.
        self.saw_failed_cancel = False
        self.registers = RegisterPool(self.running, machine.registers_at_launch, machine.wake)
        self._named: dict[int, NamedBarrier] = {}

    def gone(self, what: str) -> str:
        """Return the error text for something that happens to this CTA after its exit."""
        return (
            f"CTA {self.ctaid}, rank {self.rank}, has exited: {what}. A CTA must stay until its "
            "own copies are complete and its peers are done with it (a trailing cluster barrier)"
        )

    def require_present(self, what: str) -> None:
        """Raise CtaExited if all warps of the CTA have exited; what: is done to it."""
        if not self.running:
            raise CtaExited(self.gone(what))

    def init_mbarrier(self, address: int, count: int) -> None:
        """mbarrier.init at a shared address of this CTA."""
        offset = self._own_barrier_offset(address, "mbarrier.init")
        machine = self.cluster.machine
        for near in (offset - 4, offset, offset + 4):
            live = self.barriers.get(near)
            if live is None:
                continue
            if near != offset or not live.untouched():
                raise BarrierError(
                    f"mbarrier.init of a live barrier; mbarrier.inval ends its life. "
                    f"{live.describe()}"
                )
            # Undefined by the PTX ISA, but published kernels do it, and nothing is lost by it.
            machine.finding(
                f"mbarrier.init of a live barrier that nothing has used yet, at shared offset "
                f"{offset:#x}; mbarrier.inval ends a barrier's life"
            )
        barrier = machine.new_mbarrier(self, address, count)
        self.barriers[offset] = self.cluster.mbarriers[address] = barrier

    def invalidate_mbarrier(self, address: int) -> None:
        """mbarrier.inval: the bytes may be used for something else."""
        if self.barriers.pop(self._own_barrier_offset(address, "mbarrier.inval"), None) is None:
            raise BarrierError(f"mbarrier.inval at {address:#x}, where no barrier is")
        del self.cluster.mbarriers[address]
        self.cluster.machine.end_mbarriers(self, address)

    def _own_barrier_offset(self, address: int, what: str) -> int:
        offset = address & 0xFFFFFF
        if address >> 24 != self.rank:
            raise BarrierError(
                f"{what} at shared address {address:#x}, which is in CTA rank {address >> 24}; "
                f"executed in CTA rank {self.rank}, and only its own barriers are accepted"
            )
        if offset % MBARRIER_BYTES:
            raise Misaligned(f"mbarrier at shared offset {offset:#x}; accepted: multiples of 8")
        if offset + MBARRIER_BYTES > self.smem.size:
            raise MemoryFault(
                f"mbarrier at shared offset {offset:#x}, outside the CTA's {self.smem.size} bytes"
            )
        return offset

    def named_barrier(self, number: int) -> NamedBarrier:
        """The named barrier `number`, 0 to 15."""
        found = self._named.get(number)
        if found is None:
            if not 0 <= number < NAMED_BARRIERS:
                raise BarrierError(f"named barrier {number}; accepted are 0 to 15")
            found = NamedBarrier(number, self._present, self.cluster.machine.wake)
            self._named[number] = found
        return found

    def _present(self) -> int:
        """Threads a barrier without a count waits for: whole warps that have not exited."""
        return 32 * self.running

    def write_shared(self, address: int, values: np.ndarray) -> None:
        """Store an array at a shared address of the cluster. Raises MemoryFault outside."""
        raw = values.view(np.uint8)
        rank, offset = address >> 24, address & 0xFFFFFF
        target = self.cluster.cta(rank)
        target.require_present(f"{raw.size} bytes are written at its shared offset {offset:#x}")
        if offset + raw.size > target.smem.size:
            raise MemoryFault(
                f"write of {raw.size} bytes at shared offset {offset:#x} of CTA rank {rank}, "
                f"which has {target.smem.size} bytes"
            )
        target.smem[offset : offset + raw.size] = raw

    def check_partial(self, barrier: NamedBarrier, warp: ResidentWarp) -> None:
        """Raise BarrierError where some lanes of a warp come to a barrier and others have come to
        another one."""
        for other in self._named.values():
            if other is not barrier and warp in other.partial:
                raise BarrierError(
                    f"lanes of warp {warp.index} come to barrier {barrier.number}, others of it "
                    f"wait at barrier {other.number} (the hardware ends the kernel with an illegal "
                    "instruction)"
                )

    def lanes_exited(self, warp: ResidentWarp) -> None:
        """Lanes of a warp have exited: what is left of it may have arrived at a barrier."""
        for barrier in self._named.values():
            if barrier.partial:
                barrier.lanes_exited(warp)

    def exit_warp(self, warp: ResidentWarp) -> None:
        """A warp has exited. Raises TmemError if it was the last and TMEM is still allocated,
        SimulationError if its warpgroup waits for it."""
        self.running -= 1
        for group in self.warpgroups.values():
            group.warp_exits(warp)
        for barrier in self._named.values():
            if barrier.arrived and barrier.expected is None:
                barrier.settle()
        if self.running == 0:
            self.cluster.limits[self.rank] = 0
            for mbarrier in self.barriers.values():
                del self.cluster.mbarriers[mbarrier.address]
            self.cluster.machine.end_mbarriers(self, None)
            if self.tmem.leaked():
                raise TmemError(
                    "the CTA exits with tensor memory still allocated (first column: columns): "
                    f"{self.tmem.leaked()}; every tcgen05.alloc needs a tcgen05.dealloc"
                )


class Cluster:
    """CTAs that run together, with their shared memory and hardware barrier.

    id: number in the grid, x fastest. ctas: by rank. warps: of all CTAs. smem: uint8 (CTAs,
    bytes), index = shared offset. limits: bytes of each row that may be accessed, 0 once the CTA
    has exited.
    queue: what native code sees of the cluster, with its queue; ready: where its ready warps go.
    mbarriers: shared address -> barrier, of CTAs that have not exited. adversary: the policy if it
    makes waits fail spuriously, else None.
    """

    def __init__(self, machine: Host, number: int) -> None:
        self.machine = machine
        self.id = number
        config = machine.config
        size = math.prod(config.cluster)
        self.smem = poisoned_shared(size, machine.shared_bytes, machine.pages)
        self.limits = np.full(size, machine.shared_bytes, np.uint32)
        self.barrier = ClusterBarrier(size * machine.threads, machine.wake)
        self.mbarriers: dict[int, MBarrier] = {}
        self.adversary = machine.policy if machine.policy.random_order else None
        self.position = machine.cluster_position(number)
        self.queue, self.ready = machine.new_queues()
        self.queued = False
        self.polls = 0
        environment = Environment(
            self.smem, self.limits, machine.memory.table, machine.memory.parameters
        )
        self._banks: list[WarpBank] = []
        self.ctas = [self._make_cta(rank, environment) for rank in range(size)]
        for cta in self.ctas:
            cta.peer = self.ctas[cta.rank ^ 1] if cta.rank ^ 1 < size else None
        self.warps = [warp for cta in self.ctas for warp in cta.warps]
        self.running = len(self.warps)

    def _make_cta(self, rank: int, environment: Environment) -> Cta:
        machine = self.machine
        ctaid = machine.ctaid(self.id, rank)
        cta = Cta(self, rank, ctaid)
        specials = special_registers(self, rank, ctaid, machine.position_inside(rank))
        state = environment, specials, machine.counts
        warps = range(cta.running)
        bank = WarpBank(machine.compiled, *state, warps, machine.pages)
        self._banks.append(bank)
        cta.warps += [ResidentWarp(machine.compiled, cta, index, *state, bank) for index in warps]
        return cta

    def give_back(self) -> None:
        """Let later clusters have the memory of this one, which has ended and which nobody reads
        any more."""
        pages = self.machine.pages
        pages.give(self.smem.view(np.uint32), *(cta.tmem.cells for cta in self.ctas))
        for bank in self._banks:
            pages.give(bank.r32, bank.r64)

    def cta(self, rank: int) -> Cta:
        """The CTA of a rank; raises MemoryFault outside the cluster."""
        if rank >= len(self.ctas):
            raise MemoryFault(
                f"CTA rank {rank} in a shared::cluster address; the cluster has "
                f"{len(self.ctas)} CTAs"
            )
        return self.ctas[rank]

    def mbarrier(self, address: int) -> MBarrier:
        """The mbarrier at a shared address.

        Raises BarrierError if none was initialised there, MemoryFault outside the cluster. An
        access to a CTA that has exited is recorded as a finding.
        """
        live = self.mbarriers.get(address)
        if live is not None:
            return live
        rank, offset = address >> 24, address & 0xFFFFFF
        cta = self.cta(rank)
        found = cta.barriers.get(offset)
        if found is None:
            known = ", ".join(f"{at:#x}" for at in sorted(cta.barriers)) or "none"
            raise BarrierError(
                f"no mbarrier has been initialised at shared offset {offset:#x} of CTA rank "
                f"{rank}; initialised there: {known}"
            )
        self.machine.finding(cta.gone(f"its mbarrier at shared offset {offset:#x} is used"))
        return found


def special_registers(
    cluster: Cluster, rank: int, ctaid: tuple[int, ...], inside: tuple[int, ...]
) -> dict[str, int]:
    """Values of the special registers that are the same for all threads of a CTA."""
    machine = cluster.machine
    config = machine.config
    triples: dict[str, Any] = {
        "%ntid": config.block,
        "%ctaid": ctaid,
        "%nctaid": config.grid,
        "%cluster_ctaid": inside,
        "%cluster_nctaid": config.cluster,
        "%clusterid": cluster.position,
        "%nclusterid": machine.cluster_grid,
    }
    values = {
        f"{name}.{axis}": triple[i]
        for name, triple in triples.items()
        for i, axis in enumerate("xyz")
    }
    size = math.prod(config.cluster)
    return values | {
        "%cluster_ctarank": rank,
        "%cluster_nctarank": size,
        "%smid": cluster.id % machine.resident * size + rank,
        "%nsmid": devices.current().sms,
        "%nwarpid": -(-machine.threads // 32),
        "%dynamic_smem_size": config.dynamic_smem,
        "%total_smem_size": machine.shared_bytes,
        "%is_explicit_cluster": int(machine.explicit_cluster),
    }
