"""atom and red on shared and global memory (PTX ISA 9.7.14.6 and 9.7.14.7).

Lanes execute one after the other in ascending order, so results do not depend on the host. Scope
and ordering modifiers change no result, because warps run one at a time. add.f32 flushes subnormals
on global memory and keeps them on shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sm100_sim.errors import MemoryFault, Misaligned
from sm100_sim.ptx.parser import Instruction, Operand
from sm100_sim.state.memory import host_view
from sm100_sim.state.warp import LOCAL_WINDOW, SHARED_WINDOW, Warp, reader

from .columns import ByModifier, Effect, Event, Recorded, Rule, Ties
from .copies.tiles import decrement, flushing_add, increment
from .shared import require_own
from .table import machine_op, split_modifiers, unknown

_SEMANTICS = ("relaxed", "acquire", "release", "acq_rel", "")
_SCOPES = ("cta", "cluster", "gpu", "sys", "")
_SPACES = ("global", "shared", "shared::cta", "shared::cluster", "")
_OPERATIONS = ("and", "or", "xor", "cas", "exch", "add", "inc", "dec", "min", "max")
_HINT = ("L2::cache_hint", "")
_VECTORS = ("v2", "v4", "v8", "")
_DTYPES = {
    "b16": np.uint16,
    "b32": np.uint32,
    "b64": np.uint64,
    "u32": np.uint32,
    "u64": np.uint64,
    "s32": np.int32,
    "s64": np.int64,
    "f32": np.float32,
    "f64": np.float64,
    "f16": np.float16,
    "f16x2": np.float16,
    "bf16": np.uint16,
    "bf16x2": np.uint16,
}
_TYPES = tuple(_DTYPES)


def _widen(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _narrow(values: np.ndarray) -> np.ndarray:
    """float32 to bf16 patterns, round to nearest even; NaN becomes 0x7FFF."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


_INTEGER_COMBINE: dict[str, Callable] = {
    "add": np.add,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "min": np.minimum,
    "max": np.maximum,
    "exch": lambda old, new: new,
    "inc": increment,
    "dec": decrement,
}
_FLOAT_COMBINE: dict[str, Callable] = {
    "add": np.add,
    "min": np.fmin,
    "max": np.fmax,
    "exch": lambda old, new: new,
}


def combiner(i: Instruction, operation: str, type_name: str) -> Callable:
    """Function (old, new) -> stored value on arrays of the type."""
    integer = "f" not in type_name
    table = _INTEGER_COMBINE if integer else _FLOAT_COMBINE
    bits = operation in ("and", "or", "xor", "exch")
    wrap = operation in ("inc", "dec")
    if (
        operation not in table
        or integer
        and bits != (type_name[0] == "b")
        or wrap
        and type_name != "u32"
    ):
        raise unknown(i, f"{operation} is not defined for .{type_name}")
    combine = table[operation]
    if type_name.startswith("bf16"):
        return lambda old, new: _narrow(combine(_widen(old), _widen(new)))
    return combine


def host_bytes(warp: Warp, address: int, nbytes: int, space: str) -> np.ndarray:
    """Writable uint8 view of ``nbytes`` at an address of a warp's shared or global memory.

    space: "shared", "global" or "" (generic). Raises Misaligned or MemoryFault.
    """
    if address % nbytes:
        raise Misaligned(f"atomic operation of {nbytes} bytes at address {address:#x}")
    top = address >> 56
    if space.startswith("shared") or not space and top == SHARED_WINDOW >> 56:
        if space in ("shared", "shared::cta"):
            require_own(warp, address & 0xFFFFFFFF, "an atomic operation")
        return _shared_bytes(warp, address & 0xFFFFFFFF, nbytes)
    if not space and top == LOCAL_WINDOW >> 56:
        raise MemoryFault(f"atomic operation on local memory at {address:#x}")
    ranges = warp.environment.ranges
    row = int(np.searchsorted(ranges[:, 0], np.uint64(address), "right")) - 1
    if row < 0 or address + nbytes > int(ranges[row, 1]) or not ranges[row, 2]:
        raise MemoryFault(
            f"atomic operation of {nbytes} bytes at global address {address:#x}, "
            "outside the writable tensors of the launch"
        )
    return host_view(address, nbytes)


def _shared_bytes(warp: Warp, address: int, nbytes: int) -> np.ndarray:
    rank, offset = address >> 24, address & 0xFFFFFF
    limits = warp.environment.limits
    if rank < len(limits) and not limits[rank]:
        warp.cta.cluster.cta(rank).require_present(
            f"an atomic operation on {nbytes} bytes at its shared offset {offset:#x}"
        )
    if rank >= len(limits) or offset + nbytes > int(limits[rank]) or offset < 1024:
        raise MemoryFault(
            f"atomic operation of {nbytes} bytes at shared address {address:#x}, "
            "outside the allocated bytes"
        )
    return warp.environment.smem[rank, offset : offset + nbytes]


@dataclass(frozen=True, slots=True)
class _Source:
    """A value operand: accessors of its registers and how many bytes each contributes."""

    readers: tuple[Callable[[Warp], np.ndarray], ...]
    nbytes: int

    def lane(self, warp: Warp, lane: int, dtype: Any) -> np.ndarray:
        raw = b"".join(
            int(read(warp)[lane]).to_bytes(8, "little")[: self.nbytes] for read in self.readers
        )
        return np.frombuffer(raw, dtype)


def lane_source(op: Operand, nbytes: int) -> _Source:
    """Accessor of a value, or a vector of values, of `nbytes` each."""
    items = op.items if op.kind == "vec" else (op,)
    return _Source(tuple(reader(item, max(32, 8 * nbytes)) for item in items), nbytes)


_EVENT = ByModifier({"global": Event.GLOBAL_ATOMIC}, Event.NONE)


@machine_op(
    "atom",
    defines=(0,),
    rule=Rule.ATOMIC,
    trace=Recorded.ENTRY,
    event=_EVENT,
    effect=Effect.NONE,
    ties=Ties.UNLESS_SHARED,
)
@machine_op(
    "red",
    rule=Rule.ATOMIC,
    trace=Recorded.ENTRY,
    event=_EVENT,
    effect=Effect.NONE,
    ties=Ties.UNLESS_SHARED,
)
def bind_atomic(instruction: Instruction, kernel) -> Callable:
    """atom, red{.sem}{.scope}{.space}{.scope}.op{.noftz}{.hint}{.vec}.type {d,} [a], b{, c}; CuTe
    DSL's compiler puts the scope behind the space."""
    _, scope, space, late_scope, operation, _, _, vector, type_name = split_modifiers(
        instruction,
        _SEMANTICS,
        _SCOPES,
        _SPACES,
        _SCOPES,
        _OPERATIONS,
        ("noftz", ""),
        _HINT,
        _VECTORS,
        _TYPES,
    )
    if scope and late_scope:
        raise unknown(instruction, f"two scopes, .{scope} and .{late_scope}")
    returns = instruction.opcode == "atom"
    destination, operands = (
        (instruction.operands[0], instruction.operands[1:])
        if returns
        else (None, instruction.operands)
    )
    dtype = _DTYPES[type_name]
    size = np.dtype(dtype).itemsize * (2 if type_name.endswith("x2") else 1)
    base = operands[0].base
    wide = space in ("", "global")
    addresses = reader(operands[0], 64 if wide else 32) if base.kind == "reg" or not wide else None
    if addresses is None:
        raise unknown(instruction, "the address must be a register or a shared symbol")
    source = lane_source(operands[1], size)
    if operation == "cas":
        if not returns or type_name[0] != "b" or vector:
            raise unknown(instruction, "cas is defined for atom with .b16, .b32 and .b64")
        swap = lane_source(operands[2], size)
    else:
        swap, combine = None, combiner(instruction, operation, type_name)
    flushes = operation == "add" and type_name == "f32" and wide
    store = None if destination is None else _lane_writer(destination, size)
    total = size * len(source.readers)

    def execute(warp: Warp, lanes: int) -> None:
        per_lane = addresses(warp)
        for lane in range(32):
            if not lanes >> lane & 1:
                continue
            cell = host_bytes(warp, int(per_lane[lane]), total, space).view(dtype)
            old, new = cell.copy(), source.lane(warp, lane, dtype)
            if swap is not None:
                cell[:] = np.where(old == new, swap.lane(warp, lane, dtype), old)
            else:
                shared = not space and int(per_lane[lane]) >> 56 == SHARED_WINDOW >> 56
                function = flushing_add if flushes and not shared else combine
                with np.errstate(all="ignore"):
                    cell[:] = function(old, new)
            if store is not None:
                store(warp, lane, old)

    return execute


def _lane_writer(op: Operand, nbytes: int) -> Callable[[Warp, int, np.ndarray], None]:
    """Write the bytes of an array to the registers of one lane."""
    items = op.items if op.kind == "vec" else (op,)
    rows = [
        (position, item.register.file, item.slot)
        for position, item in enumerate(items)
        if item.kind != "sink"
    ]

    def write(warp: Warp, lane: int, values: np.ndarray) -> None:
        raw = values.tobytes()
        for position, file, slot in rows:
            piece = raw[position * nbytes : (position + 1) * nbytes]
            target = warp.r64 if file == "r64" else warp.r32
            target[slot, lane] = int.from_bytes(piece, "little")

    return write
