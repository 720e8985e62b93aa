"""A machine whose clusters run in native code as far as it reaches (`native.loop`).

Whole turns of a cluster are one call: warps run, do the machine operations that have native
routines, sleep at mbarriers and wake each other without Python. Everything else stops the call and
is done as in `machine.Machine`, on the same state.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from sm100_sim.isa.columns import Effect, NativeForm
from sm100_sim.isa.descriptors import decode_instruction
from sm100_sim.isa.table import effect_of, row_of
from sm100_sim.isa.tcgen05 import participants
from sm100_sim.isa.tensor_core import Mma
from sm100_sim.isa.tma import read_descriptor
from sm100_sim.native import layout
from sm100_sim.native.loop import IDLE, LANES_EXITED, POLLING, TRAP
from sm100_sim.native.products import CHAIN_IN_PYTHON, K_STEP, ROWS
from sm100_sim.state.barriers import MBarrier
from sm100_sim.state.events import EagerPolicy, Waiting
from sm100_sim.state.memory import GlobalMemory
from sm100_sim.state.tensormap import TENSORMAP_BYTES, TensorMap
from sm100_sim.state.warp import DEFAULT_BUDGET, address, aligned_zeros
from sm100_sim.translate.kernel import routine_address

from .blas import sgemm
from .machine import Machine
from .residency import MBARRIER_BYTES, Cluster, Cta, ResidentWarp

Executor = Callable[[Any, int], Any]
#: mbarriers of one CTA that native code knows; Python takes care of the others.
NATIVE_BARRIERS = 64
#: TMA descriptors of one launch that native code knows.
MAPS = 64
#: float32 values of A, of B and of a product that native code needs room for.
SCRATCH = (ROWS * K_STEP * layout.CHAIN_LIMIT, 256 * K_STEP * layout.CHAIN_LIMIT, 256 * ROWS)


class NativeCluster:
    """What native code sees of a cluster; also its queue of ready warps."""

    def __init__(self, machine: NativeMachine) -> None:
        ctas = machine.cluster_size
        warps = ctas * -(-machine.threads // 32)
        self._ring = np.zeros(warps, np.uint64)
        self._barriers = (layout.Barrier * (ctas * NATIVE_BARRIERS))()
        self._free = list(range(len(self._barriers) - 1, -1, -1))
        self._chains = (layout.Chain * warps)()
        self.ctas = (layout.Cta * ctas)()
        #: [rank, offset / 8]: see `layout.Cta`.
        self.barriers_at = np.zeros((ctas, -(-machine.shared_bytes // MBARRIER_BYTES)), np.uint16)
        self.record = layout.Cluster(
            machine=ctypes.addressof(machine.native), ctas=ctypes.addressof(self.ctas),
            barriers=ctypes.addressof(self._barriers), ring=_address(self._ring),
            cta_count=ctas, capacity=warps,
        )
        self.address = ctypes.addressof(self.record)

    def attach(self, cluster: Cluster, table: np.ndarray, eager: bool) -> None:
        """Tell native code where the parts of a new cluster are; `table`: its blocks.

        eager: whether asynchronous operations may be performed natively, where they are issued.
        """
        for cta, record in zip(cluster.ctas, self.ctas, strict=True):
            record.smem, record.smem_bytes = _address(cta.smem), cta.smem.size
            record.barriers_at = _address(self.barriers_at[cta.rank])
            record.tensor_memory = ctypes.addressof(cta.tmem.record)
            record.rank = cta.rank
        for number, warp in enumerate(cluster.warps):
            context = warp.context
            context.number, context.index = number, warp.index
            context.cluster = self.address
            context.cta = ctypes.addressof(self.ctas[warp.cta.rank])
            context.table = _address(table)
            if eager:
                context.chain = ctypes.addressof(self._chains[number])

    def append(self, warp: ResidentWarp) -> None:
        """The queue: a warp is ready."""
        record = self.record
        self._ring[(record.head + record.waiting) % record.capacity] = warp.address
        record.waiting += 1

    def extend(self, warps: Iterable[ResidentWarp]) -> None:
        """The queue: several warps are ready."""
        for warp in warps:
            self.append(warp)

    def __len__(self) -> int:
        return self.record.waiting

    def new_barrier(self, address: int) -> layout.Barrier | None:
        """The record of the mbarrier at a shared address; None if there are too many."""
        place = address >> 24, (address & 0xFFFFFF) // MBARRIER_BYTES
        number = int(self.barriers_at[place]) - 1
        if number < 0:
            if not self._free:
                return None
            number = self._free.pop()
            self.barriers_at[place] = number + 1
        record = self._barriers[number]
        ctypes.memset(ctypes.addressof(record), 0, ctypes.sizeof(record))
        return record

    def end_barriers(self, rank: int, address: int | None) -> None:
        """Forget one mbarrier of a CTA, or all."""
        if address is None:
            self.barriers_at[rank] = 0
            return
        place = rank, (address & 0xFFFFFF) // MBARRIER_BYTES
        if self.barriers_at[place]:
            self._free.append(int(self.barriers_at[place]) - 1)
            self.barriers_at[place] = 0


class NativeMachine(Machine):
    """`machine.Machine` for the fixed order of warps, without sanitizer and trace."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._done_natively = np.zeros((len(self.compiled.kernel.blocks), 2), np.uint64)
        self._table = self.compiled.native_table
        self._maps = (layout.TileMap * MAPS)()
        self._scratch = [aligned_zeros((size,), np.float32) for size in SCRATCH]
        product, wide = sgemm()
        values_a, values_b, product_space = map(_address, self._scratch)
        self.native = layout.Machine(
            operations=_address(self._done_natively), maps=ctypes.addressof(self._maps),
            product=product, wide=wide, values_a=values_a, values_b=values_b,
            product_space=product_space,
        )
        self._run = _function("run_cluster", ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64)
        self._wake_waiters = _function("wake_waiters", None, ctypes.c_uint64)
        self._native_seconds = 0.0
        self._eager = type(self.policy) is EagerPolicy
        if self._eager:
            self._executors = [
                execute and self._in_step(instruction, execute)
                for instruction, execute in zip(
                    self.compiled.block_instruction, self._executors, strict=True
                )
            ]

    def _in_step(self, instruction: Any, execute: Executor) -> Executor:
        """The executor, so that native code and Python share chains and TMA descriptors."""
        row = row_of(instruction)
        if row.chain:
            return lambda warp, lanes: self._with_chain(execute, warp, lanes)
        if row.native is NativeForm.TILE:
            stores = effect_of(instruction) is Effect.TMA_STORE
            pointer = address(instruction.operands[0 if stores else 1], 64)

            def copy(warp: ResidentWarp, lanes: int) -> None:
                execute(warp, lanes)
                self._learn(pointer(warp, lanes))

            return copy
        return execute

    def _with_chain(self, execute: Executor, warp: ResidentWarp, lanes: int) -> Any:
        """Execute with the warp's chain in Python's hands, as long as it is not ended."""
        context, chains = warp.context, warp.cta.tmem.open_chains
        if 0 < context.chain_length < CHAIN_IN_PYTHON:
            chains[warp.index] = self._chain(warp)
        outcome = execute(warp, lanes)
        context.chain_length = CHAIN_IN_PYTHON if warp.index in chains else 0
        return outcome

    def _chain(self, warp: ResidentWarp) -> tuple[Any, list[Mma]]:
        """The chain that native code holds, as `isa.tcgen05` does."""
        chain = layout.Chain.from_address(warp.context.chain)
        descriptor = decode_instruction(chain.descriptor, "f16", chain.group)
        ctas = participants(warp.cta, chain.group)
        run = [
            Mma(ctas, descriptor, chain.d, chain.a[i], chain.b[i], bool(chain.a_in_tmem),
                bool(i or chain.accumulate))
            for i in range(warp.context.chain_length)
        ]
        return self.compiled.block_instruction[chain.block], run

    def _learn(self, pointer: int) -> None:
        """Let native code use a TMA descriptor that Python has used without complaint.

        Only descriptors among the kernel's parameters, which nothing can change.
        """
        known = self.native.map_count
        if known == MAPS or not self.memory.is_parameter(pointer, TENSORMAP_BYTES):
            return
        if any(self._maps[i].pointer == pointer for i in range(known)):
            return
        record = _tile_map(read_descriptor(self, pointer), self.memory)
        if record is not None:
            record.pointer = pointer
            self._maps[known] = record
            self.native.map_count = known + 1

    def ready_list(self) -> NativeCluster:
        return NativeCluster(self)

    def _begin(self, number: int) -> Cluster:
        cluster = super()._begin(number)
        cluster.ready.attach(cluster, self._table, self._eager)
        return cluster

    def new_mbarrier(self, cta: Cta, address: int, count: int) -> MBarrier:
        cluster = cta.cluster
        wake = functools.partial(self._wake_barrier, cluster)
        return MBarrier(address, count, wake, cluster.ready.new_barrier(address))

    def end_mbarriers(self, cta: Cta, address: int | None) -> None:
        cta.cluster.ready.end_barriers(cta.rank, address)

    def _wake_barrier(self, cluster: Cluster, barrier: MBarrier) -> None:
        """A phase has been completed by Python."""
        record = barrier.record
        if record.first:
            self._idle = cluster.polls = 0
            self._wake_waiters(ctypes.addressof(record))
            if not cluster.queued and cluster is not self._cluster:
                cluster.queued = True
                self._turns.append(cluster)
        if record.watched:
            record.watched = 0
            self.wake(barrier)

    def _wait(self, warp: ResidentWarp, lanes: int, outcome: Waiting | tuple) -> int:
        for waiting in outcome if type(outcome) is tuple else (outcome,):
            if isinstance(waiting.key, MBarrier):
                waiting.key.record.watched = 1
        return super()._wait(warp, lanes, outcome)

    def end_turn(self) -> None:
        if self._cluster is not None:
            self._cluster.ready.record.turn_over = 1

    def _run_cluster(self, cluster: Cluster) -> None:
        self._cluster = cluster
        queue, run = cluster.ready, self._run
        record, address = queue.record, queue.address
        record.turn_over = 0
        while True:
            record.polls = cluster.polls
            started = time.thread_time()
            kind = run(address, DEFAULT_BUDGET)
            self._native_seconds += time.thread_time() - started
            cluster.polls = record.polls
            if record.progress:
                record.progress = self._idle = 0
            warp = cluster.warps[record.stopped]
            if kind == TRAP:
                if not self._operate(warp):
                    record.current = 0
            elif kind < IDLE:
                record.current = 0
                self._stop(warp, kind)
            elif kind == LANES_EXITED:
                self._exit_lanes(warp)
            else:
                break
        self._cluster = None
        if kind == POLLING:
            self._polling.append(cluster)
        elif record.waiting:
            cluster.queued = True
            self._turns.append(cluster)

    def run(self) -> None:
        started = time.thread_time()
        super().run()
        self._account(time.thread_time() - started)
        self.counters["tma.load bytes"] += self.native.loaded
        self.counters["tma.store bytes"] += self.native.stored
        for counts, native in zip(self._operations, self._done_natively.tolist(), strict=True):
            counts[0] += native[0]
            counts[1] += native[1]

    def _account(self, seconds: float) -> None:
        """Split the time of the run; `seconds`: processor time of this machine's thread."""
        native = self.native
        tick = self._native_seconds / max(native.all_ticks, 1)
        parts = {
            "products": native.product_ticks, "operands": native.operand_ticks,
            "copies": native.copy_ticks,
        }  # fmt: skip
        self.seconds = {name: ticks * tick for name, ticks in parts.items()}
        self.seconds["instructions"] = self._native_seconds - sum(self.seconds.values())
        self.seconds["python"] = seconds - self._native_seconds

    def absorb(self, other: Machine) -> None:
        super().absorb(other)
        for name, seconds in other.seconds.items():
            self.seconds[name] += seconds


def _tile_map(tensor_map: TensorMap, memory: GlobalMemory) -> layout.TileMap | None:
    """A descriptor for `native.copies`; None if its tiles are not copied byte by byte, or if the
    tensor is not all in memory that the launch may touch."""
    t = tensor_map
    if t.interleave or t.element_bits < 8 or any(step != 1 for step in t.steps):
        return None
    if t.tf32 or t.dtype == "f32.ftz" or t.shared_bytes != t.tile_bytes or t.atom != 16:
        return None
    width = t.element_bits // 8
    counts = (t.tile_shape[0] * width, *t.tile_shape[1:])
    low, high = t.extent()
    if t.swizzle not in (0, counts[0]) or not memory.holds(low, high - low):
        return None
    record = layout.TileMap(
        address=t.address, bytes=t.tile_bytes, rank=t.rank, swizzle=t.swizzle, writable=1
    )
    for i in range(layout.DIMENSIONS):
        inside = i < t.rank
        record.last[i] = t.sizes[i] - t.tile_shape[i] if inside else 0
        record.strides[i] = (width, *t.strides)[i] if inside else 0
        record.counts[i] = counts[i] if inside else 1
    return record


def _address(array: np.ndarray) -> int:
    return array.ctypes.data


def _function(name: str, result: Any, *parameters: Any) -> Any:
    return ctypes.CFUNCTYPE(result, *parameters)(routine_address(name))
