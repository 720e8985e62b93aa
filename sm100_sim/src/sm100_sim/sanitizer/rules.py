"""Interface of the sanitizer for its parts; `sanitizer.Sanitizer` implements it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from .clocks import Layout
from .findings import Finding
from .memory.shadow import Access


class Rules(Protocol):
    """The sanitizer of one launch; a state is a `state.WarpState`, a barrier a `WatchedBarrier`."""

    machine: Any
    layout: Layout
    strict: bool
    in_order: bool
    actor: Any
    clusters: dict[int, Any]
    ordered: np.ndarray
    tensor_entries: np.ndarray
    load_count: int
    writes: Any
    maps: Any

    def report(self, finding: Finding, key: tuple) -> None:
        """Keep a finding, one for each key."""

    def refuse(self, count: int) -> Exception:
        """The error for a CTA with more mbarriers than frontiers have entries for."""

    def judge(
        self, before: Access | int, access: Access, frontier: np.ndarray, where: str, reached: bool
    ) -> None:
        """Report a pair of accesses unless it is in order."""

    def needs_fence(self, before: Access, access: Access, frontier: np.ndarray) -> bool:
        """Return True if a generic access is not visible to the async proxy, where it has to be."""

    def acquire(self, state: Any, frontier: np.ndarray | None) -> None:
        """A wait of a warp has succeeded."""

    def flush(self, state: Any, run: Any = None) -> None:
        """Record the MMAs of a warp's open chain."""

    def follow_writes(self) -> None:
        """The launch has written to a range of global memory for the first time."""

    def offering(self, state: Any) -> None:
        """A warp is about to publish what it knows."""

    def barrier_begins(self, barrier: Any) -> None:
        """mbarrier.init by the acting warp."""

    def arrives(self, barrier: Any) -> None:
        """An arrival by whoever acts."""

    def signals(self, barrier: Any) -> None:
        """Bytes of a copy have arrived."""

    def unbalanced(self, barrier: Any) -> None:
        """Other warps made the arrivals of this phase than those of the first one."""

    def completed(self, barrier: Any) -> None:
        """A phase is complete."""
