"""Clocks of the shared-memory port that each SASS access takes, from the addresses of the run.

The simulator counts wavefronts of the PTX accesses (`trace/observer.py`); which SASS instruction a
PTX access became is not known. But between two events of a warp both have the same accesses, so a
SASS access is charged the mean of the PTX accesses of its direction and width executed there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from sm100_sim.isa.columns import MemoryAccess
from sm100_sim.isa.table import row_of
from sm100_sim.translate.kernel import CompiledKernel

from .sass import SassFunction

#: Kinds of accesses: loads and stores of up to 4, 8 and 16 bytes per lane, matrices.
KINDS = ("load 4", "load 8", "load 16", "store 4", "store 8", "store 16", "ldmatrix", "stmatrix")
_BY_WIDTH = {1: 0, 2: 0, 4: 0, 8: 1, 16: 2}
_MATRICES = {
    MemoryAccess.MATRIX_LOAD: KINDS.index("ldmatrix"),
    MemoryAccess.MATRIX_STORE: KINDS.index("stmatrix"),
}
_NO_KIND = -1


def sass_access_kind(opcode: str) -> int:
    """Index in KINDS of a SASS instruction, -1 if it is none of them."""
    base = opcode.split(".")[0]
    if base in ("LDSM", "STSM"):
        return _MATRICES[MemoryAccess.MATRIX_LOAD if base == "LDSM" else MemoryAccess.MATRIX_STORE]
    if base not in ("LDS", "STS"):
        return _NO_KIND
    width = 2 if re.search(r"\.128\b", opcode) else 1 if re.search(r"\.64\b", opcode) else 0
    return width + 3 * (base == "STS")


def _ptx_access_kind(access: MemoryAccess, width: int) -> int:
    if access in _MATRICES:
        return _MATRICES[access]
    return _BY_WIDTH[width] + 3 * (access is MemoryAccess.STORE)


def block_accesses(compiled: CompiledKernel, found: dict[int, tuple[int, int, int]]) -> np.ndarray:
    """float64 (blocks, 2, kinds): accesses in each block of the PTX, and their wavefronts.

    found: `Report.shared_accesses`.
    """
    blocks = compiled.kernel.blocks
    counted = np.zeros((len(blocks), 2, len(KINDS)))
    for number, block in enumerate(blocks):
        for index in range(block.start, block.stop):
            if index in found:
                width, executions, clocks = found[index]
                kind = _ptx_access_kind(row_of(compiled.instructions[index]).access, width)
                counted[number, 0, kind] += 1
                counted[number, 1, kind] += clocks / executions
    return counted


def accesses_before(
    entries: Sequence[Any], counted: np.ndarray, chosen: Sequence[Any]
) -> np.ndarray:
    """float64 (events + 1, 2, kinds): accesses of a warp before each of its events.

    entries: all of the warp's. counted: by `block_accesses`. chosen: the entries that are events.
    The last row is the sum over all.
    """
    found = np.zeros((len(chosen) + 1, *counted.shape[1:]))
    row, places = 0, {id(entry): place for place, entry in enumerate(chosen)}
    for entry in entries:
        for block, times in entry.blocks:
            found[row] += times * counted[block]
        if id(entry) in places:
            row = places[id(entry)] + 1
    found[-1] = found.sum(axis=0)
    return found


class Wavefronts:
    """Collects what the paths of a cluster's warps say of each SASS access."""

    def __init__(self, function: SassFunction, default: np.ndarray) -> None:
        self._default = default
        self._kind = np.array([sass_access_kind(i.opcode) for i in function.instructions])
        self._clocks = np.zeros(len(self._kind))
        self._times = np.zeros(len(self._kind))

    def add(self, numbers: np.ndarray, event_of: np.ndarray, before: np.ndarray) -> None:
        """One warp: its path, the event at each element or -1, and `accesses_before`."""
        counts, clocks = before[:, 0], before[:, 1]
        mean = np.divide(clocks, counts, out=np.full(counts.shape, np.nan), where=counts > 0)
        # The mean of the whole warp is as good where ptxas has moved an access past an event.
        mean = np.where(np.isnan(mean), mean[-1], mean)
        last = len(before) - 1
        following = np.where(event_of >= 0, event_of, last)[::-1]
        segment = np.minimum.accumulate(following)[::-1]
        kind = self._kind[numbers]
        value = np.where(kind == _NO_KIND, np.nan, mean[segment, kind])
        known = ~np.isnan(value)
        np.add.at(self._clocks, numbers[known], value[known])
        np.add.at(self._times, numbers[known], 1)

    def found(self) -> np.ndarray:
        """int32 (instructions,): wavefronts of each, at least 1; the default where not known."""
        seen = self._times > 0
        mean = np.divide(self._clocks, self._times, out=np.ones(len(seen)), where=seen)
        clocks = np.maximum(np.rint(mean), 1)
        return np.where(seen, clocks, self._default).astype(np.int32)
