"""Structures of the sanitizer that native code and Python share (`native.layout` has those of the
machine); field order is part of the native ABI."""

from __future__ import annotations

import ctypes
import weakref
from ctypes import c_int32, c_uint32, c_uint64
from typing import Any, ClassVar

import numpy as np

from sm100_sim.native.language import i32, u8

#: Clock of an access that is in flight: no frontier reaches it.
IN_FLIGHT = 0x7FFFFFFF
#: Numbers of the kinds of access (`shadow.Access`).
KINDS = (
    "generic", "ld", "st", "mma", "tma", "bulk", "clc", "alloc", "dealloc", "arrive", "atomic",
    "copy", "stored", "reduced",
)  # fmt: skip
GENERIC_KIND, LOAD_KIND, STORE_KIND, MMA_KIND, TMA_KIND, BULK_KIND, CLC_KIND = range(7)
ARRIVE_KIND, ATOMIC_KIND, REDUCED_KIND = 9, 10, 13
#: Kinds of access that go through the async proxy to shared memory, and through the generic one,
#: as masks.
ASYNC_KINDS = sum(1 << KINDS.index(kind) for kind in ("tma", "mma", "bulk", "clc"))
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
        "plane": i32, "states": lambda: BufferRecord, "accesses": lambda: BufferRecord,
    }


class ClusterRecord(ctypes.Structure):
    """`state.ClusterState`. smem: host address of the shared memory, `row` bytes a CTA, `bytes` in
    all. shadows: addresses of the ShadowRecords of shared memory by rank, then of tensor memory.
    ordered: by instruction whether its accesses order others. ranges: (start, end) of each of
    `range_count` ranges of global memory that the launch has written to."""

    _fields_ = [
        ("smem", c_uint64), ("row", c_uint64), ("bytes", c_uint64), ("shadows", c_uint64),
        ("accesses", c_uint64), ("ordered", c_uint64), ("ranges", c_uint64),
    ]  # fmt: skip
    pointers: ClassVar[dict[str, Any]] = {"accesses": lambda: BufferRecord, "ordered": u8}


class WarpRecord(ctypes.Structure):
    """`state.WarpState`. frontier: its address. issued: clocks of the warp's agents. joining:
    address of the frontier of a barrier's round that is to be taken in, 0 for none."""

    _fields_ = [
        ("frontier", c_uint64), ("published", c_uint64), ("cluster", c_uint64),
        ("joining", c_uint64), ("number", c_uint32), ("rank", c_uint32), ("clock", c_int32),
        ("recorded", c_uint32), ("unfenced", c_uint32), ("met", c_uint32), ("issued", c_int32 * 7),
    ]  # fmt: skip
    pointers: ClassVar[dict[str, Any]] = {
        "frontier": i32, "published": i32, "cluster": lambda: ClusterRecord,
    }


class Log(ctypes.Structure):
    """Head of the log of accesses (`codegen_log`)."""

    _fields_ = [("count", c_uint32), ("limit", c_uint32), ("drain", c_uint64)]


class LogRecord(ctypes.Structure):
    """One of its records (`codegen_log.LOG_RECORD`)."""

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

