"""Tensor memory of one CTA: columns x 128 lanes of 32-bit cells, and its allocator.

PTX ISA 9.3, "Tensor Memory": an address is lane << 16 | column; columns are allocated in powers
of two from 32 to 512, and allocations of one CTA must not grow from one to the next. PTX ISA 9.4:
an allocation with .exclusive has all of tensor memory to itself, and may be larger where the target
has more columns (`targets`).
"""

from __future__ import annotations

import numpy as np

from sm100_sim.errors import TmemError
from sm100_sim.native.layout import TensorMemory
from sm100_sim.targets import MOST_COLUMNS, Limits

from .warp import Pages

LANES = 128
#: Granularity of allocation, in columns.
BLOCK = 32
#: Fill of cells that were never written: a NaN read as f32, as two bf16 or as two f16.
POISON = 0x7FFF7FFF


def split_address(address: int) -> tuple[int, int]:
    """Return (lane, column) of a TMEM address. Raises TmemError where no target has it."""
    lane, column = address >> 16 & 0xFFFF, address & 0xFFFF
    if lane >= LANES or column >= MOST_COLUMNS:
        raise TmemError(
            f"TMEM address {address:#010x} names lane {lane}, column {column}; accepted are "
            f"lanes below {LANES} and columns below {MOST_COLUMNS}"
        )
    return lane, column


def _blocks(column: int, end: int) -> int:
    """Blocks of columns [column, end), as bits."""
    first, last = column // BLOCK, (end - 1) // BLOCK
    return (2 << last - first) - 1 << first


class Tmem:
    """Cells and allocation state of one CTA's tensor memory.

    `columns`: how many there are. `cells`: uint32 (columns, 128 lanes). `allocations`: first column
    -> columns. `exclusive`: one with .exclusive is held.
    `open_chains`: warp index -> (first instruction, accumulator chain) that this CTA's warp is
    issuing (see `isa.tensor.tcgen05`). `record`: what native code sees. `freed`: bit b is set where
    columns 32 b .. 32 b + 31 were freed and not allocated again.
    """

    __slots__ = (
        "columns", "cells", "allocations", "exclusive", "relinquished", "group", "open_chains",
        "record", "freed", "_last",
    )  # fmt: skip

    def __init__(self, pages: Pages | None = None, columns: int = Limits.columns) -> None:
        self.columns = columns
        self.cells = (pages or Pages()).filled((columns, LANES), np.uint32, POISON)
        self.record = TensorMemory(self.cells.__array_interface__["data"][0], 0)
        self.allocations: dict[int, int] = {}
        self.exclusive = False
        self.freed = 0
        self.relinquished = False
        self.group: int | None = None
        self.open_chains: dict[int, tuple] = {}
        self._last = columns

    def _use_group(self, group: int) -> None:
        if self.group not in (None, group):
            raise TmemError(
                f"cta_group::{group} after cta_group::{self.group}; all tcgen05 instructions of a "
                "kernel use the same cta_group"
            )
        self.group = group

    def allocate(self, columns: int, group: int, exclusive: bool = False) -> int | None:
        """First column of a new allocation, or None while no room is left.

        Raises TmemError for a number of columns that is not a power of two in [32, 512] (with
        `exclusive`, also not one of the 32-column steps above), an allocation larger than the one
        before, one after relinquish_alloc_permit, or a cta_group that differs from the one used so
        far.
        """
        more = range(Limits.columns + BLOCK, self.columns + 1, BLOCK) if exclusive else ()
        if columns not in (32, 64, 128, 256, 512, *more):
            raise TmemError(
                f"tcgen05.alloc of {columns} columns; accepted are powers of two from 32 to 512, "
                f"and with .exclusive up to {MOST_COLUMNS} in steps of {BLOCK} on sm_107a and "
                "sm_107f"
            )
        if self.relinquished:
            raise TmemError("tcgen05.alloc after tcgen05.relinquish_alloc_permit")
        if columns > self._last:
            raise TmemError(
                f"tcgen05.alloc of {columns} columns after one of {self._last}; allocations of a "
                "CTA must not grow"
            )
        self._use_group(group)
        if self.exclusive or exclusive and self.allocations:
            return None
        pattern = (1 << columns // BLOCK) - 1
        # Columns behind the first 512 are those of exclusive allocations alone.
        for block in range((max(columns, Limits.columns) - columns) // BLOCK + 1):
            if not self.record.owned & pattern << block:
                self.exclusive = exclusive
                self.record.owned |= pattern << block
                self.freed &= ~(pattern << block)
                self.allocations[block * BLOCK] = self._last = columns
                self.cells[block * BLOCK : block * BLOCK + columns] = POISON
                return block * BLOCK
        return None

    def deallocate(self, address: int, columns: int, group: int, exclusive: bool = False) -> None:
        """Free an allocation. Raises TmemError unless exactly it was made by `allocate`."""
        lane, column = split_address(address)
        if lane or self.allocations.get(column) != columns:
            made = {f"{at}": count for at, count in self.allocations.items()}
            raise TmemError(
                f"tcgen05.dealloc of {columns} columns at address {address:#x}; allocated are "
                f"(first column: columns) {made or 'none'}"
            )
        if exclusive != self.exclusive:
            raise TmemError(
                "tcgen05.alloc and tcgen05.dealloc of an allocation, one with .exclusive and the "
                "other without; accepted: both or neither"
            )
        self._use_group(group)
        self.exclusive = False
        del self.allocations[column]
        pattern = (1 << columns // BLOCK) - 1 << column // BLOCK
        self.record.owned &= ~pattern
        self.freed |= pattern

    def relinquish(self, group: int) -> None:
        """Give up the right to allocate."""
        self._use_group(group)
        self.relinquished = True

    def check(self, column: int, count: int, what: str) -> None:
        """Raise TmemError unless columns [column, column + count) are all allocated."""
        end = column + count
        if end > self.columns:
            raise TmemError(
                f"{what} touches columns {column} to {end - 1}; TMEM has {self.columns} columns"
            )
        pattern = _blocks(column, end)
        if self.record.owned & pattern != pattern:
            raise TmemError(f"{what} touches columns {column} to {end - 1}; {self.describe()}")

    def reads_freed(self, column: int, count: int) -> bool:
        """Return True if some columns of [column, column + count) were freed and all others are
        allocated."""
        pattern = _blocks(column, column + count) if column + count <= self.columns else 0
        return bool(self.freed & pattern) and (self.record.owned | self.freed) & pattern == pattern

    def describe(self) -> str:
        """State in words, for reports of hangs."""
        made = [f"{at}..{at + n - 1}" for at, n in sorted(self.allocations.items())]
        return f"tensor memory: columns {', '.join(made) or 'none'} are allocated"

    def leaked(self) -> dict[int, int]:
        """Allocations that are still held (first column -> columns); must be empty at exit."""
        return dict(self.allocations)
