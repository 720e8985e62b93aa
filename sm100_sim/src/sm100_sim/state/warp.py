"""State of one warp, and the operand accessors that machine operations bind.

A warp owns its register files (numpy arrays that native code reads and writes in place), one
program point per lane and three lane masks: ``live`` (not exited), ``blocked`` (waiting at a trap)
and ``parked`` (waiting for the other lanes of their warp at a convergence point).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sm100_sim.native.layout import Context
from sm100_sim.ptx.parser import Instruction, Operand

ALL_LANES = 0xFFFFFFFF
SHARED_WINDOW = 0x7F00_0000_0000_0000
"""Generic address of shared address 0; far above every user-space pointer of the host."""
LOCAL_WINDOW = 0x7E00_0000_0000_0000
"""Generic address of local address 0; local memory is private to a lane."""
DEFAULT_BUDGET = 200_000
"""Backward branches that a warp may take in one turn of native code before it yields."""

SCALAR_SPECIALS = (
    *(
        f"%{name}.{axis}"
        for name in (
            "ntid",
            "ctaid",
            "nctaid",
            "cluster_ctaid",
            "cluster_nctaid",
            "clusterid",
            "nclusterid",
        )
        for axis in "xyz"
    ),
    "%cluster_ctarank",
    "%cluster_nctarank",
    "%warpid",
    "%nwarpid",
    "%smid",
    "%nsmid",
    "%dynamic_smem_size",
    "%total_smem_size",
    "%aggr_smem_size",
    "%is_explicit_cluster",
    "%gridid",
    "%reserved_smem_offset_begin",
    "%reserved_smem_offset_end",
)
"""Special registers with one 32-bit value for the warp, in the order native code stores them."""
SPECIAL_INDEX = {name: index for index, name in enumerate(SCALAR_SPECIALS)}
TID_OFFSET = 64
"""Index, in the array of special registers, of the 3 x 32 thread ids."""

FAULT_KINDS = (
    "",
    "shared access outside the allocated bytes",
    "misaligned shared access",
    "global access outside the tensors of the launch",
    "misaligned global access",
    "write to read-only memory",
    "local access outside the stack",
    "parameter access outside the parameter buffer",
    "shared access to a CTA rank outside the cluster",
    "shared::cta access outside the CTA's own shared memory",
)


@dataclass(frozen=True, slots=True)
class Environment:
    """The memory that the warps of one cluster may touch.

    smem    uint8 (CTAs of the cluster, bytes): shared memory by CTA rank
    limits  uint32 (CTAs,): bytes of each row that are allocated; 0 after the CTA has exited
    ranges  uint64 (n, 3): start, end and writability (0 or 1) of the global ranges, ascending and
            disjoint; host addresses. The parameter buffer is allowed without being listed.
    params  uint8 (bytes,): the kernel's parameter buffer
    """

    smem: np.ndarray
    limits: np.ndarray
    ranges: np.ndarray
    params: np.ndarray


@dataclass(frozen=True, slots=True)
class Fault:
    """A refused memory access: what was wrong, the lane and the address it used."""

    reason: str
    lane: int
    address: int
    width: int


class Warp:
    """One warp of a CTA.

    Attributes: ``cta`` (the machine's object), ``index`` (warp id in the CTA), ``r32`` uint32
    (n32, 32), ``r64`` uint64 (n64, 32), ``preds`` uint32 (npred,), ``pcs`` int32 (32,) block index
    per lane, ``waiting`` (what blocked lanes wait for: lane mask -> object).
    """

    __slots__ = (
        "compiled",
        "cta",
        "index",
        "environment",
        "rank",
        "r32",
        "r64",
        "preds",
        "pcs",
        "context",
        "waiting",
        "_bank",
        "_counters",
    )

    def __init__(
        self,
        compiled: Any,
        cta: Any,
        index: int,
        environment: Environment,
        specials: dict[str, int],
        counters: Any,
        bank: WarpBank | None = None,
    ) -> None:
        """``bank``: that of the CTA's warps, made with the same arguments; by default the warp
        gets one of its own."""
        if bank is None:
            bank = WarpBank(compiled, environment, specials, counters, range(index, index + 1))
        place = index - bank.first
        self.compiled, self.cta, self.index, self.environment = compiled, cta, index, environment
        self.rank = specials.get("%cluster_ctarank", 0)
        self.r32, self.r64 = bank.r32[place], bank.r64[place]
        self.preds, self.pcs = bank.preds[place], bank.pcs[place]
        self.waiting: dict[int, object] = {}
        self._counters, self._bank = counters, bank
        self.context = bank.contexts[place]

    @property
    def block_counts(self) -> np.ndarray:
        """The launch's counters, uint64 (blocks, 2): executions by a warp, lanes."""
        return self._counters.blocks

    @property
    def live(self) -> int:
        """Mask of lanes that have not exited."""
        return self.context.live

    @property
    def blocked(self) -> int:
        """Mask of lanes that wait at a trap."""
        return self.context.blocked

    @property
    def runnable(self) -> int:
        """Mask of lanes that are alive and not blocked."""
        return self.context.live & ~self.context.blocked

    def block(self, lanes: int, waiting: object) -> None:
        """``lanes`` of the trap just reported stay at it until ``unblock``; it is then retried."""
        context = self.context
        self.pcs[lane_array(lanes)] = context.stop_block
        context.blocked |= lanes
        self.waiting[lanes] = waiting

    def unblock(self, lanes: int = ALL_LANES) -> None:
        """Let blocked ``lanes`` run again (their trap is executed again)."""
        self.context.blocked &= ~lanes & ALL_LANES
        if self.waiting:
            self.waiting = {
                left: waiting for mask, waiting in self.waiting.items() if (left := mask & ~lanes)
            }

    def instruction_of(self, lane: int) -> Instruction:
        """First instruction of the basic block at which ``lane`` stands."""
        return self.compiled.block_instruction[self.pcs[lane]]


class WarpBank:
    """Registers and contexts of consecutive warps of one CTA, an array of each kind for all.

    r32 uint32 (warps, n32, 32); r64 uint64 (warps, n64, 32); preds uint32 (warps, npred); pcs int32
    (warps, 32); contexts: of the native code. Raises ValueError for warps without threads.
    """

    def __init__(
        self,
        compiled: Any,
        environment: Environment,
        specials: dict[str, int],
        counters: Any,
        warps: range,
        pages: Pages | None = None,
    ) -> None:
        self.first, count = warps.start, len(warps)
        pages = pages or Pages()
        # Registers start with a recognisable pattern: a NaN that no kernel computes.
        rows32, rows64 = max(compiled.r32_count, 1), max(compiled.r64_count, 1)
        self.r32 = pages.filled((count, rows32, 32), np.uint32, 0xFFF0_5EED)
        self.r64 = pages.filled((count, rows64, 32), np.uint64, 0xFFF0_5EED_FFF0_5EED)
        self.preds = np.zeros((count, max(compiled.pred_count, 1)), np.uint32)
        self.pcs = np.zeros((count, 32), np.int32)
        self._local = np.zeros((count, 32, max(compiled.kernel.local_bytes, 1)), np.uint8)
        self._specials = _special_array(warps, specials)
        self._counters, self._environment = counters, environment
        self.contexts = (Context * count)()
        self._fill_contexts(compiled, specials, warps)

    def _fill_contexts(self, compiled: Any, specials: dict[str, int], warps: range) -> None:
        environment, pointer = self._environment, _data_pointer
        template = Context(
            block_counters=pointer(self._counters.blocks),
            guard_counters=pointer(self._counters.guards),
            params=pointer(environment.params),
            param_bytes=environment.params.nbytes,
            smem=pointer(environment.smem),
            smem_stride=environment.smem.strides[0],
            smem_limits=pointer(environment.limits),
            cta_count=environment.smem.shape[0],
            ranges=pointer(environment.ranges),
            range_count=len(environment.ranges),
            local_bytes=compiled.kernel.local_bytes,
            table=pointer(compiled.table),
            shared_base=specials.get("%cluster_ctarank", 0) << 24,
            budget=DEFAULT_BUDGET,
        )
        source, size = ctypes.addressof(template), ctypes.sizeof(template)
        threads = int(np.prod(self._specials[0, :3], dtype=np.int64))
        rows = [
            (name, pointer(array), array.strides[0])
            for name, array in (
                ("r32", self.r32),
                ("r64", self.r64),
                ("preds", self.preds),
                ("pcs", self.pcs),
                ("specials", self._specials),
                ("local", self._local),
            )
        ]
        for place, index in enumerate(warps):
            lanes = min(32, threads - 32 * index)
            if lanes <= 0:
                raise ValueError(f"warp {index} lies outside a CTA of {threads} threads")
            context = self.contexts[place]
            ctypes.memmove(ctypes.addressof(context), source, size)
            for name, start, stride in rows:
                setattr(context, name, start + place * stride)
            context.live = (1 << lanes) - 1


class Pages:
    """Arrays of clusters that have ended, for those that begin: pages that are new to the process
    cost many times what filling them does."""

    def __init__(self) -> None:
        self._spare: dict[tuple[Any, ...], list[np.ndarray]] = {}

    def filled(self, shape: tuple[int, ...], dtype: Any, value: int) -> np.ndarray:
        """Return an array on a cache line, full of a value."""
        spare = self._spare.get((shape, np.dtype(dtype)))
        array = spare.pop() if spare else aligned_zeros(shape, dtype)
        array.fill(value)
        return array

    def give(self, *arrays: np.ndarray) -> None:
        """Take back arrays that nobody uses any more."""
        for array in arrays:
            self._spare.setdefault((array.shape, array.dtype), []).append(array)


def aligned_zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Zeros that start on a cache line, so that no vector access straddles two lines."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(count + 64, np.uint8)
    start = -_data_pointer(raw) % 64
    return raw[start : start + count].view(dtype).reshape(shape)


def _data_pointer(array: np.ndarray) -> int:
    return array.ctypes.data


def _special_array(warps: range, specials: dict[str, int]) -> np.ndarray:
    """uint32 (warps, words): one value each of the special registers, then the thread ids."""
    values = np.zeros((len(warps), TID_OFFSET + 3 * 32), np.uint32)
    row = values[0]
    row[: SPECIAL_INDEX["%cluster_ctarank"]] = [
        0 if name.startswith(("%ctaid", "%cluster_ctaid", "%clusterid")) else 1
        for name in SCALAR_SPECIALS[: SPECIAL_INDEX["%cluster_ctarank"]]
    ]
    for name, value in {
        "%cluster_nctarank": 1,
        "%is_explicit_cluster": 1,
        "%reserved_smem_offset_end": 1024,
        **specials,
    }.items():
        if name not in SPECIAL_INDEX:
            raise KeyError(
                f"{name} is not a special register with one value for the warp; "
                f"known: {', '.join(SCALAR_SPECIALS)}"
            )
        row[SPECIAL_INDEX[name]] = value
    values[1:] = row
    values[:, SPECIAL_INDEX["%warpid"]] = warps
    values[:, TID_OFFSET:] = _thread_ids(int(row[0]), int(row[1]), warps)
    return values


@functools.lru_cache(maxsize=64)
def _thread_ids(x: int, y: int, warps: range) -> np.ndarray:
    """%tid.x, y and z of the lanes of each warp: uint32 (warps, 96)."""
    thread = 32 * np.array(warps)[:, None] + np.arange(32)
    return np.concatenate((thread % x, thread // x % y, thread // (x * y)), 1).astype(np.uint32)


@functools.lru_cache(maxsize=1 << 12)
def lane_array(lanes: int) -> np.ndarray:
    """Lane mask as a read-only bool array of shape (32,)."""
    result = (lanes >> np.arange(32)) & 1 == 1
    result.flags.writeable = False
    return result


def lowest_lane(lanes: int) -> int:
    """Index of the lowest set lane of a nonzero mask."""
    return (lanes & -lanes).bit_length() - 1


# Operand accessors. Each is bound once per instruction and called for every execution.


def _immediate(op: Operand, bits: int) -> int:
    if op.type == "f64" and bits == 32:
        value = np.array([op.value], np.uint64).view(np.float64).astype(np.float32)
        return int(value.view(np.uint32)[0])
    return op.value & ((1 << bits) - 1)


def _unsupported(what: str, op: Operand) -> ValueError:
    return ValueError(f"{what} cannot take an operand of kind {op.kind!r} ({op.name})")


def _register_row(op: Operand) -> tuple[str, int]:
    return op.register.file, op.slot


def reader(op: Operand, bits: int) -> Callable[[Warp], np.ndarray]:
    """Per-lane value: uint32 (32,) or, for 64 bits, uint64 (32,); b128 gives uint64 (2, 32).

    Registers give a live view, not a copy. Immediates are broadcast; mem operands give base plus
    offset; shared symbols give the address in the warp's own CTA.
    """
    dtype = np.uint64 if bits >= 64 else np.uint32
    if op.kind == "reg":
        file, slot = _register_row(op)
        if bits == 128:
            return lambda warp: warp.r64[slot : slot + 2]
        if file == "r64":
            return lambda warp: warp.r64[slot]
        return lambda warp: warp.r32[slot]
    if op.kind == "imm":
        constant = np.full(32, _immediate(op, bits), dtype)
        constant.flags.writeable = False
        return lambda warp: constant
    if op.kind == "sym" and op.type == "shared":
        offset = op.value
        return lambda warp: np.full(32, (warp.rank << 24) + offset, dtype)
    if op.kind == "mem":
        base, offset = reader(op.base, bits), dtype(op.value & ((1 << bits) - 1))
        return base if not op.value else lambda warp: base(warp) + offset
    raise _unsupported("a per-lane read", op)


def uniform(op: Operand, bits: int) -> Callable[[Warp, int], int]:
    """Value in the lowest set lane, as a Python int; predicates give 0 or 1."""
    if op.kind == "reg":
        file, slot = _register_row(op)
        if file == "r64":
            return lambda warp, lanes: warp.r64.item(slot, (lanes & -lanes).bit_length() - 1)
        return lambda warp, lanes: warp.r32.item(slot, (lanes & -lanes).bit_length() - 1)
    if op.kind == "imm":
        constant = _immediate(op, bits)
        return lambda warp, lanes: constant
    if op.kind == "sym" and op.type == "shared":
        offset = op.value
        return lambda warp, lanes: (warp.rank << 24) + offset
    if op.kind == "pred":
        mask = predicate_reader(op)
        return lambda warp, lanes: 1 if mask(warp) & lanes & -lanes else 0
    if op.kind == "mem":
        return address(op, bits)
    raise _unsupported("a uniform read", op)


def address(op: Operand, bits: int) -> Callable[[Warp, int], int]:
    """Base plus offset of a mem operand in the lowest set lane, modulo 2**bits."""
    if op.kind != "mem":
        raise _unsupported("an address", op)
    base, offset, mask = uniform(op.base, bits), op.value, (1 << bits) - 1
    if not offset:
        return base
    return lambda warp, lanes: (base(warp, lanes) + offset) & mask


def predicate_reader(op: Operand) -> Callable[[Warp], int]:
    """Lane mask in which a predicate (or 0/1 immediate) holds, negation applied."""
    if op.kind == "imm":
        constant = ALL_LANES if op.value else 0
        return lambda warp: constant
    if op.kind != "pred":
        raise _unsupported("a predicate read", op)
    slot = op.slot
    if op.negated:
        return lambda warp: ~int(warp.preds[slot]) & ALL_LANES
    return lambda warp: int(warp.preds[slot])


def _rows(items: tuple[Operand, ...]) -> tuple[str, list[int]]:
    files = {item.register.file for item in items if item.kind == "reg"}
    if len(files) != 1 or any(item.kind not in ("reg", "sink") for item in items):
        raise ValueError("a vector operand must consist of registers of one width")
    return files.pop(), [item.slot if item.kind == "reg" else -1 for item in items]


def vector_reader(op: Operand) -> Callable[[Warp], np.ndarray]:
    """Registers of a vector (or one register) as (n, 32); a view when they are consecutive."""
    file, rows = _rows(op.items if op.kind == "vec" else (op,))
    if -1 in rows:
        raise ValueError("a source vector cannot contain '_'")
    index = _slice_or_array(rows)
    if file == "r64":
        return lambda warp: warp.r64[index]
    return lambda warp: warp.r32[index]


def _slice_or_array(rows: list[int]) -> slice | np.ndarray:
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return np.array(rows)


def vector_writer(op: Operand) -> Callable[[Warp, int, np.ndarray], None]:
    """Write an array (n, 32) to the registers of a vector in the given lanes; '_' drops a row."""
    file, rows = _rows(op.items if op.kind == "vec" else (op,))
    kept = [row for row, slot in enumerate(rows) if slot >= 0]
    index = _slice_or_array([rows[row] for row in kept])
    pick = None if len(kept) == len(rows) else np.array(kept)
    wide = file == "r64"

    def write(warp: Warp, lanes: int, values: np.ndarray) -> None:
        registers = warp.r64 if wide else warp.r32
        values = values if pick is None else values[pick]
        if lanes == ALL_LANES:
            registers[index] = values
        else:
            registers[index] = np.where(lane_array(lanes), values, registers[index])

    return write


def writer(op: Operand, bits: int) -> Callable[[Warp, int, np.ndarray | int], None]:
    """Write one value per lane (or one int for all) to a register in the given lanes.

    A b128 register takes uint64 (2, 32) or (2, 1).
    """
    if op.kind == "sink":
        return lambda warp, lanes, value: None
    if op.kind != "reg":
        raise _unsupported("a register write", op)
    file, slot = _register_row(op)
    if bits == 128:
        rows = slice(slot, slot + 2)

        def write_wide(warp: Warp, lanes: int, value: np.ndarray | int) -> None:
            warp.r64[rows] = np.where(lane_array(lanes), value, warp.r64[rows])

        return write_wide
    mask, wide = (1 << bits) - 1, file == "r64"

    def write(warp: Warp, lanes: int, value: np.ndarray | int) -> None:
        row = warp.r64[slot] if wide else warp.r32[slot]
        value = value & mask if isinstance(value, int) or bits < 32 else value
        if lanes == ALL_LANES:
            row[:] = value
        elif isinstance(value, np.ndarray):
            np.copyto(row, value, where=lane_array(lanes), casting="unsafe")
        else:
            row[lane_array(lanes)] = value

    return write


def predicate_writer(op: Operand) -> Callable[[Warp, int, int], None]:
    """Set a predicate in the given lanes to the bits of a lane mask."""
    if op.kind == "sink":
        return lambda warp, lanes, mask: None
    if op.kind != "pred":
        raise _unsupported("a predicate write", op)
    slot = op.slot

    def write(warp: Warp, lanes: int, mask: int) -> None:
        warp.preds[slot] = (int(warp.preds[slot]) & ~lanes & ALL_LANES) | (mask & lanes)

    return write
