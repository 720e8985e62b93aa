"""A plan whose rings and memory disagree is refused before anything is compiled.

A ring's edges say how many buffers are used in turn, the SMEM and TMEM plans how many there are,
and which lie over which.  A buffer more than there is room for overwrites what comes behind it.
"""

from __future__ import annotations

from typing import Any

from .steps import Ring, StepTable

__all__ = ["check_memory"]


def check_memory(name: str, plan: Any, steps: StepTable) -> None:
    """Raises ValueError, with the ring, where its buffers are not those of the plans.

    name: of the kernel.  plan: has edges, smem and, for rings that are not in it, tmem.
    """
    try:
        for ring in steps.rings:
            _check_ring(plan, steps, ring)
    except ValueError as error:
        raise ValueError(f"{name} cannot work: {error}") from None


def _check_ring(plan: Any, steps: StepTable, ring: Ring) -> None:
    stages = plan.edges[ring.full].stages
    if ring.over:
        below = steps.ring(ring.over)
        room = plan.edges[below.full].stages * ring.parts
        if stages != room:
            raise ValueError(
                f"ring {ring.name}: {ring.full} has {stages} stages, over {below.name} there are "
                f"{room}"
            )
        return
    smem = {region.name: region.stages for region in plan.smem.regions}
    for region in ring.regions or (ring.name,):
        if region not in smem:
            plan.tmem.buffers(region, stages)
            _check_lies_over_nothing(plan, ring, region)
        elif smem[region] != stages:
            raise ValueError(
                f"ring {ring.name}: {ring.full} has {stages} stages, the region {region} of the "
                f"SMEM plan {smem[region]}"
            )


def _check_lies_over_nothing(plan: Any, ring: Ring, name: str) -> None:
    for region in plan.tmem.regions:
        if region.alias_of is not None and region.name.rstrip("0123456789") == name:
            raise ValueError(
                f"ring {ring.name}: {region.name} lies over {region.alias_of} in the TMEM plan; "
                "say so in the ring's `over`, so that what uses both is checked"
            )
