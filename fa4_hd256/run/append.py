"""The plan of a call with new rows of a KV cache: the kernel that writes these and rotates queries,
then the attention over all rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..architectures import Architecture
from ..call.cache_checks import check_contents
from ..call.memory import View
from ..call.mxfp8_scales import refuse_new_rows
from ..call.operator_arguments import CacheTensors, CacheValues
from ..call.options import UNBOUNDED
from ..kernels.nvfp4_format import BLOCK_SCALES, NVFP4
from ..kernels.problem_class import KV_DESCALES
from ..kernels.small.append_rows import AppendClass, AppendTables, RotaryClass, RotaryTables
from .arguments import STREAM
from .catalogue import append_spec
from .forward import add_forward, described
from .plan import LaunchPlan, PlanBuilder, aligned


def plan_cache(tensors: Sequence[Any], values: CacheValues) -> LaunchPlan:
    """Return the plan of new rows and of the attention behind them, whose results are (out, lse).
    tensors: fields of `CacheTensors`, which `cache_checks.check_cache_tensors` accepts.

    Raises TypeError or ValueError for what the attention refuses, and for contents: all of it
    before anything is written."""
    call = CacheTensors(*tensors)
    of_attention = values.attention
    ordered = (of_attention.window_left, of_attention.window_right) != (UNBOUNDED, UNBOUNDED)
    # The attention is described with these. On a GPU, which is not read, they are the lengths
    # before the call: only their shape counts. The launch takes those that `add_append` computes.
    after = check_contents(call, ordered)
    attention = call.attention(after).with_batches()
    problem, num_splits = described(attention, of_attention, out=call.out)
    refuse_new_rows(problem.descale)
    builder = PlanBuilder.for_tensors(problem.device, CacheTensors._fields, tensors)
    views = dict(builder.inputs)
    rows = dict(views)
    if call.new_page_table is not None:
        rows["page_table"] = views["new_page_table"]
    own = append_class(rows, problem.descale, values.rotary_interleaved, ordered)
    views["seqused_k"], rotated = add_append(builder, rows, own, problem.architecture)
    # Under the names that the attention has for them.
    views |= {"k": views["k_cache"], "v": views["v_cache"], "q": rotated or views["q"]}
    has_batch = call.cu_seqlens_q is None
    for name in () if has_batch else ("q", "out"):
        if name in views:
            views[name] = views[name].unsqueeze(0)
    return builder.plan(*add_forward(builder, problem, num_splits, attention, views, has_batch))


def append_class(
    views: Mapping[str, View], descale: str, interleaved: bool, ordered: bool
) -> AppendClass:
    """Return the class of the kernel that writes new rows. views: of its tensors, by name."""
    dtype, kv_dtype, rotary = views["k"].dtype, views["k_cache"].dtype, None
    if "rotary_cos" in views:
        packed = "cu_seqlens_q" in views
        rotary = RotaryClass(views["rotary_cos"].dtype, interleaved, ordered, packed)
    packed, paged = "cu_seqlens_k_new" in views, "page_table" in views
    if dtype == kv_dtype:
        return AppendClass(dtype, packed, paged, rotary=rotary)
    return AppendClass(dtype, packed, paged, kv_dtype, descale, rotary)


def add_append(
    builder: PlanBuilder, views: Mapping[str, View], own: AppendClass, architecture: Architecture
) -> tuple[View, View | None]:
    """Add the launch that writes new rows; return (batch,) int32, the rows in use with them, and
    with rotary embedding the queries, rotated, as a contiguous tensor."""
    lengths, q = views["lengths"], views["q"] if own.rotary else None
    has_work = views["k"].numel() or (q is not None and q.numel())
    if not lengths.numel() or not has_work:
        after = builder.copied(builder.dense(lengths))
        return after, None if q is None else builder.copied(q)
    # No rows are in use where nobody has counted them, as on the CPU without the simulator.
    size = lengths.numel()
    fills = ((0, size, 0.0),) if builder.device.type == "cpu" else ()
    after = builder.allocate("after", lengths.shape, torch.int32, fills)
    rotated = None if q is None else builder.allocate("rotated", q.shape, q.dtype)
    caches = tuple(_elements(builder, views[name], own) for name in ("k_cache", "v_cache"))
    rows = tuple(_elements(builder, _batched(views[name], own.packed), own) for name in "kv")
    lengths = builder.dense(lengths)
    tables = AppendTables(
        lengths=lengths,
        after=after,
        offsets=views.get("cu_seqlens_k_new"),
        page_table=builder.table(views["page_table"]) if own.paged else None,
        scales=tuple(builder.scale(views[name], own.descale) for name in KV_DESCALES)
        if own.descale
        else None,
        block_scales=tuple(_elements(builder, views[name], own) for name in BLOCK_SCALES)
        if own.kv_dtype == NVFP4
        else None,
        rotary=_rotary_tables(builder, views, own, lengths, rotated),
    )
    arguments = aligned((caches, rows, tables))
    builder.launch(append_spec(own, architecture), (*arguments, STREAM))
    return after, rotated


def _batched(view: View, packed: bool) -> View:
    return view.unsqueeze(0) if packed else view


def _elements(builder: PlanBuilder, view: View, own: AppendClass) -> View:
    """Return K or V as the kernel takes it: single bytes as a wider type."""
    view = builder.operand(view)
    return view.view(own.torch_type) if view.element_size() == 1 else view


def _rotary_tables(
    builder: PlanBuilder,
    views: Mapping[str, View],
    own: AppendClass,
    lengths: View,
    rotated: View | None,
) -> RotaryTables | None:
    """Return the tables of rotary embedding. lengths: positions where the user gives none."""
    if own.rotary is None or rotated is None:
        return None
    angles = (views[name] for name in ("rotary_cos", "rotary_sin"))
    cos, sin = (
        builder.table(view if view.stride(1) == 1 else builder.dense(view)) for view in angles
    )
    begins, packed = views.get("rotary_seqlens"), own.rotary.packed
    return RotaryTables(
        cos,
        sin,
        lengths if begins is None else builder.dense(begins),
        builder.operand(_batched(views["q"], packed)),
        builder.operand(_batched(rotated, packed)),
        views.get("cu_seqlens_q"),
    )
