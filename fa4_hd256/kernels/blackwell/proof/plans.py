"""The plans in Blackwell's configurations, with their steps, for `kernels.proof`."""

from __future__ import annotations

from typing import Any

from ...proof.plans import PlanSteps
from ...proof.steps import StepTable
from ..backward.config import BackwardConfig, DkdvPlan, DqPlan, DvPlan, GradientConfig, ProductsPlan
from ..backward.mxfp8.config import DvMxfp8Plan, Mxfp8BackwardConfig, ProductsMxfp8Plan
from ..decode.config import DecodeConfig
from ..forward.config import ForwardConfig
from . import backward_steps as backward
from .decode_steps import decode_steps
from .forward_steps import forward_steps

#: Plan -> kernel and steps.
BACKWARD: dict[type, tuple[str, StepTable]] = {
    DvPlan: ("the kernel of dV and dS", backward.DV_STEPS),
    ProductsPlan: ("the kernel of dK and dQ from stored dS", backward.PRODUCTS_STEPS),
    DvMxfp8Plan: ("the kernel of dV and dS in mxfp8", backward.DV_MXFP8_STEPS),
    ProductsMxfp8Plan: ("the kernel of dK and dQ in mxfp8 from stored dS", backward.PRODUCTS_STEPS),
    DkdvPlan: ("the kernel of dK/dV", backward.DKDV_STEPS),
    DqPlan: ("the kernel of dQ", backward.DQ_STEPS),
}


def plans_of(config: Any) -> tuple[PlanSteps, ...]:
    if isinstance(config, BackwardConfig):
        plans = config.dv, config.products, config.dkdv, config.dq
        return tuple(found for plan in plans for found in plans_of(plan))
    if isinstance(config, Mxfp8BackwardConfig):
        return *plans_of(config.dv), *plans_of(config.products)
    if isinstance(config, GradientConfig):
        return plans_of(config.plan)
    if isinstance(config, ForwardConfig):
        return (PlanSteps("the forward kernel", config, forward_steps(config)),)
    if isinstance(config, DecodeConfig):
        return (PlanSteps("the decode kernel", config, decode_steps(config)),)
    if type(config) not in BACKWARD:
        raise TypeError(f"{config!r} has no steps; accepted: configurations of Blackwell's kernels")
    name, steps = BACKWARD[type(config)]
    return (PlanSteps(name, config, steps),)
