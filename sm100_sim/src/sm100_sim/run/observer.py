"""Observers of a launch: the sanitizer, a trace, whatever the launcher hands in.

The machine is one for all of them. An observer sees what warps do through the executors that it
extends, asynchronous operations as they are issued, and clusters and warps as they come and go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sm100_sim.state.barriers import MBarrier
from sm100_sim.state.events import AsyncOp

#: Does a machine operation for lanes of a warp: (warp, lanes) -> None, YIELD or what they wait for.
Executor = Callable[[Any, int], Any]


class Observer:
    """Sees every machine operation in Python, and adds nothing: what to override.

    budget: backward branches that a warp may take before it loses its turn, None for the machine's.
    """

    budget: int | None = None

    def attach(self, machine: Any) -> None:
        """The machine has read its launch and is about to be built."""

    def table(self) -> np.ndarray | None:
        """The kernel's block table with native routines of machine operations that also do what
        this observer has to do; None if every operation must come to Python."""
        return None

    def around(self, executors: list[Executor | None]) -> list[Executor | None]:
        """The executors by instruction, with what is to happen around them."""
        return executors

    def new_mbarrier(
        self, address: int, count: int, wake: Callable[[Any], None], record: Any
    ) -> MBarrier | None:
        """An mbarrier that follows more than its state; None if an ordinary one does."""
        return None

    def cluster_begins(self, cluster: Any) -> None:
        """A cluster is resident, and none of its warps has run."""

    def cluster_ends(self, cluster: Any) -> None:
        """All CTAs of a cluster have exited."""

    def issued(self, operation: AsyncOp) -> None:
        """An asynchronous operation is issued, and nothing of it has taken effect."""

    def warp_leaves(self, warp: Any) -> None:
        """A warp stops running: it waits, has exited, or lost its turn."""

    def warp_exits(self, warp: Any) -> None:
        """All lanes of a warp have exited; its CTA does not know yet."""

    def tensor_map_learned(self) -> None:
        """Native code copies by one more TMA descriptor from now on."""

    def run_ends(self) -> None:
        """Every cluster is done."""

    def findings(self, found: list[str]) -> list[str]:
        """Return the findings of the report; found: what is known without this observer."""
        return found

    def notes(self) -> list[str]:
        """Return what the report notes besides: worth a look, and no finding."""
        return []
