"""The plan of new rows of a KV cache: the kernel that writes them, and rotates queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..architectures import Architecture
from ..call.memory import View
from ..gpus.family import architecture_of
from ..kernels.problem_class import DESCALES, KV_DTYPES, AppendClass
from .append_arguments import AFTER, ROTATED, AppendOptions, AppendTensors, append_call_arguments
from .catalogue import append_spec
from .execute import execute
from .plan import LaunchPlan, PlanBuilder

__all__ = ["add_append", "plan_append", "run_append"]


def run_append(
    tensors: AppendTensors, options: AppendOptions
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Write new rows by themselves; return what `add_append` does."""
    after, rotated = execute(plan_append(tensors, options), tensors)
    return after, rotated


def plan_append(tensors: AppendTensors, options: AppendOptions) -> LaunchPlan:
    """Return the plan of new rows by themselves, whose results are those of `add_append`, None for
    queries that are not rotated."""
    builder = PlanBuilder.for_tensors(tensors.k.device, AppendTensors._fields, tensors)
    given = tensors, options, architecture_of(builder.device)
    after, rotated = add_append(builder, given, builder.inputs)
    return builder.plan(after, rotated)


def add_append(
    builder: PlanBuilder,
    given: tuple[AppendTensors, AppendOptions, Architecture],
    views: Mapping[str, View],
) -> tuple[View, View | None]:
    """Add the launch that writes new rows; return (batch,) int32, the rows in use with them, and
    with rotary embedding the queries, rotated, as a contiguous tensor.

    given: tensors, or views of these; options; whose kernel it is. views: of the tensors, by name.
    """
    tensors, options, architecture = given
    lengths, q = views["lengths"], views.get("q")
    is_rotary = tensors.rotary_cos is not None
    if not lengths.numel() or not tensors.k.numel() and not (is_rotary and tensors.q.numel()):
        after = builder.copied(builder.dense(lengths))
        return after, builder.copied(q) if is_rotary and q is not None else None
    own = tensors.compiled_in(options)
    # No rows are in use where nobody has counted them, as on the CPU without the simulator.
    size = lengths.numel()
    fills = ((0, size, 0.0),) if builder.device.type == "cpu" else ()
    made: dict[str, View] = {AFTER: builder.allocate(AFTER, lengths.shape, torch.int32, fills)}
    if is_rotary:
        made[ROTATED] = builder.allocate(ROTATED, tensors.q.shape, tensors.q.dtype)
    operands = _operands(builder, views, made, own)
    spec = append_spec(own, architecture)
    builder.launch(spec, append_call_arguments(operands, None))
    return made[AFTER], made.get(ROTATED)


def _operands(
    builder: PlanBuilder, views: Mapping[str, View], made: Mapping[str, View], own: AppendClass
) -> dict[str, Any]:
    """Views as the kernel reads them, by name; None for what it does not take."""
    found: dict[str, Any] = {}
    for name in ("k_cache", "v_cache", "k", "v"):
        view = views[name]
        if own.packed and name in ("k", "v"):
            view = view.unsqueeze(0)
        view = builder.operand(view)
        # CuTe DSL takes no tensor of single bytes from PyTorch.
        found[name] = view.view(own.torch_type) if view.dtype in KV_DTYPES else view
    found["lengths"] = builder.dense(views["lengths"])
    found[AFTER] = made[AFTER]
    found["cu_seqlens_k_new"] = views.get("cu_seqlens_k_new")
    found["page_table"] = builder.table(views["page_table"]) if own.paged else None
    for name in DESCALES:
        found[name] = builder.scale(views[name], own.descale) if own.descale else None
    return found | _rotary_operands(builder, views, made, own, found["lengths"])


def _rotary_operands(
    builder: PlanBuilder,
    views: Mapping[str, View],
    made: Mapping[str, View],
    own: AppendClass,
    lengths: View,
) -> dict[str, Any]:
    """Return the operands of rotary embedding. lengths: positions where the user gives none."""
    if own.rotary is None:
        return dict.fromkeys(
            ("rotary_cos", "rotary_sin", "rotary_seqlens", "q", ROTATED, "cu_seqlens_q")
        )
    found: dict[str, Any] = {}
    for name in ("rotary_cos", "rotary_sin"):
        view = views[name]
        found[name] = builder.table(view if view.stride(1) == 1 else builder.dense(view))
    begins = views.get("rotary_seqlens")
    found["rotary_seqlens"] = lengths if begins is None else builder.dense(begins)
    q, rotated = views["q"], made[ROTATED]
    if own.rotary.packed:
        q, rotated = q.unsqueeze(0), rotated.unsqueeze(0)
    found["q"], found[ROTATED] = builder.operand(q), builder.operand(rotated)
    found["cu_seqlens_q"] = views.get("cu_seqlens_q")
    return found
