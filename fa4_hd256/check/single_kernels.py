"""Kernels by themselves: described calls without `flash_attn_func`, and tensors that they write to.

For measurements, models and tests that launch one kernel, or a call of one configuration.
"""

from __future__ import annotations

from typing import Any

import torch

from ..call.backward_problem import BackwardProblem
from ..call.forward_problem import Problem
from ..call.memory import View
from ..call.operator_arguments import BackwardTensors, ForwardTensors
from ..run.arguments import mapped
from ..run.backward import (
    BackwardWork,
    Wanted,
    add_preprocess,
    or_empty,
    plan_backward,
    stats_view,
)
from ..run.execute import execute, new_tensor, value_of
from ..run.forward import SPLITS, plan_described, result_views, split_results
from ..run.plan import PlanBuilder
from ..run.tile_counter import tile_counter

_CPU = torch.device("cpu")


def launch_forward(
    problem: Problem, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of a described call of 4-D q, k, v alone, whose keys are not split."""
    tensors = ForwardTensors(*inputs)
    out, lse = execute(plan_described(problem, tensors), tensors)
    return out, lse


def run_backward(
    tensors: BackwardTensors, problem: BackwardProblem, wanted: Wanted, config: Any
) -> tuple[torch.Tensor, ...]:
    """Return (dq, dk, dv, dsink, dgate); empty where not requested."""
    plan = plan_backward(BackwardWork(tensors, problem, wanted, config), tensors)
    return or_empty(execute(plan, tensors), tensors)


def run_preprocess(problem: BackwardProblem, given: dict[str, torch.Tensor]) -> None:
    """Fill given["stats"] by the preprocess kernel alone. given: also out, dout, lse, and dlse and
    lengths of queries where the problem has them."""
    builder = PlanBuilder.for_tensors(problem.forward.device, tuple(given), tuple(given.values()))
    views = builder.inputs
    add_preprocess(builder, problem, views["dout"], views, views)
    execute(builder.plan(), tuple(given.values()))


def launch_values(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what a compiled function gets for `arguments` with tensors in place of views."""

    def value(slot: Any) -> Any:
        return value_of(tile_counter(_CPU, 0) if isinstance(slot, View) else slot)

    values: tuple[Any, ...] = mapped(arguments, value)
    return values


def empty_results(problem: Problem, parts: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tensors for the results of a divided forward, or of its splits, as calls make them."""
    builder = PlanBuilder(problem.device, {})
    views = result_views(builder, (problem,), {}, True)
    names = (SPLITS,) if parts else ("out", "lse")
    allocations = [builder.plan(views[name]).allocation(name) for name in names]
    made = [new_tensor(one, problem.device) for one in allocations if one is not None]
    out, lse = split_results(problem, made[0]) if parts else made
    return out, lse


def empty_stats(problem: BackwardProblem) -> torch.Tensor:
    builder = PlanBuilder(problem.forward.device, {})
    (allocation,) = builder.plan(stats_view(builder, problem, are_summed=True)).allocations
    return new_tensor(allocation, problem.forward.device)
