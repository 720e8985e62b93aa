"""Decide if two strided views share a byte, by their addresses, shapes and strides."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

__all__ = ["memory_span", "share_memory"]

#: Search steps after which two views count as overlapping.  Views of one buffer that differ by
#: slices, splits or transpositions take about as many steps as they have dimensions.
MOST_STEPS = 10_000

#: Multiples of a stride, in bytes: (stride, least factor, greatest factor).
_Steps = tuple[tuple[int, int, int], ...]


def memory_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte and past the last one."""
    begin = tensor.data_ptr()
    if tensor.is_contiguous():  # of most calls, and found in a tenth of the time
        return begin, begin + tensor.nbytes
    if not tensor.numel():
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return begin, begin + (last + 1) * tensor.element_size()


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if the views share a byte, or if `MOST_STEPS` do not decide it."""
    (begin, end), (other_begin, other_end) = memory_span(one), memory_span(other)
    if begin >= other_end or other_begin >= end or not (one.numel() and other.numel()):
        return False
    forms = (tuple(t.shape) + (t.element_size(),) for t in (one, other))
    strides = (tuple(n * t.element_size() for n in t.stride()) + (1,) for t in (one, other))
    return _meet(other_begin - begin, *forms, *strides)


@functools.lru_cache(maxsize=4096)
def _meet(
    distance: int,
    shape: tuple[int, ...],
    other_shape: tuple[int, ...],
    strides: tuple[int, ...],
    other_strides: tuple[int, ...],
) -> bool:
    """Return True if a byte of one view is `distance` bytes from the other's begin. Bytes of an
    element count as a dimension."""
    spans: dict[int, tuple[int, int]] = {}
    for stride, size in zip(strides, shape):
        least, most = spans.get(stride, (0, 0))
        spans[stride] = least, most + size - 1
    for stride, size in zip(other_strides, other_shape):
        least, most = spans.get(stride, (0, 0))
        spans[stride] = least - (size - 1), most
    steps = tuple((s, *spans[s]) for s in sorted(spans, reverse=True) if s and spans[s] != (0, 0))
    return _Search(steps).reaches(distance)


class _Search:
    """Sums of multiples of strides, the greatest stride first."""

    def __init__(self, steps: _Steps) -> None:
        self._steps, self._left = steps, MOST_STEPS
        # What the strides from each one on can add up to.
        self._reach = [_reach(steps[i:]) for i in range(len(steps) + 1)]

    def reaches(self, distance: int, first: int = 0) -> bool:
        """Return True if strides from the number `first` on add up to a distance."""
        low, high = self._reach[first]
        if not low <= distance <= high:
            return False
        if first == len(self._steps):
            return True
        self._left -= 1
        if self._left < 0:
            return True
        stride, least, most = self._steps[first]
        low, high = self._reach[first + 1]
        # Factors that leave a distance within reach of the smaller strides.
        begin = max(least, -((high - distance) // stride))
        end = min(most, (distance - low) // stride)
        return any(
            self.reaches(distance - factor * stride, first + 1) for factor in range(begin, end + 1)
        )


def _reach(steps: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    """The least and the greatest sum."""
    return sum(s * low for s, low, _ in steps), sum(s * high for s, _, high in steps)
