"""Memory a launch may touch: the tensors passed in, kernel parameters and shared memory."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from typing import Any

import numpy as np

from sm100_sim.errors import MemoryFault

from .warp import Pages

#: Fill of shared memory that was never written: a NaN as float32, and as two bf16 or fp16.
SHARED_POISON = 0x7FFF7FFF


def host_view(address: int, nbytes: int) -> np.ndarray:
    """Writable uint8 view of `nbytes` of this process at an address, which nothing checks."""
    raw: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.frombuffer(raw, np.uint8)


#: Sizes to which PyTorch's allocator rounds tensors on a GPU.
_ROUNDED_TO = 512
#: Bytes of the smallest page: memory of the process up to its end can be read.
_PAGE = 4096


def _padding(ranges: list[list[int]]) -> list[list[int]]:
    """Rows of `GlobalMemory.table` for what loads may read behind tensors, none writable."""
    rows = []
    for (low, high), (following, _) in zip(ranges, [*ranges[1:], [1 << 64, 0]], strict=True):
        end = min(high + (low - high) % _ROUNDED_TO, high + -high % _PAGE, following)
        if end > high:
            rows.append([high, end, 0])
    return rows


class GlobalMemory:
    """Host memory by address, limited to the ranges of a launch.

    ranges: (start, end, name) of every tensor; overlapping ones (views of one storage) are merged.
    parameters: uint8, the kernel's parameter buffer, readable only; it holds TMA descriptors.
    table: uint64 (n, 3), start, end and writability of the merged ranges, ascending and disjoint,
    as native code reads them. padded: loads may read what lies behind a tensor up to the size to
    which PyTorch's allocator rounds it on a GPU.
    """

    def __init__(
        self, ranges: list[tuple[int, int, str]], parameters: np.ndarray, padded: bool = False
    ) -> None:
        self.named = sorted(ranges)
        self.parameters = parameters
        merged: list[list[int]] = []
        for low, high, _ in self.named:
            if merged and low < merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], high)
            else:
                merged.append([low, high])
        rows = [[low, high, 1] for low, high in merged]
        if padded:
            rows = sorted(rows + _padding(merged))
        self.table = np.array(rows, np.uint64).reshape(-1, 3)
        start = parameters.__array_interface__["data"][0]
        self._parameter_range = (start, start + parameters.nbytes)
        self._starts = [low for low, _ in merged]
        self._ends = [high for _, high in merged]
        self._bytes = [host_view(low, high - low) for low, high in merged]

    def check(self, start: int, nbytes: int, write: bool, what: str) -> None:
        """Raise MemoryFault unless [start, start + nbytes) lies in one range."""
        if self.holds(start, nbytes):
            return
        inside = self.is_parameter(start, nbytes)
        if inside and not write:
            return
        if inside:
            raise MemoryFault(f"{what} writes to the kernel's parameters, which are read-only")
        raise MemoryFault(
            f"{what} {'writes' if write else 'reads'} {nbytes} bytes at global address "
            f"{start:#x}, outside the tensors of the launch. {self.nearest(start)}"
        )

    def holds(self, start: int, nbytes: int) -> bool:
        """Return True if [start, start + nbytes) lies in one range that may be written."""
        index = bisect_right(self._starts, start) - 1
        return index >= 0 and start + nbytes <= self._ends[index]

    def is_parameter(self, start: int, nbytes: int) -> bool:
        """Return True if [start, start + nbytes) are kernel parameters."""
        low, high = self._parameter_range
        return low <= start and start + nbytes <= high

    def nearest(self, address: int) -> str:
        """Describe the position of an address relative to the closest tensor, as a sentence."""
        if not self.named:
            return "The launch was given no tensor."
        low, high, name = min(self.named, key=lambda r: max(r[0] - address, address - r[1] + 1, 0))
        if address >= high:
            return f"The closest tensor is {name}; it ends {address - high} bytes before."
        if address < low:
            return f"The closest tensor is {name}; it begins {low - address} bytes behind."
        return f"It begins inside {name}, {high - address} bytes before its end."

    def view(self, start: int, nbytes: int) -> np.ndarray:
        """uint8 view of [start, start + nbytes); `check` it first."""
        index = bisect_right(self._starts, start) - 1
        if index >= 0 and start + nbytes <= self._ends[index]:
            first = start - self._starts[index]
            return self._bytes[index][first : first + nbytes]
        first = start - self._parameter_range[0]
        return self.parameters[first : first + nbytes]


def poisoned_shared(ctas: int, nbytes: int, pages: Pages | None = None) -> np.ndarray:
    """Shared memory of a cluster, uint8 (ctas, nbytes rounded up to 16), full of SHARED_POISON.

    Rows start on 16-byte boundaries of the host.
    """
    words = ctas, -(-nbytes // 16) * 4
    return (pages or Pages()).filled(words, np.uint32, SHARED_POISON).view(np.uint8)
