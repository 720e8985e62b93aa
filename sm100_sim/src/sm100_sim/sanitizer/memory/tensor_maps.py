"""Tensor maps in global memory that the kernel itself writes.

PTX ISA, "membar, fence": whoever has written a map through the generic proxy executes
fence.proxy.tensormap::generic.release, and after it, known to the copy, somebody executes
fence.proxy.tensormap::generic.acquire on its 128 bytes. A copy may read its map until it is
complete.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from sm100_sim.state.tensormap import TENSORMAP_BYTES

from .. import findings
from ..findings import Finding
from ..rules import Rules
from ..state import WarpState
from .shadow import Access


class _Use(NamedTuple):
    """A copy that uses a map; it is complete when one of its accesses is."""

    accesses: tuple[Access, ...]
    cluster: int


class _Fence(NamedTuple):
    """An acquire fence: which writes of the map it covers, and when it was."""

    numbers: frozenset[int]
    cluster: int
    agent: int
    clock: int


class TensorMaps:
    """Uses of maps by address, and the fences around their writes."""

    def __init__(self, sanitizer: Rules) -> None:
        self._sanitizer = sanitizer
        self._uses: dict[int, dict[tuple[int, int], _Use]] = {}
        self._releases: dict[tuple[int, int], list[int]] = {}
        self._acquires: dict[int, list[_Fence]] = {}

    def use(self, state: WarpState, address: int, accesses: list[Access]) -> None:
        """A copy is issued that reads the map at `address`; any of `accesses` completes it."""
        writes = self._sanitizer.writes
        if not writes.written_here(address):
            return
        writes.guard()
        number = state.cluster.number
        uses = self._uses.setdefault(address, {})
        uses[number, accesses[0].agent] = _Use(tuple(accesses), number)
        covered: set[int] = set()
        for fence in self._acquires.get(address, ()):
            if fence.cluster == number and int(state.frontier[fence.agent]) >= fence.clock:
                covered |= fence.numbers
        for missing in set(writes.numbers(address, TENSORMAP_BYTES)) - covered:
            before = writes.writers[missing].access
            text = (
                f"tensor map in global memory: {findings.describe(before)}, then used by "
                f"{findings.describe(accesses[0])}: fence.proxy.tensormap::generic.release by the "
                "writer, then fence.proxy.tensormap::generic.acquire on the map, known to the "
                "copy, must stand between"
            )
            self._report("tensormap-not-fenced", text, before, accesses[0])

    def release(self, state: WarpState) -> None:
        """fence.proxy.tensormap::generic.release."""
        key = state.cluster.number, state.generic
        self._releases.setdefault(key, []).append(state.clock)
        state.advance()

    def acquire(self, state: WarpState, address: int) -> None:
        """fence.proxy.tensormap::generic.acquire of the map at `address`."""
        numbers = frozenset(
            number
            for number in self._sanitizer.writes.numbers(address, TENSORMAP_BYTES)
            if self._released(state, number)
        )
        fences = self._acquires.setdefault(address, [])
        fences.append(_Fence(numbers, state.cluster.number, state.generic, state.clock))
        state.advance()

    def _released(self, state: WarpState, number: int) -> bool:
        """Return True if a warp knows of a release fence after a write."""
        writes = self._sanitizer.writes
        access, cluster = writes.writers[number]
        clocks = self._releases.get((cluster, access.agent), [])
        at = bisect_left(clocks, access.clock)
        if at == len(clocks):
            return False
        if cluster == state.cluster.number:
            return int(state.frontier[access.agent]) >= clocks[at]
        foreign = state.cluster.foreign.get(cluster)
        return foreign is not None and int(foreign[access.agent]) >= clocks[at]

    def changed(self, state: WarpState, addresses: np.ndarray, width: int) -> None:
        """A warp writes `width` bytes at each of some host addresses."""
        if not self._uses:
            return
        low, high = int(addresses.min()), int(addresses.max()) + width
        for address, uses in self._uses.items():
            if high <= address or low >= address + TENSORMAP_BYTES or not uses:
                continue
            inside = (addresses >= np.uint64(address)) & (
                addresses < np.uint64(address + TENSORMAP_BYTES)
            )
            if inside.any():
                for use in uses.values():
                    self._check(state, use)
                uses.clear()

    def _check(self, state: WarpState, use: _Use) -> None:
        if use.cluster == state.cluster.number:
            frontier = state.frontier
        elif use.cluster in self._sanitizer.clusters:
            frontier = state.cluster.foreign.get(use.cluster)
        else:
            return
        if frontier is not None and any(
            a.clock is not None and int(frontier[a.agent]) >= a.clock for a in use.accesses
        ):
            return
        write = Access(state, state.generic, state.clock, "generic", True)
        text = (
            f"tensor map in global memory: used by {findings.describe(use.accesses[0])}, then "
            f"{findings.describe(write)}: the copy may still read the map; wait for its completion "
            "before the map changes"
        )
        self._report("tensormap-in-flight", text, use.accesses[0], write)

    def _report(self, kind: str, text: str, *accesses: Access) -> None:
        finding = Finding(kind, text, findings.sites(*accesses), "tensor map",
                          findings.parties(*accesses), text.rpartition(": ")[2])  # fmt: skip
        self._sanitizer.report(finding, tuple(a.instruction.index for a in accesses))
