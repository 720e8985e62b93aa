"""A plan of a Hopper kernel is refused before anything is compiled where its steps cannot work."""

from __future__ import annotations

from typing import Any

from ..plan.drain import check_drains
from ..plan.edges import TMA_SIGNALS
from ..plan.ring_memory import check_memory
from ..plan.steps import StepTable

__all__ = ["check_plan"]


def check_plan(name: str, plan: Any, steps: StepTable) -> None:
    """Raises ValueError for plans that do not fit, or whose steps cannot work.

    name: of the kernel.  plan: has warps, smem and edges.  steps: one of its tables.
    """
    check_memory(name, plan, steps)
    _check_bytes(name, plan, steps)
    _check_warps(name, plan, steps)
    check_drains(name, plan.edges, steps)


def _check_bytes(name: str, plan: Any, steps: StepTable) -> None:
    """A barrier expects the bytes of all copies into a buffer."""
    regions = {region.name: region.stage_bytes for region in plan.smem.regions}
    for load, _ in steps.fills:
        edge = plan.edges[steps.ring(load.ring).full]
        copied = sum(regions[copy.memory] for copy in load.copies)
        if copied != edge.transaction_bytes:
            raise ValueError(
                f"{name} cannot work: {edge.name} expects {edge.transaction_bytes} bytes, "
                f"{load.content} is {copied}"
            )


def _check_warps(name: str, plan: Any, steps: StepTable) -> None:
    """All warps of a role arrive."""
    for edge in plan.edges.edges:
        if edge.signal not in TMA_SIGNALS:
            named = [role.of for role in steps.roles if role.name == edge.producer]
            whole = (named and named[0]) or edge.producer
            groups = [role for role in steps.roles if role.of == whole]
            warps = len(getattr(plan.warps, whole))
            if whole != edge.producer:
                warps //= len(groups)
            if warps != edge.producer_warps:
                raise ValueError(
                    f"{name} cannot work: {edge.name} is completed by {edge.producer_warps} warps "
                    f"of a CTA, {edge.producer} has {warps}"
                )
