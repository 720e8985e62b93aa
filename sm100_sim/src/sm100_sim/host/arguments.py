"""Host memory that the tensors among a launch's arguments own."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

#: Linux maps nothing below (vm.mmap_min_addr).
LOWEST_ADDRESS = 1 << 16
#: Nesting depth at which the walk through argument objects stops.
_MAX_DEPTH = 6


def strided_extent(
    address: int, shape: Sequence[int], strides: Sequence[int], itemsize_bits: int
) -> tuple[int, int] | None:
    """[start, end) in bytes of a strided tensor, None if it has no element.

    `strides` are in elements and may be negative or zero; `itemsize_bits` may be below 8 for
    packed types, the end is rounded up to whole bytes.
    """
    low = high = 0
    for size, stride in zip(shape, strides, strict=True):
        if size == 0:
            return None
        reach = (size - 1) * stride
        low, high = low + min(0, reach), high + max(0, reach)
    start = address + (low * itemsize_bits) // 8
    return start, address + -(-(high + 1) * itemsize_bits // 8)


def _flat(value: Any) -> list[int]:
    if isinstance(value, (tuple, list)):
        return [number for part in value for number in _flat(part)]
    return [int(value)]


def _tensor_extent(value: Any) -> tuple[int, int] | tuple[()] | None:
    """Extent of a tensor-like object; () for one without elements, None for anything else."""
    if hasattr(value, "data_ptr") and hasattr(value, "element_size"):  # torch
        found = strided_extent(
            value.data_ptr(), value.shape, value.stride(), value.element_size() * 8
        )
        return found or ()
    if hasattr(value, "load_dltensor"):  # cutlass.cute.runtime tensors
        value.load_dltensor()
        width = value.element_type.width
        found = strided_extent(value.data_ptr, _flat(value.shape), _flat(value.stride), width)
        return found or ()
    interface = getattr(value, "__array_interface__", None)
    if isinstance(interface, dict):  # numpy
        itemsize = value.dtype.itemsize
        strides = [stride // itemsize for stride in value.strides]
        return strided_extent(interface["data"][0], value.shape, strides, itemsize * 8) or ()
    return None


def _children(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", getattr(value, name)) for name in value._fields]
    if isinstance(value, (tuple, list)):
        return [(f"[{i}]", part) for i, part in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value)]
    if isinstance(value, (int, float, str, bytes, type(None))) or isinstance(value, type):
        return []
    return [(f".{name}", part) for name, part in getattr(value, "__dict__", {}).items()]


def _walk(name: str, value: Any, found: list, depth: int, seen: set[int]) -> None:
    if id(value) in seen or depth > _MAX_DEPTH:
        return
    seen.add(id(value))
    extent = _tensor_extent(value)
    if extent is None:
        for suffix, part in _children(value):
            _walk(name + suffix, part, found, depth + 1, seen)
    elif extent:
        found.append((*extent, name, value))


def tensor_ranges(args: Any, kwargs: dict[str, Any] | None = None) -> list[tuple[int, int, str]]:
    """Return (start, end, name) of all tensors among the arguments, in address order.

    Finds torch tensors, CuTe runtime tensors and numpy arrays, also inside tuples, lists, dicts,
    named tuples, dataclasses and plain objects. Strides count: a slice claims the bytes from its
    first to its last element. `name` is the path to the tensor, as in "args[2].k". Raw pointers
    carry no extent and claim nothing.
    """
    return sorted((start, end, name) for start, end, name, _ in _tensors(args, kwargs))


def _tensors(args: Any, kwargs: dict[str, Any] | None) -> list[tuple[int, int, str, Any]]:
    found: list[tuple[int, int, str, Any]] = []
    seen: set[int] = set()
    for i, value in enumerate(args):
        _walk(f"args[{i}]", value, found, 0, seen)
    for key, value in (kwargs or {}).items():
        _walk(key, value, found, 0, seen)
    return found


def _holds_integers64(value: Any) -> bool:
    kind = getattr(value, "element_type", None)
    if kind is not None:  # cutlass.cute.runtime tensors
        return kind.__name__ in ("Int64", "Uint64")
    return str(value.dtype).removeprefix("torch.") in ("int64", "uint64")


def possible_addresses(args: Any, kwargs: dict[str, Any] | None = None) -> np.ndarray:
    """uint64, sorted: what could be addresses among integers and in 64-bit integer tensors.

    A grouped GEMM finds its operands by a table of them. Values below LOWEST_ADDRESS are none;
    others may be, also below 2**32: a Python that is not position-independent has its heap there.
    """
    values = [
        np.frombuffer(ctypes.string_at(start, end - start), np.uint64)
        for start, end, _, value in _tensors(args, kwargs)
        if _holds_integers64(value)
    ]
    given = [
        value
        for value in (*args, *(kwargs or {}).values())
        if isinstance(value, int) and 0 <= value < 1 << 64
    ]
    found = np.unique(np.concatenate([np.array(given, np.uint64), *values]))
    return found[found >= LOWEST_ADDRESS]
