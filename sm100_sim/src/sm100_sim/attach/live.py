"""Memory that a call's raw pointers, and addresses in its tensors, may mean."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np

from sm100_sim.host.arguments import possible_addresses

_MAX_DEPTH = 4


def _has_pointer(value: Any, depth: int = 0) -> bool:
    """Return True if there is a CuTe pointer among nested arguments."""
    if type(value).__name__ == "_Pointer":
        return True
    if depth > _MAX_DEPTH:
        return False
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return any(_has_pointer(part, depth + 1) for part in value)
    return False


def _memory_of(tensor: Any) -> tuple[int, int]:
    """Return (start, end) of a tensor's storage; (0, 0) for one without memory, as those are that
    torch.compile traces with, or that torch.func wraps: there PyTorch raises RuntimeError, or
    warns, when queried."""
    try:
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":
            return 0, 0
        start = storage.data_ptr()
    except RuntimeError:
        return 0, 0
    return start, start + storage.nbytes()


def pointer_ranges(
    arguments: Any, keywords: dict[str, Any] | None
) -> Iterator[tuple[int, int, str]]:
    """Yield (start, end, name) of the memory that the call's pointers may mean.

    A CuTe pointer carries no extent, and pointers may lie in memory: if `arguments` hold one, the
    storage of every live tensor is meant. An address given as an integer, or in a 64-bit integer
    tensor, as grouped GEMMs have them, means the storage it points into.
    """
    addresses = possible_addresses(arguments, keywords)
    every = _has_pointer((arguments, keywords))
    if not every and not addresses.size:
        return
    import torch

    seen = set()
    for value in gc.get_objects():
        if issubclass(type(value), torch.Tensor) and value.layout is torch.strided:
            start, end = _memory_of(value)
            if not start or start in seen:
                continue
            seen.add(start)
            first, last = np.searchsorted(addresses, np.array([start, end], np.uint64))
            if every or first < last:
                yield start, end, "a live tensor"
    if every:
        from .driver import allocations

        yield from allocations()
