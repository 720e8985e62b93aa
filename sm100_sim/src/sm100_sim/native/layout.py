"""Structures that native code and Python share; field order is part of the native ABI.

A field named in `pointers` holds an address; `language.field_type` gives its target to native code.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_uint32, c_uint64
from typing import Any, ClassVar

from .language import f32, i32, u8, u16, u32, u64

#: Most instructions of one accumulator chain, operands of one operation, and dimensions of a tile
#: that native code handles.
CHAIN_LIMIT = 32
OPERANDS = 12
DIMENSIONS = 5


class Context(ctypes.Structure):
    """View that native code has of one warp.

    wait_on, wait_lanes: the mbarrier that native code let lanes wait for; next_waiter: the warp
    that waits for the same barrier behind this one. queued: ready or running. present: lanes that
    barriers still count. chain: null unless asynchronous operations take effect at once. watch: of
    the sanitizer, as in `Barrier` and `Operation`, 0 without it. products: wgmmas that native code
    has issued and Python has not seen.
    """

    _fields_ = [
        ("r32", c_uint64), ("r64", c_uint64), ("preds", c_uint64), ("pcs", c_uint64),
        ("specials", c_uint64), ("block_counters", c_uint64), ("guard_counters", c_uint64),
        ("params", c_uint64), ("smem", c_uint64), ("smem_stride", c_uint64),
        ("smem_limits", c_uint64), ("ranges", c_uint64), ("local", c_uint64), ("clock", c_uint64),
        ("budget", c_uint64), ("fault_address", c_uint64), ("range_count", c_uint32),
        ("cta_count", c_uint32), ("local_bytes", c_uint32), ("shared_base", c_uint32),
        ("live", c_uint32), ("blocked", c_uint32), ("parked", c_uint32), ("stop_block", c_uint32),
        ("stop_lanes", c_uint32), ("fault_kind", c_uint32), ("fault_lane", c_uint32),
        ("fault_instruction", c_uint32), ("param_bytes", c_uint32), ("range_hint", c_uint32),
        ("fault_width", c_uint32), ("table", c_uint64), ("log", c_uint64), ("uses", c_uint64),
        ("cluster", c_uint64), ("cta", c_uint64), ("index", c_uint32), ("number", c_uint32),
        ("queued", c_uint32), ("present", c_uint32), ("wait_on", c_uint64),
        ("next_waiter", c_uint64), ("wait_lanes", c_uint32), ("chain_length", c_uint32),
        ("chain", c_uint64), ("watch", c_uint64), ("products", c_uint64),
    ]  # fmt: skip
    pointers: ClassVar[dict[str, Any]] = {
        "r32": u32, "r64": u64, "preds": u32, "pcs": i32, "specials": u32, "smem": u8,
        "cluster": lambda: Cluster, "cta": lambda: Cta, "wait_on": lambda: Barrier,
        "next_waiter": lambda: Context, "chain": lambda: Chain,
        "products": lambda: ProductQueue,
    }  # fmt: skip


class Barrier(ctypes.Structure):
    """State of one mbarrier (`barriers.MBarrier`).

    first, last: warps that native code let wait. watched: something waits in Python.
    """

    _fields_ = [
        ("phase", c_uint64), ("first", c_uint64), ("last", c_uint64), ("address", c_uint32),
        ("expected", c_uint32), ("pending", c_uint32), ("transactions", c_int32),
        ("watched", c_uint32), ("watch", c_uint64),
    ]  # fmt: skip
    pointers: ClassVar[dict[str, Any]] = {"first": lambda: Context, "last": lambda: Context}


class TensorMemory(ctypes.Structure):
    """One CTA's tensor memory: bit b of `owned` is set when columns 32 b .. 32 b + 31 are."""

    _fields_ = [("cells", c_uint64), ("owned", c_uint32)]
    pointers: ClassVar[dict[str, Any]] = {"cells": u32}


class Cta(ctypes.Structure):
    """One CTA. barriers_at: for each 8 bytes of shared memory 1 + the number of the mbarrier there
    among those of its cluster, or 0."""

    _fields_ = [
        ("smem", c_uint64), ("smem_bytes", c_uint64), ("barriers_at", c_uint64),
        ("tensor_memory", c_uint64), ("rank", c_uint32),
    ]  # fmt: skip
    pointers: ClassVar[dict[str, Any]] = {
        "smem": u8,
        "barriers_at": u16,
        "tensor_memory": lambda: TensorMemory,
    }


class Cluster(ctypes.Structure):
    """One cluster and its queue of ready warps.

    ring: addresses of contexts, `waiting` of them from `head` on, `capacity` places. current: the
    warp that runs, 0 between two. stopped: number of the warp that native code stopped with.
    polls: turns of warps that only polled since something happened. turn_over: stop between two
    warps. progress: set when lanes were woken.
    """

    _fields_ = [
        ("machine", c_uint64), ("ctas", c_uint64), ("barriers", c_uint64), ("ring", c_uint64),
        ("current", c_uint64), ("cta_count", c_uint32), ("head", c_uint32), ("waiting", c_uint32),
        ("capacity", c_uint32), ("stopped", c_uint32), ("polls", c_uint32),
        ("turn_over", c_uint32), ("progress", c_uint32),
    ]  # fmt: skip
    pointers: ClassVar[dict[str, Any]] = {
        "machine": lambda: Machine, "ctas": lambda: Cta, "barriers": lambda: Barrier, "ring": u64,
        "current": lambda: Context,
    }  # fmt: skip


class Operand(ctypes.Structure):
    """Operand as native code reads it: `kind` is one of `operands`; see there."""

    _fields_ = [("kind", c_uint32), ("slot", c_uint32), ("value", c_uint64)]


class Operation(ctypes.Structure):
    """A machine operation for a native routine: its operands, and numbers of its static form."""

    _fields_ = [
        ("operands", Operand * OPERANDS), ("form", c_uint64 * 6), ("watch", c_uint64),
    ]  # fmt: skip


#: Registers that one tcgen05.ld or st moves in a thread.
FRAGMENT_REGISTERS = 128
#: A slot of a Fragment that is no register: what is loaded there is dropped.
NO_SLOT = 0xFFFFFFFF


class Fragment(ctypes.Structure):
    """The static part of a tcgen05.ld or st (`isa.tcgen05_data.Form`).

    shape: place in `isa.tcgen05_data.SHAPES`. count: registers per thread; slots: theirs. packed: 1
    if a register holds the low halves of two columns. split: of 16x32bx2, in columns.
    """

    _fields_ = [
        ("shape", c_uint32), ("count", c_uint32), ("packed", c_uint32), ("split", c_uint32),
        ("slots", c_uint32 * FRAGMENT_REGISTERS),
    ]  # fmt: skip


class Chain(ctypes.Structure):
    """The accumulator chain that a warp is issuing (`tcgen05`): instructions that differ in
    their operands A and B only. block: of the first; group, a_in_tmem: of its form."""

    _fields_ = [
        ("a", c_uint64 * CHAIN_LIMIT), ("b", c_uint64 * CHAIN_LIMIT), ("block", c_uint32),
        ("d", c_uint32), ("descriptor", c_uint32), ("accumulate", c_uint32), ("group", c_uint32),
        ("a_in_tmem", c_uint32),
    ]  # fmt: skip


#: wgmmas that one warp may issue before Python looks.
PRODUCT_LIMIT = 64


class ProductQueue(ctypes.Structure):
    """wgmma.mma_async that a warp has issued, `count` of them. block: that stands for the
    instruction. a, b: descriptors, a 0 if A is in registers. accumulate: scale-d."""

    _fields_ = [
        ("a", c_uint64 * PRODUCT_LIMIT), ("b", c_uint64 * PRODUCT_LIMIT),
        ("block", c_uint32 * PRODUCT_LIMIT), ("accumulate", c_uint32 * PRODUCT_LIMIT),
        ("count", c_uint32),
    ]  # fmt: skip


class TileMap(ctypes.Structure):
    """A TMA descriptor (`state.tensormap.TensorMap`) for `native.tiles`.

    pointer: where the descriptor is. bytes: of a whole tile; shared_bytes: that it takes up in
    shared memory. width: bytes of an element; swizzle, atom: bytes. sizes: of the tensor, counts:
    of the tile, in elements; steps: of the tile in elements of the tensor; strides: bytes.
    Dimensions from the rank on have size and count 1. written: whether loads are for Python, since
    the sanitizer follows writes to that memory.
    """

    _fields_ = [
        ("pointer", c_uint64), ("address", c_uint64), ("bytes", c_uint64),
        ("shared_bytes", c_uint64), ("width", c_uint64), ("rank", c_uint32), ("swizzle", c_uint32),
        ("atom", c_uint32), ("tf32", c_uint32), ("nan_fill", c_uint32), ("written", c_uint32),
        ("sizes", c_int64 * DIMENSIONS), ("steps", c_uint64 * DIMENSIONS),
        ("strides", c_uint64 * DIMENSIONS), ("counts", c_uint64 * DIMENSIONS),
    ]  # fmt: skip


class Machine(ctypes.Structure):
    """One launch. operations: [block][executions, lanes] done by native code. loaded, stored: bytes
    of tiles. product: address of cblas_sgemm, 0 where there is none; wide: whether its integers
    have 64 bits. values_a, values_b, product_space: scratch memory of a matrix product. Ticks of
    `language.cycles`: all_ticks in native code, in the products, in MMAs around them, in copies."""

    _fields_ = [
        ("operations", c_uint64), ("maps", c_uint64), ("map_count", c_uint64),
        ("loaded", c_uint64), ("stored", c_uint64), ("product", c_uint64), ("values_a", c_uint64),
        ("values_b", c_uint64), ("product_space", c_uint64), ("all_ticks", c_uint64),
        ("product_ticks", c_uint64), ("operand_ticks", c_uint64), ("copy_ticks", c_uint64),
        ("wide", c_uint32),
    ]  # fmt: skip
    pointers: ClassVar[dict[str, Any]] = {
        "operations": u64, "maps": lambda: TileMap, "values_a": f32, "values_b": f32,
        "product_space": f32,
    }  # fmt: skip
