"""Which CTA wrote each byte pair of global memory: two CTAs must not write one element."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sm100_sim.tiles import window

from .findings import Finding, place

if TYPE_CHECKING:
    from .sanitizer import Sanitizer
    from .state import WarpState

#: Bytes of global memory in a granule: the smallest element that kernels store here.
GRANULE = 2


class Output:
    """Writers of global memory by plain stores and bulk stores; atomics and reductions are free.

    A granule holds 1 + the number of its writer in the list of (CTA, instruction).
    """

    def __init__(self, sanitizer: Sanitizer, memory: Any) -> None:
        self._sanitizer = sanitizer
        self._ranges = [(int(low), int(high)) for low, high, _ in memory.table.tolist()]
        self._planes: dict[int, np.ndarray] = {}
        self._numbers: dict[tuple, int] = {}
        self._writers: list[tuple | None] = [None]

    def _plane(self, address: int) -> tuple[np.ndarray, int] | None:
        for index, (low, high) in enumerate(self._ranges):
            if low <= address < high:
                plane = self._planes.get(index)
                if plane is None:
                    plane = np.zeros(-(-(high - low) // GRANULE) + 1, np.int32)
                    self._planes[index] = plane
                return plane, low
        return None

    def store(self, state: WarpState, addresses: np.ndarray, width: int) -> None:
        """st.global of `width` bytes at host addresses."""
        found = self._plane(int(addresses[0]))
        if found is None:
            return
        plane, low = found
        cells = (addresses - np.uint64(low)).astype(np.int64) // GRANULE
        if width > GRANULE:
            cells = (cells[:, None] + np.arange(width // GRANULE)).reshape(-1)
        if int(cells.max()) < len(plane) and int(cells.min()) >= 0:
            self._mark(state, plane, cells)

    def copy(self, state: WarpState, stored: tuple) -> None:
        """A bulk store: (tensor map, coordinates) or (start, bytes)."""
        if isinstance(stored[0], int):
            start, size = stored
            found = self._plane(start)
            if found is not None:
                first = (start - found[1]) // GRANULE
                self._mark(state, found[0], slice(first, first + -(-size // GRANULE)))
            return
        inside = window(*stored)
        found = None if inside is None else self._plane(inside.start)
        if found is None:
            return
        plane, low = found
        if any(s % GRANULE for s in (*inside.strides[:-1], inside.shape[-1], inside.start - low)):
            return
        region = np.lib.stride_tricks.as_strided(
            plane[(inside.start - low) // GRANULE :],
            (*inside.shape[:-1], inside.shape[-1] // GRANULE),
            (*(4 * s // GRANULE for s in inside.strides[:-1]), 4),
        )
        self._mark(state, region, ...)

    def _mark(self, state: WarpState, plane: np.ndarray, cells: Any) -> None:
        cta = state.warp.cta
        key = (cta.cluster.id, cta.rank, state.instruction.index)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._writers)
            self._writers.append((state.instruction, cta.ctaid, state.warp.index))
        before = plane[cells]
        if before.any():
            self._check(state, np.unique(before), number)
        plane[cells] = number

    def _check(self, state: WarpState, numbers: np.ndarray, now: int) -> None:
        instruction, cta, warp = self._writers[now]
        for number in numbers.tolist():
            if number and self._writers[number][1] != cta:
                text = (
                    "two CTAs write one element of global memory: "
                    f"{place(*self._writers[number])}, then {place(instruction, cta, warp)}; "
                    "each output element belongs to one CTA, or is combined by an atomic"
                )
                key = (self._writers[number][0].index, instruction.index)
                self._sanitizer.report(Finding("two-writers", text), key)
