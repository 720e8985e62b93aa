"""Structures of the sanitizer that native code and Python share (`native.layout` has those of the
machine); field order is part of the native ABI."""

from __future__ import annotations

import ctypes
import weakref
from ctypes import c_int32, c_uint32, c_uint64
from typing import Any, ClassVar

import numpy as np

from sm100_sim.native.language import i32, u8, u32

#: Clock of an access that is in flight: no frontier reaches it.
IN_FLIGHT = 0x7FFFFFFF
#: Numbers of the kinds of access (`shadow.Access`).
KINDS = (
    "generic", "ld", "st", "mma", "tma", "bulk", "clc", "alloc", "dealloc", "arrive", "atomic",
    "copy", "stored", "reduced", "wgmma",
)  # fmt: skip
GENERIC_KIND, LOAD_KIND, STORE_KIND, MMA_KIND, TMA_KIND, BULK_KIND, CLC_KIND = range(7)
ARRIVE_KIND, ATOMIC_KIND, REDUCED_KIND = 9, 10, 13
#: Kinds of access that go through the async proxy to shared memory, and through the generic one,
#: as masks.
ASYNC_KINDS = sum(1 << KINDS.index(kind) for kind in ("tma", "mma", "bulk", "clc", "wgmma"))
GENERIC_KINDS = sum(
    1 << KINDS.index(kind) for kind in ("generic", "atomic", "copy", "stored", "reduced")
)


class AccessRow(ctypes.Structure):
    """An access as native code sees it (`shadow.Access`). index: of the instruction, -1 for none.
    signal: shared address of the mbarrier that tells of a copy's completion, 0 for none."""

    _fields_ = [
        ("agent", c_int32), ("clock", c_int32), ("kind", c_uint32), ("write", c_uint32),
        ("warp", c_uint32), ("issued", c_int32), ("index", c_int32), ("signal", c_uint32),
    ]  # fmt: skip


class BufferRecord(ctypes.Structure):
    """An array that grows: address, items in use, items that fit, address of the function that
    makes room for a number of items more."""

    _fields_ = [("data", c_uint64), ("count", c_uint32), ("capacity", c_uint32), ("grow", c_uint64)]


class ShadowRecord(ctypes.Structure):
    """`shadow.Shadow`. plane: `cells` numbers of states. last: the state made last. judge: address
    of the function for pairs that native code does not find ordered. agents: of a frontier.
    in_order: tcgen05 instructions of one warp are."""

    _fields_ = [
        ("plane", c_uint64), ("states", c_uint64), ("accesses", c_uint64), ("judge", c_uint64),
        ("cells", c_uint64), ("agents", c_uint32), ("in_order", c_uint32), ("last", c_int32),
    ]  # fmt: skip
    pointers: ClassVar[dict[str, Any]] = {
        "plane": i32,
        "states": lambda: BufferRecord,
        "accesses": lambda: BufferRecord,
    }


class CtaRecord(ctypes.Structure):
    """`state.CtaState`. guests: by agent the number of its latest access from elsewhere."""

    _fields_ = [("smem", c_uint64), ("tmem", c_uint64), ("guests", c_uint64)]
    pointers: ClassVar[dict[str, Any]] = {
        "smem": lambda: ShadowRecord,
        "tmem": lambda: ShadowRecord,
        "guests": i32,
    }


class WriterRow(ctypes.Structure):
    """A write to global memory (`global_memory.Writers`). cluster: its number in the grid; rank: of
    the CTA; warp: number in the cluster. index: of the instruction."""

    _fields_ = [
        ("cluster", c_uint32), ("rank", c_uint32), ("warp", c_uint32), ("agent", c_int32),
        ("clock", c_int32), ("issued", c_int32), ("kind", c_uint32), ("index", c_int32),
    ]  # fmt: skip


class RangeRecord(ctypes.Structure):
    """A range of global memory; plane: numbers of the last writes of its granules, 0 if the launch
    has not written there."""

    _fields_ = [("start", c_uint64), ("end", c_uint64), ("plane", c_uint64)]
    pointers: ClassVar[dict[str, Any]] = {"plane": i32}


class GlobalRecord(ctypes.Structure):
    """`global_memory.GlobalWrites`. ranges: `count` of them, in order. guarded: stores are for
    Python, because tensor maps lie in global memory."""

    _fields_ = [
        ("ranges", c_uint64), ("count", c_uint64), ("writers", c_uint64), ("guarded", c_uint64)
    ]  # fmt: skip
    pointers: ClassVar[dict[str, Any]] = {
        "ranges": lambda: RangeRecord,
        "writers": lambda: BufferRecord,
    }


class ClusterRecord(ctypes.Structure):
    """`state.ClusterState`. memory: host address of the shared memory, `row` bytes per CTA, `bytes`
    in all. ordered: by instruction whether its accesses order others. writes: to global memory.
    warps: in the cluster; agents, size: of a frontier. record, unbalanced: addresses of functions
    in Python. number: in the grid. products: a wgmma has been executed."""

    _fields_ = [
        ("memory", c_uint64), ("row", c_uint64), ("bytes", c_uint64), ("ctas", c_uint64),
        ("accesses", c_uint64), ("ordered", c_uint64), ("writes", c_uint64), ("warps", c_uint64),
        ("agents", c_uint64), ("size", c_uint64), ("record", c_uint64), ("unbalanced", c_uint64),
        ("number", c_uint32), ("products", c_uint32),
    ]  # fmt: skip
    pointers: ClassVar[dict[str, Any]] = {
        "ctas": lambda: CtaRecord,
        "accesses": lambda: BufferRecord,
        "ordered": u8,
        "writes": lambda: GlobalRecord,
    }


class WarpRecord(ctypes.Structure):
    """`state.WarpState`. frontier: its address. issued: clocks of the warp's agents. joining:
    address of the frontier of a barrier's round that is to be taken in, 0 for none. loads: pairs
    (clock, number) of `load_room` tcgen05.ld; those from `load_first` to before `load_end` are in
    flight. inits: mbarriers whose initialisation no fence has shown to others."""

    _fields_ = [
        ("frontier", c_uint64), ("published", c_uint64), ("cluster", c_uint64),
        ("joining", c_uint64), ("number", c_uint32), ("rank", c_uint32), ("clock", c_int32),
        ("recorded", c_uint32), ("unfenced", c_uint32), ("met", c_uint32), ("inits", c_uint32),
        ("loads", c_uint64), ("load_first", c_uint32), ("load_end", c_uint32),
        ("load_room", c_uint32), ("issued", c_int32 * 7),
    ]  # fmt: skip
    pointers: ClassVar[dict[str, Any]] = {
        "frontier": i32,
        "published": i32,
        "cluster": lambda: ClusterRecord,
        "loads": i32,
    }


#: Instructions that native code remembers of those by which one warp has arrived at an mbarrier.
ROLES = 16


class BarrierRecord(ctypes.Structure):
    """`barriers.WatchedBarrier`. The arrays but for the frontiers have an entry a warp; roles have
    ROLES, for instructions by which it has arrived, -1 where there are no more. warp, clock: of the
    init. completed: phases."""

    _fields_ = [
        ("gathering", c_uint64), ("released", c_uint64), ("observed", c_uint64),
        ("last_waits", c_uint64), ("arrivals", c_uint64), ("usual", c_uint64), ("roles", c_uint64),
        ("agent", c_int32), ("base", c_int32), ("warp", c_uint32), ("clock", c_int32),
        ("fenced", c_uint32), ("skipped", c_uint32), ("signalled", c_uint32),
        ("completed", c_uint32),
    ]  # fmt: skip
    pointers: ClassVar[dict[str, Any]] = dict.fromkeys(
        ("gathering", "released", "observed", "last_waits", "arrivals", "usual", "roles"), i32
    )


class OperationRecord(ctypes.Structure):
    """Instruction of a watched routine. index: its own; load: number of a tcgen05.ld; relaxed,
    narrow: of an arrive; used: addresses of `used_count` numbers of tcgen05.ld whose data are
    operands."""

    _fields_ = [
        ("index", c_uint32), ("load", c_uint32), ("relaxed", c_uint32), ("narrow", c_uint32),
        ("used", c_uint64), ("used_count", c_uint64),
    ]  # fmt: skip
    pointers: ClassVar[dict[str, Any]] = {"used": u32}


class Log(ctypes.Structure):
    """Head of the log of accesses (`translate/access_log.py`)."""

    _fields_ = [("count", c_uint32), ("limit", c_uint32), ("drain", c_uint64)]


class LogRecord(ctypes.Structure):
    """One of its records (`LOG_RECORD` there)."""

    _fields_ = [
        ("mask", c_uint32), ("width", c_uint32), ("tag", c_uint32), ("unused", c_uint32),
        ("addresses", c_uint64 * 32),
    ]  # fmt: skip


_buffers: weakref.WeakValueDictionary[int, Buffer] = weakref.WeakValueDictionary()


@ctypes.CFUNCTYPE(None, c_uint64, c_uint32)
def _grow(address: int, more: int) -> None:
    _buffers[address].reserve(more)


class Buffer:
    """The items of a BufferRecord; `dtype`: of an item. items: numpy array, `record.count` of them
    are in use."""

    def __init__(self, dtype: Any, used: int) -> None:
        self.items = np.zeros(1024, dtype)
        self.record = BufferRecord(
            count=used, capacity=len(self.items), grow=ctypes.cast(_grow, ctypes.c_void_p).value
        )
        self.record.data = self.items.ctypes.data
        self.address = ctypes.addressof(self.record)
        _buffers[self.address] = self

    def reserve(self, more: int) -> None:
        """Make room for `more` items."""
        record = self.record
        if record.count + more > record.capacity:
            items = np.zeros(2 * (record.capacity + more), self.items.dtype)
            items[: len(self.items)] = self.items
            self.items = items
            record.data, record.capacity = items.ctypes.data, len(items)
