"""Native state of a launch and of its clusters (`native.layout`)."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from sm100_sim.isa.copies import tiles
from sm100_sim.isa.copies.tma import read_descriptor
from sm100_sim.native import layout
from sm100_sim.native.products import K_STEP, ROWS
from sm100_sim.state.memory import GlobalMemory
from sm100_sim.state.tensormap import TENSORMAP_BYTES, TensorMap
from sm100_sim.state.warp import aligned_zeros
from sm100_sim.translate.kernel import routine_address

from .blas import sgemm
from .residency import MBARRIER_BYTES, Cluster, ResidentWarp

#: mbarriers of one CTA that native code knows; Python takes care of the others.
NATIVE_BARRIERS = 64
#: TMA descriptors of one launch that native code knows.
MAPS = 64
#: float32 values of A, of B and of a product that native code needs room for.
SCRATCH = (ROWS * K_STEP * layout.CHAIN_LIMIT, 256 * K_STEP * layout.CHAIN_LIMIT, 256 * ROWS)


class NativeLaunch:
    """Native state of a launch.

    blocks: of the kernel. done: uint64 (blocks, 2), machine operations done in native code:
    executions by a warp, lanes. seconds: processor time in native code.
    """

    def __init__(self, blocks: int) -> None:
        self.done = np.zeros((blocks, 2), np.uint64)
        self.seconds = 0.0
        self._maps = (layout.TileMap * MAPS)()
        self._scratch = [aligned_zeros((size,), np.float32) for size in SCRATCH]
        product, wide = sgemm()
        values_a, values_b, product_space = map(_address, self._scratch)
        self.record = layout.Machine(
            operations=_address(self.done),
            maps=ctypes.addressof(self._maps),
            product=product,
            wide=wide,
            values_a=values_a,
            values_b=values_b,
            product_space=product_space,
        )
        self.address = ctypes.addressof(self.record)
        self.run = _function("run_cluster", ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64)

    @property
    def maps(self) -> list[layout.TileMap]:
        """The TMA descriptors that native code copies by."""
        return self._maps[: self.record.map_count]

    def learn(self, machine: Any, pointer: int) -> bool:
        """Let native code use a TMA descriptor that Python has used without complaint.

        Only descriptors among the kernel's parameters, which nothing can change. Returns whether
        it does from now on and did not before.
        """
        memory: GlobalMemory = machine.memory
        if len(self.maps) == MAPS or not memory.is_parameter(pointer, TENSORMAP_BYTES):
            return False
        if any(known.pointer == pointer for known in self.maps):
            return False
        record = _tile_map(read_descriptor(machine, pointer), memory)
        if record is None:
            return False
        self._maps[self.record.map_count] = record
        self._maps[self.record.map_count].pointer = pointer
        self.record.map_count += 1
        return True

    def account(self, counters: Counter[str], seconds: float) -> dict[str, float]:
        """Count the bytes that native code copied; returns the parts of the processor time of a
        run (`report.Report.seconds`). seconds: of the run, on its thread."""
        native = self.record
        counters["tma.load bytes"] += native.loaded
        counters["tma.store bytes"] += native.stored
        tick = self.seconds / max(native.all_ticks, 1)
        ticks = {
            "products": native.product_ticks, "operands": native.operand_ticks,
            "copies": native.copy_ticks,
        }  # fmt: skip
        parts = {name: number * tick for name, number in ticks.items()}
        parts["instructions"] = self.seconds - sum(parts.values())
        parts["python"] = seconds - self.seconds
        return parts


class NativeCluster:
    """Native state of a cluster; also its queue of ready warps."""

    def __init__(self, launch: NativeLaunch, ctas: int, warps: int, shared_bytes: int) -> None:
        """ctas, warps: of the cluster; shared_bytes: of a CTA."""
        self._ring = np.zeros(warps, np.uint64)
        self._barriers = (layout.Barrier * (ctas * NATIVE_BARRIERS))()
        self._free = list(range(len(self._barriers) - 1, -1, -1))
        self._chains = (layout.Chain * warps)()
        self._products = (layout.ProductQueue * warps)()
        self.ctas = (layout.Cta * ctas)()
        #: [rank, offset / 8]: see `layout.Cta`.
        self.barriers_at = np.zeros((ctas, -(-shared_bytes // MBARRIER_BYTES)), np.uint16)
        self.record = layout.Cluster(
            machine=launch.address,
            ctas=ctypes.addressof(self.ctas),
            barriers=ctypes.addressof(self._barriers),
            ring=_address(self._ring),
            cta_count=ctas,
            capacity=warps,
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
            context.products = ctypes.addressof(self._products[number])
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

    def current_of(self, warps: list[ResidentWarp]) -> ResidentWarp | None:
        """The warp of the cluster that runs, None between two."""
        current = self.record.current
        return warps[layout.Context.from_address(current).number] if current else None

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


def _tile_map(tensor_map: TensorMap, memory: GlobalMemory) -> layout.TileMap | None:
    """A descriptor for `native.copies`; None if its elements are not moved as they are, or if the
    tensor is not all in memory that the launch may touch."""
    low, high = tensor_map.extent()
    if tensor_map.element_bits < 8 or not memory.holds(low, high - low):
        return None
    return tiles.record_of(tensor_map)


def _address(array: np.ndarray) -> int:
    return array.ctypes.data


def _function(name: str, result: Any, *parameters: Any) -> Any:
    return ctypes.CFUNCTYPE(result, *parameters)(routine_address(name))
