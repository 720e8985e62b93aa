"""Memory that a call's raw pointers may mean: every tensor alive."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

_MAX_DEPTH = 4


def _has_pointer(value: Any, depth: int = 0) -> bool:
    """Whether there is a CuTe pointer among nested arguments."""
    if type(value).__name__ == "_Pointer":
        return True
    if depth > _MAX_DEPTH:
        return False
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return any(_has_pointer(part, depth + 1) for part in value)
    return False


def pointer_ranges(arguments: Any) -> Iterator[tuple[int, int, str]]:
    """(start, end, name) of every live tensor's storage, if `arguments` hold raw pointers.

    A pointer carries no extent, and pointers may lie in memory (grouped GEMMs), so nothing
    narrower can be told.
    """
    if not _has_pointer(arguments):
        return
    import torch

    from .driver import allocations

    seen = set()
    for value in gc.get_objects():
        if issubclass(type(value), torch.Tensor) and value.layout is torch.strided:
            storage = value.untyped_storage()
            start = storage.data_ptr()
            if start and start not in seen:
                seen.add(start)
                yield start, start + storage.nbytes(), "a live tensor"
    yield from allocations()
