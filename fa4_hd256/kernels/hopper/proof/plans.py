"""The plans in Hopper's configurations, with their steps, for `kernels.proof`.

The MMAs of a kernel of the backward come in another order where scores have slopes: such a plan is
there twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...plan.edges import Edge, Signal
from ...proof.plans import PlanSteps
from ..backward.config import BackwardConfig, DvPlan, GradientConfig, ProductsPlan, SinglePlan
from ..decode.config import E4m3Config
from ..forward.config import ForwardConfig
from ..forward.e4m3.config import E4m3ForwardConfig
from .backward_steps import dv_steps, products_steps, single_steps
from .decode_steps import decode_steps
from .forward_steps import ByWarpgroup, e4m3_forward_steps, forward_steps


@dataclass(frozen=True)
class HopperPlanSteps(PlanSteps):
    """A barrier expects the bytes of all copies into a buffer, too."""

    def check_edge(self, edge: Edge) -> None:
        super().check_edge(edge)
        if edge.signal is Signal.COPIES_CTA:
            return
        regions = {region.name: region.stage_bytes for region in self.plan.smem.regions}
        for _, action in self.steps.actions:
            if not action.copies or self.steps.ring(action.where).full != edge.name:
                continue
            copied = sum(regions[copy.region or action.where] for copy in action.copies)
            if copied != edge.transaction_bytes:
                raise ValueError(
                    f"{edge.name} expects {edge.transaction_bytes} bytes, {action.content} is "
                    f"{copied}"
                )


def plans_of(config: Any) -> tuple[HopperPlanSteps, ...]:
    """Return the plans with their steps, those without slopes first."""
    if isinstance(config, BackwardConfig):
        plans = config.dv, config.products, config.single_dq, config.single_dk, config.single_dv
        return tuple(found for plan in plans for found in plans_of(plan))
    if isinstance(config, GradientConfig):
        return plans_of(config.plan)
    if isinstance(config, ForwardConfig):
        plan = ByWarpgroup(config)
        return (HopperPlanSteps("the forward kernel", plan, forward_steps(config)),)
    if isinstance(config, E4m3ForwardConfig):
        plan = ByWarpgroup(config)
        return (HopperPlanSteps("the forward kernel", plan, e4m3_forward_steps(config)),)
    if isinstance(config, E4m3Config):
        return (HopperPlanSteps("the decode kernel", config, decode_steps(config)),)
    if isinstance(config, ProductsPlan):
        name = "the kernel of dK and dQ from stored dS"
        return (HopperPlanSteps(name, config, products_steps()),)
    if isinstance(config, DvPlan):
        name = "the kernel of dV and dS"
        return tuple(HopperPlanSteps(name, config, dv_steps(capped)) for capped in (False, True))
    if isinstance(config, SinglePlan):
        name = f"the kernel of d{config.result[1:].upper()} alone"
        return tuple(
            HopperPlanSteps(name, config, single_steps(config.result, capped))
            for capped in (False, True)
        )
    raise TypeError(f"{config!r} has no steps; accepted: configurations of Hopper's kernels")
