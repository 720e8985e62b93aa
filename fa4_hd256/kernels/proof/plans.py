"""Plans with the steps of their roles: proved before a kernel is compiled, and described.

A kernel and its configuration know nothing of this package.  Each architecture's folder has a
module `proof.plans`, whose `plans_of` returns the plans in a configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..kernel_set import KernelSet
from ..plan.edges import COMMIT_SIGNALS, TMA_SIGNALS, Edge
from .drain import check_drains
from .steps import Ring, StepTable
from .tables import edges_table, roles_table, smem_table, tmem_table, warps_table


@dataclass(frozen=True)
class PlanSteps:
    """A kernel's plan, and the steps that its roles go through. name: of the kernel. plan: has
    title, warps, smem, edges and, for rings that are not in smem, tmem."""

    name: str
    plan: Any
    steps: StepTable

    def prove(self) -> None:
        """Raise ValueError, with the ring, the edge or the step, for a plan that cannot work."""
        try:
            for ring in self.steps.rings:
                self._check_memory(ring)
            for edge in self.plan.edges.edges:
                self.check_edge(edge)
        except ValueError as error:
            raise ValueError(f"{self.name} cannot work: {error}") from None
        check_drains(self.name, self.plan.edges, self.steps)

    def _check_memory(self, ring: Ring) -> None:
        """Check that a ring uses the buffers there are, and says what they lie over."""
        if ring.is_permit:
            return
        plan, stages = self.plan, self.plan.edges[ring.full].stages
        used = f"ring {ring.name}: {ring.full} has {stages} stages"
        if ring.over:
            below = self.steps.ring(ring.over)
            room = plan.edges[below.full].stages * ring.parts
            if stages != room:
                raise ValueError(f"{used}, over {below.name} there are {room}")
            return
        smem = {region.name: region.stages for region in plan.smem.regions}
        for name in ring.regions or (ring.name,):
            if smem.get(name, stages) != stages:
                raise ValueError(f"{used}, the region {name} of the SMEM plan {smem[name]}")
            if name not in smem:
                plan.tmem.buffers(name, stages)
                for region in plan.tmem.regions:
                    if region.alias_of and region.name.rstrip("0123456789") == name:
                        raise ValueError(
                            f"ring {ring.name}: {region.name} lies over {region.alias_of} in the "
                            "TMEM plan; say so in the ring's `over`, so that what uses both is "
                            "checked"
                        )

    def check_edge(self, edge: Edge) -> None:
        """All warps of a role arrive."""
        if edge.signal in (*TMA_SIGNALS, *COMMIT_SIGNALS):
            return
        warps = self._warps_of(edge.producer)
        if warps != edge.producer_warps:
            raise ValueError(
                f"{edge.name} is completed by {edge.producer_warps} warps of a CTA, "
                f"{edge.producer} has {warps}"
            )

    def _warps_of(self, producer: str) -> int:
        named = [role.of for role in self.steps.roles if role.name == producer]
        whole = (named and named[0]) or producer
        warps = getattr(self.plan.warps, whole)
        count = len(warps) if isinstance(warps, tuple) else 1
        groups = [role for role in self.steps.roles if role.of == whole]
        return count if whole == producer else count // len(groups)

    def describe(self) -> str:
        plan = self.plan
        budgets = [warps_table(plan.warps), smem_table(plan.smem)]
        if hasattr(plan, "tmem"):
            budgets.append(tmem_table(plan.tmem))
        tables = *budgets, edges_table(plan.edges), roles_table(self.steps)
        return "\n\n".join([plan.title, *tables])


def prove(kernels: KernelSet, config: Any) -> None:
    for plan in kernels.plans_of(config):
        plan.prove()


def describe(kernels: KernelSet, config: Any) -> str:
    plans: dict[Any, PlanSteps] = {}
    for found in kernels.plans_of(config):
        plans.setdefault(found.plan, found)  # of several tables the first
    title = [] if len(plans) == 1 else [config.title]
    return "\n\n".join([*title, *(found.describe() for found in plans.values())])
