"""Bytes that a TMA tile takes from global and shared memory, and reductions of tiles.

PTX ISA 9.3, "Tensor copies", and the CUDA driver API's `cuTensorMapEncodeTiled`: a tile starts at
signed coordinates. `native.tiles` moves it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from sm100_sim.errors import MemoryFault, Misaligned, SimulationError
from sm100_sim.native.calling import callable_of
from sm100_sim.native.layout import DIMENSIONS, TileMap
from sm100_sim.native.tiles import move_tile
from sm100_sim.state.tensormap import PADDED, TensorMap

_ONES = (1,) * DIMENSIONS
_NUMPY = {
    "u32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "s64": np.int64,
    "f16": np.float16,
    "f32": np.float32,
    "f32.ftz": np.float32,
}
#: Alignment of a tile in shared memory (PTX ISA, cp.async.bulk.tensor).
SHARED_ALIGNMENT = 128


class Window(NamedTuple):
    """The part of a tile that lies inside the tensor, in tile elements, slowest dimension first.

    `start`: first byte in global memory; `span`: bytes from there to its end; `shape` and
    `strides`: in bytes with a byte-wide innermost dimension; `where`: slices into the tile of the
    same form, or None if the whole tile lies inside.
    """

    start: int
    span: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    where: tuple[slice, ...] | None


def window(tensor_map: TensorMap, coordinates: tuple[int, ...]) -> Window | None:
    """The inside part of the tile at `coordinates` (dimension 0 first), None if there is none."""
    whole = _whole_tile(tensor_map)
    start = tensor_map.address
    for coordinate, last, stride in zip(coordinates, whole.last, whole.strides, strict=True):
        if not 0 <= coordinate <= last:
            return _clipped_window(tensor_map, coordinates)
        start += coordinate * stride
    return whole.window._replace(start=start)


class _Whole(NamedTuple):
    """Facts shared by all tiles inside the tensor: `last` coordinate, element `strides`, a
    window."""

    last: tuple[int, ...]
    strides: tuple[int, ...]
    window: Window


@lru_cache(maxsize=1024)
def _whole_tile(t: TensorMap) -> _Whole:
    width = t.element_bits // 8
    strides = (width, *t.strides)
    moved = tuple(step * stride for step, stride in zip(t.steps, strides, strict=True))
    reach = [count - 1 for count in t.tile_shape]
    span = width + sum(r * m for r, m in zip(reach, moved, strict=True))
    shape = (*reversed(t.tile_shape[1:]), t.tile_shape[0] * width)
    last = tuple(n - 1 - r * s for n, r, s in zip(t.sizes, reach, t.steps, strict=True))
    return _Whole(last, strides, Window(0, span, shape, (*reversed(moved[1:]), 1), None))


def _clipped_window(t: TensorMap, coordinates: tuple[int, ...]) -> Window | None:
    width = t.element_bits // 8
    start, span = t.address, width
    shape, strides, where = [], [], []
    dimensions = zip(coordinates, t.sizes, t.tile_shape, t.steps, (width, *t.strides), strict=True)
    for coordinate, size, count, step, stride in dimensions:
        first = 0 if coordinate >= 0 else -(coordinate // step)
        last = min(count, -((coordinate - size) // step))
        if first >= last:
            return None
        start += (coordinate + first * step) * stride
        span += (last - first - 1) * step * stride
        shape.append(last - first)
        strides.append(step * stride)
        where.append(slice(first, last))
    shape[0], strides[0] = shape[0] * width, 1
    where[0] = slice(where[0].start * width, where[0].stop * width)
    return Window(
        start, span, tuple(reversed(shape)), tuple(reversed(strides)), tuple(reversed(where))
    )


@lru_cache(maxsize=1024)
def record_of(tensor_map: TensorMap) -> TileMap:
    """A descriptor as `native.tiles` takes it; elements have whole bytes.

    Raises SimulationError for descriptors whose tiles are not modelled.
    """
    t = tensor_map
    if t.interleave:
        raise SimulationError(f"TMA with interleave {t.interleave} B is not modelled")
    if t.element_bits < 8:
        raise SimulationError(f"packed {t.dtype} elements are copied in bytes")
    width = t.element_bits // 8
    record = TileMap(
        address=t.address,
        bytes=t.tile_bytes,
        shared_bytes=t.shared_bytes,
        width=width,
        rank=t.rank,
        swizzle=t.swizzle,
        atom=t.atom,
        tf32=t.tf32,
        nan_fill=t.nan_fill,
    )
    columns = zip(
        range(DIMENSIONS),
        t.sizes + _ONES,
        t.steps + _ONES,
        (width, *t.strides, *_ONES),
        t.tile_shape + _ONES,
    )
    for i, *cells in columns:
        record.sizes[i], record.steps[i], record.strides[i], record.counts[i] = cells
    return record


def _move(
    record: TileMap, coordinates: tuple[int, ...], smem: np.ndarray, offset: int, load: bool
) -> None:
    """Move a tile whose every byte has been checked; swizzled places count from a row's start."""
    at = (ctypes.c_int64 * DIMENSIONS)(*coordinates)
    callable_of(move_tile)(
        smem.ctypes.data, offset, ctypes.addressof(record), ctypes.addressof(at), load
    )


def _dense(t: TensorMap, tile: np.ndarray) -> TileMap:
    """The record of a tensor that is one dense tile, as it stands in an array."""
    rows = -(-tile.size // t.row_bytes)
    shape = t.row_bytes, rows, 1, 1, 1
    return TileMap(
        address=tile.ctypes.data, bytes=tile.size, width=1, rank=2, swizzle=t.swizzle, atom=t.atom,
        sizes=shape, steps=_ONES, strides=(1, t.row_bytes, 0, 0, 0), counts=shape,
    )  # fmt: skip


def _check_shared(smem: np.ndarray, offset: int, size: int, what: str) -> None:
    if offset % SHARED_ALIGNMENT:
        raise Misaligned(
            f"{what}: shared-memory offset {offset:#x} of a TMA tile is not a multiple of "
            f"{SHARED_ALIGNMENT}"
        )
    if offset + size > smem.size:
        raise MemoryFault(
            f"{what}: TMA tile at shared-memory offset {offset} of {size} bytes ends outside the "
            f"CTA's {smem.size} bytes"
        )


def load_tile(
    tensor_map: TensorMap,
    coordinates: tuple[int, ...],
    memory: Any,
    smem: np.ndarray,
    offset: int,
    what: str = "TMA load",
) -> int:
    """Copy the tile at `coordinates` from global memory to `smem[offset:]`; returns its bytes.

    `memory` has check(start, nbytes, write, what) and view(start, nbytes) -> uint8 array.
    Raises Misaligned, MemoryFault, or SimulationError for descriptors that are not modelled.
    """
    t = tensor_map
    if t.dtype in PADDED:
        return _load_padded(t, coordinates, memory, (smem, offset), what)
    record = record_of(t)
    _check_shared(smem, offset, t.shared_bytes, what)
    inside = window(t, coordinates)
    if inside is None or min(coordinates) < 0:
        _check_base(t, coordinates, memory, what, inside is None)
    if inside is not None:
        memory.check(inside.start, inside.span, False, what)
    _move(record, coordinates, smem, offset, True)
    return t.tile_bytes


def _check_base(
    t: TensorMap, coordinates: tuple[int, ...], memory: Any, what: str, is_outside: bool
) -> None:
    """Raise MemoryFault unless the first byte of a tensor is memory, for a load that is outside.

    The hardware touches it where the tile lies wholly outside, and where it begins at a negative
    coordinate (measured on an H200: illegal address). Stores wholly outside touch nothing, and
    loads over the end only what is inside. is_outside: whether all of the tile is.
    """
    where = "wholly outside" if is_outside else "which begins before"
    what += (
        f" at {coordinates}, {where} its tensor of sizes {t.sizes}, of which the "
        "hardware then touches the first byte,"
    )
    memory.check(t.address, 1, False, what)


def _load_padded(
    t: TensorMap,
    coordinates: tuple[int, ...],
    memory: Any,
    target: tuple[np.ndarray, int],
    what: str,
) -> int:
    """A load of elements of 4 or 6 bits: 16 of them to 16 bytes, zeros behind the data."""
    data = t.packed
    first = coordinates[0] * t.element_bits // 8, *coordinates[1:]
    packed = np.empty(data.tile_bytes, np.uint8)
    load_tile(replace(data, swizzle=0), first, memory, packed, 0, what)
    smem, offset = target
    _check_shared(smem, offset, t.shared_bytes, what)
    units = np.zeros((t.tile_bytes * 8 // t.element_bits // 16, 16), np.uint8)
    units[:, : 2 * t.element_bits] = packed.reshape(len(units), -1)
    _move(_dense(t, units.reshape(-1)), (0, 0), smem, offset, True)
    return t.tile_bytes


Reduction = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _flushed(values: np.ndarray) -> np.ndarray:
    """f32 subnormals as zeros of their sign."""
    tiny = np.abs(values) < np.finfo(np.float32).tiny
    return np.where(tiny, np.copysign(np.float32(0), values), values)


def flushing_add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Sum of f32 arrays, subnormal operands and results flushed to zeros of their sign."""
    return _flushed(_flushed(a) + _flushed(b))


def _extreme(function: Reduction) -> Reduction:
    """np.minimum or np.maximum with the hardware's rules: a number wins over NaN, -0 < +0."""
    join = np.bitwise_or if function is np.minimum else np.bitwise_and

    def operation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if a.dtype.kind != "f":
            return function(a, b)
        result = np.where(np.isnan(a), b, np.where(np.isnan(b), a, function(a, b)))
        # Equal values differ in the sign of zero alone.
        words = (values.view(f"u{values.itemsize}") for values in (a, b))
        return np.where(a == b, join(*words).view(a.dtype), result)

    return operation


def increment(old: np.ndarray, top: np.ndarray) -> np.ndarray:
    """.inc of unsigned integers: one more, 0 from `top` on."""
    return np.where(old >= top, 0, old + 1).astype(old.dtype)


def decrement(old: np.ndarray, top: np.ndarray) -> np.ndarray:
    """.dec of unsigned integers: one less, `top` behind 0 and for what lies above it."""
    return np.where((old == 0) | (old > top), top, old - 1).astype(old.dtype)


_REDUCTIONS: dict[str, Reduction] = {
    "add": np.add,
    "inc": increment,
    "dec": decrement,
    "min": _extreme(np.minimum),
    "max": _extreme(np.maximum),
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
#: Reduction operations that are modelled.
REDUCTIONS = frozenset(_REDUCTIONS)


def reduced(operation: str, dtype: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """`old` op `new` as bytes (uint8, same shape), element type by name. Rounds to nearest even."""
    function = _REDUCTIONS[operation]
    if operation in ("and", "or", "xor"):
        return function(old, new)
    if dtype == "bf16":
        a, b = ((x.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for x in (old, new))
        with np.errstate(all="ignore"):
            words = function(a, b).view(np.uint32)
        rounded = (words + 0x7FFF + (words >> 16 & 1)) >> 16
        rounded = np.where(words & 0x7FFFFFFF > 0x7F800000, 0x7FFF, rounded)
        return rounded.astype(np.uint16).view(np.uint8)
    if dtype == "f32.ftz" and operation == "add":
        function = flushing_add
    if dtype not in _NUMPY or operation in ("inc", "dec") and dtype != "u32":
        raise SimulationError(f"a bulk reduction .{operation} on {dtype} elements is not defined")
    kind = _NUMPY[dtype]
    with np.errstate(all="ignore"):
        result = function(old.view(kind), new.view(kind))
    return result.astype(kind, copy=False).view(np.uint8)


@lru_cache(maxsize=1024)
def _stored(t: TensorMap) -> TensorMap:
    """The tensor as stores see it: rows end at the next multiple of 16 bytes."""
    unit = 128 // t.element_bits
    return replace(t, sizes=(-(-t.sizes[0] // unit) * unit, *t.sizes[1:]))


def store_tile(
    tensor_map: TensorMap,
    coordinates: tuple[int, ...],
    memory: Any,
    smem: np.ndarray,
    offset: int,
    reduction: str | None = None,
) -> int:
    """Copy the tile at `smem[offset:]` to global memory, dropping what lies outside the tensor.

    Whole 16-byte units are written: where a row of the tensor ends within one, the rest of the unit
    is overwritten too (measured on an H200; loads fill element by element).
    With `reduction` (a name of REDUCTIONS) combine it with what is there. Returns the bytes of the
    whole tile. Raises as `load_tile` does.
    """
    t = tensor_map
    what = "TMA store" if reduction is None else "TMA reduction"
    record = record_of(t)
    _check_shared(smem, offset, t.shared_bytes, what)
    inside = window(_stored(t), coordinates)
    if inside is None:
        return t.tile_bytes
    memory.check(inside.start, inside.span, True, what)
    if reduction is None:
        _move(record, coordinates, smem, offset, False)
        return t.tile_bytes
    tile = np.empty(t.tile_bytes, np.uint8)
    _move(_dense(t, tile), (0, 0), smem, offset, False)
    raw = memory.view(inside.start, inside.span)
    target = np.ndarray(inside.shape, np.uint8, raw, 0, inside.strides)
    shape = (*reversed(t.tile_shape[1:]), t.row_bytes)
    tile = np.ascontiguousarray(tile.reshape(shape)[inside.where or ...])
    target[...] = reduced(reduction, t.dtype, np.ascontiguousarray(target), tile)
    return t.tile_bytes
