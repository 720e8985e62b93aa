"""Memory a launch may touch: the tensors passed in, kernel parameters and shared memory."""

from __future__ import annotations

import ctypes
from bisect import bisect_right

import numpy as np

from .errors import MemoryFault

#: Fill of shared memory that was never written: a NaN as float32, and as two bf16 or fp16.
SHARED_POISON = 0x7FFF7FFF


class GlobalMemory:
    """Host memory by address, limited to the ranges of a launch.

    ranges: (start, end, name) of every tensor; overlapping ones (views of one storage) are merged.
    parameters: the kernel's parameter buffer, readable but not writable; it holds TMA descriptors.
    """

    def __init__(self, ranges: list[tuple[int, int, str]], parameters: np.ndarray) -> None:
        self.named = sorted(ranges)
        self.parameters = parameters
        start = parameters.__array_interface__["data"][0]
        self._parameter_range = (start, start + parameters.nbytes)
        merged: list[list[int]] = []
        for low, high, _ in self.named:
            if merged and low <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], high)
            else:
                merged.append([low, high])
        self._starts = [low for low, _ in merged]
        self._ends = [high for _, high in merged]
        #: uint64 (n, 3): start, end, writable; the form native code reads.
        self.table = np.array([[low, high, 1] for low, high in merged], np.uint64).reshape(-1, 3)

    def check(self, start: int, nbytes: int, write: bool, what: str) -> None:
        """Raise MemoryFault unless [start, start + nbytes) lies in one range."""
        index = bisect_right(self._starts, start) - 1
        if index >= 0 and start + nbytes <= self._ends[index]:
            return
        low, high = self._parameter_range
        if not write and low <= start and start + nbytes <= high:
            return
        kind = "writes" if write else "reads"
        raise MemoryFault(
            f"{what} {kind} {nbytes} bytes at global address {start:#x}, outside the tensors of "
            f"the launch. {self.nearest(start)}"
        )

    def nearest(self, address: int) -> str:
        """Where an address lies relative to the closest tensor, in words."""
        if not self.named:
            return "The launch was given no tensor"
        low, high, name = min(
            self.named, key=lambda r: max(r[0] - address, address - r[1] + 1, 0)
        )
        if address >= high:
            return f"The closest is {name}, which ends {address - high} bytes below"
        if address < low:
            return f"The closest is {name}, which begins {low - address} bytes above"
        return f"It begins inside {name}, {high - address} bytes before its end"

    def view(self, start: int, nbytes: int) -> np.ndarray:
        """uint8 view of host memory; check first."""
        return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(start), np.uint8)


def poisoned_shared(ctas: int, nbytes: int) -> np.ndarray:
    """Shared memory of a cluster, uint8 (ctas, nbytes), filled with SHARED_POISON."""
    words = -(-nbytes // 16) * 4
    return np.full((ctas, words), SHARED_POISON, np.uint32).view(np.uint8)
