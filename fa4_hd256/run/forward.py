"""The plan of a forward: which kernels run, on which queries of the call, in which order.

A call comes in at `plan_call`: `described` describes it, `add_forward` divides it into launches.
Where keys are split, each split has a result of its own, and `forward_combine` makes one of these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..call import named_configs
from ..call.checks import check_pages_on_gpu
from ..call.division import check_grid, divide_forward
from ..call.forward_problem import Problem, operands_of
from ..call.functions.tensors import functions_of_keys
from ..call.memory import View
from ..call.operator_arguments import ForwardTensors, ForwardValues
from ..call.options import BY_RULE, Options
from ..call.scheduler_metadata import check_list
from ..gpus.devices import Gpu, gpu_of
from ..gpus.family import architecture_of
from ..kernels.kernel_set import kernels_of
from ..kernels.limits import HEAD_DIM
from ..kernels.mask.block_mask import MASK_STEPS
from ..kernels.nvfp4_format import BLOCK_SCALES
from ..kernels.problem_class import COLUMNS, OUT_GATE
from ..kernels.rows.sequences import SCHEDULER_METADATA
from .arguments import (
    LARGEST_LENGTH,
    CallTensors,
    call_arguments,
    call_scalars,
    combine_call_arguments,
)
from .catalogue import combine_spec, forward_spec
from .plan import LaunchPlan, PlanBuilder, whole
from .tail import add_tail

#: Name of the results of splits, O and then the LSE in one tensor, and the unused elements between
#: these: a kernel that writes past O is an error in the simulator, and spoils no LSE.
SPLITS, BETWEEN_SPLITS = "splits", 256

#: Name of the greatest logits of the queries.
ROW_MAXIMA = "row_maxima"


def described(
    tensors: ForwardTensors,
    values: ForwardValues,
    max_logits: bool = False,
    out: torch.Tensor | None = None,
) -> tuple[Problem, int]:
    """Return (problem, num_splits as of `divide_forward`) of a forward. tensors: with batches. out:
    where the first result is written, None for a new tensor. Raises TypeError or ValueError for
    what is not accepted, NotImplementedError for what the architecture does not offer."""
    others = tensors.others()
    functions = functions_of_keys((values.score_mod, values.mask_mod), others, tensors.q)
    options = replace(Options.of_operator(values, functions), max_logits=max_logits)
    config = None
    if values.config != named_configs.DEFAULT:
        kinds = kernels_of(architecture_of(tensors.q.device)).configs("forward")
        config = named_configs.decode(values.config, *kinds)
    longest = values.max_seqlen_q, values.max_seqlen_k
    problem = Problem.describe(
        operands_of(tensors),
        options,
        tensors.sink,
        others,
        *longest,
        config,
        None if out is None else out.dtype,
    )
    num_splits = values.num_splits
    if num_splits == BY_RULE and "cu_seqlens_k" in others and values.max_seqlen_k is None:
        # No bound on the keys of a tile is known, from which their splits follow.
        num_splits = 1
    if MASK_STEPS in others:
        num_splits = 1
    return problem, num_splits


def plan_call(
    tensors: Sequence[Any], values: ForwardValues, max_logits: bool = False, has_batch: bool = True
) -> LaunchPlan:
    """Return the plan of a forward, whose results are (out, lse), with max_logits also (heads,) of
    these.

    tensors: the fields of `ForwardTensors`, then out: where the first result is written, None for a
    new tensor. has_batch: whether packed sequences, and then their results, have a batch of 1, as
    the operators take them. Raises as `described` does, and ValueError for what the division or the
    contents of tensors refuse.
    """
    *inputs, out = tensors
    given = ForwardTensors(*inputs)
    batched = given if has_batch else given.with_batches()
    problem, num_splits = described(batched, values, max_logits, out)
    builder = PlanBuilder.for_tensors(problem.device, (*ForwardTensors._fields, "out"), tensors)
    views = operand_views(batched)
    if out is not None:
        rows = out if out.ndim == batched.q.ndim else out.unsqueeze(0)
        views["out"] = View.of("out", rows)
    results_have_batch = given.q.ndim == batched.q.ndim
    results = add_forward(builder, problem, num_splits, batched, views, results_have_batch)
    return builder.plan(*results)


def plan_described(problem: Problem, tensors: ForwardTensors) -> LaunchPlan:
    """Return the plan of a described call of 4-D tensors whose keys are not split."""
    builder = PlanBuilder.for_tensors(problem.device, ForwardTensors._fields, tensors)
    views = operand_views(tensors)
    return builder.plan(*add_forward(builder, problem, 1, tensors, views))


def operand_views(tensors: ForwardTensors) -> dict[str, View]:
    """Return views of the tensors that are given, by name; q, k and v as kernels may read them."""
    given = dict(zip("qkv", operands_of(tensors), strict=True)) | tensors.others()
    if tensors.sink is not None:
        given["sink"] = tensors.sink
    return {name: View.of(name, tensor) for name, tensor in given.items()}


def add_forward(
    builder: PlanBuilder,
    problem: Problem,
    num_splits: int,
    tensors: ForwardTensors,
    views: Mapping[str, View],
    has_batch: bool = True,
) -> tuple[View, ...]:
    """Add a forward; return its results. problem, num_splits: of `described` for tensors.
    views: by name, "out" among them where the result goes to a tensor of the caller's. has_batch:
    whether new results have that of packed sequences."""
    if problem.is_empty:
        return _without_rows(builder, problem, views, has_batch)
    gpu = gpu_of(problem.device)
    problems = divide_forward(problem, num_splits, gpu)
    if problems[-1].lists_splits:
        assert tensors.scheduler_metadata is not None, "lists_splits says so"
        check_list(tensors.scheduler_metadata, problems[-1])
    check_grid(problem, problems)
    check_pages_on_gpu(tensors.q, tensors.k, tensors.others(), problem.options.window)
    return add_launches(builder, problems, views, gpu, has_batch)


def add_launches(
    builder: PlanBuilder,
    problems: Sequence[Problem],
    views: Mapping[str, View],
    gpu: Gpu,
    has_batch: bool = True,
) -> tuple[View, ...]:
    """Launch a divided forward; return its results. problems: of `divide_forward`."""
    last = problems[-1]
    results = result_views(builder, problems, views, has_batch)
    operands = {name: builder.operand(views[name]) for name in "qkv"}
    if operands["k"].shape[1] == 0:
        # No key at all: TMA cannot describe an empty tensor, and no row of this one is read.
        batch, _, heads, columns = views["k"].shape
        empty = batch, 1, heads, columns
        none = builder.allocate("no_keys", empty, operands["k"].dtype, whole(empty, 0.0))
        operands["k"] = operands["v"] = none
    rows_k = operands["k"].shape[1]
    # Bytes in twos: CuTe DSL takes no tensor of single ones from PyTorch.
    of_bytes = (last.q_dtype is not None) * "q" + (last.kv_dtype is not None) * "kv"
    operands |= {name: operands[name].view(last.dtype) for name in of_bytes}
    tables = _tables(builder, last, views)
    is_combined = last.out_gate and last.num_splits > 1
    gate = gate_operand(builder, views[OUT_GATE]) if is_combined else None
    for problem in problems:
        _add_launch(builder, problem, gpu, operands, results, tables, gate)
    named = [("q", results["out"])]
    add_tail(builder, last, named, results["lse"], tables, rows_k, LARGEST_LENGTH)
    return _finished(builder, last, results)


def _add_launch(
    builder: PlanBuilder,
    problem: Problem,
    gpu: Gpu,
    operands: Mapping[str, View],
    results: Mapping[str, View],
    tables: Mapping[str, View],
    gate: View | None,
) -> None:
    """Launch the forward on the queries of a problem, and the combining kernel where their keys are
    split. tables: of `_tables`. gate: that the combining kernel has, or None."""
    first, count = problem.first_query, problem.q_shape[1]
    q, out, lse = operands["q"], results["out"], results["lse"]
    if count < q.shape[1]:
        q, out = (one.narrow(1, first, count) for one in (q, out))
        q, lse = builder.operand(q), lse.narrow(2, first, count)
    written = out, lse
    if problem.num_splits > 1:
        written = split_results(problem, results[SPLITS])
    spec, optional = forward_spec(problem, gpu, problem.config), dict(tables)
    if spec.config.tiles.takes_columns:
        batch, keys, heads, _ = operands["v"].shape
        shape = batch * -(-keys // spec.config.block_kv), heads, HEAD_DIM, spec.config.block_kv // 2
        optional[COLUMNS] = builder.allocate(COLUMNS, shape, problem.dtype)
    tensors = CallTensors(
        q, operands["k"], operands["v"], *written, optional, results.get(ROW_MAXIMA)
    )
    builder.launch(spec, call_arguments(tensors, problem, gpu))
    if problem.num_splits > 1:
        add_combine(builder, problem, written, (out, lse), tables, gate)


def add_combine(
    builder: PlanBuilder,
    problem: Problem,
    parts: tuple[View, View],
    results: tuple[View, View],
    tables: Mapping[str, View],
    gate: View | None = None,
) -> None:
    """Fill results from those of splits, each (out, lse). tables: by name, the scheduler metadata
    among them. gate: of out, or None."""
    lists: tuple[View, ...] = ()
    if problem.lists_splits:
        lists = tuple(tables[n] for n in (SCHEDULER_METADATA, "cu_seqlens_q") if n in tables)
    spec = combine_spec(problem)
    scalars = call_scalars(spec.problem_class, problem, gpu_of(problem.device))
    builder.launch(spec, combine_call_arguments(parts, results, gate, lists, scalars))


# ---------------------------------------------------------------- memory


def result_views(
    builder: PlanBuilder, problems: Sequence[Problem], views: Mapping[str, View], has_batch: bool
) -> dict[str, View]:
    """Declare memory for the results of a divided forward, by name. Rows past seqused_q are not
    written: they are 0 with an LSE of -inf. Where keys are split, the combining kernel writes every
    row of the results, and reads no O of a split whose LSE is -inf."""
    last = problems[-1]
    is_split, is_clipped = last.num_splits > 1, "seqused_q" in last.ragged
    batch, heads, _ = last.lse_shape
    rows = sum(problem.q_shape[1] for problem in problems)
    out_shape, lse_shape = (batch, rows, *last.q_shape[2:]), (batch, heads, rows)
    of_out, of_lse = None, None
    if is_clipped and not is_split:
        of_out, of_lse = 0.0, -math.inf
    found = {
        "out": _out(builder, views, out_shape, last.dtype, of_out, has_batch),
        "lse": builder.result("lse", lse_shape, torch.float32, of_lse, has_batch, True),
    }
    if is_split:
        of_o, of_splits = map(math.prod, _split_shapes(last))
        size, fills = of_o + BETWEEN_SPLITS + of_splits, ()
        if is_clipped:
            nan = ((0, size, math.nan),) if builder.device.type == "cpu" else ()
            fills = (*nan, (size - of_splits, size, -math.inf))
        found[SPLITS] = builder.allocate(SPLITS, (size,), torch.float32, fills)
    if last.options.max_logits:
        # The kernel writes neither rows past the queries of a sequence nor splits without work.
        shape = _split_shapes(last)[1] if is_split else lse_shape
        fill = whole(shape, -math.inf)
        found[ROW_MAXIMA] = builder.allocate(ROW_MAXIMA, shape, torch.float32, fill)
    return found


def _out(
    builder: PlanBuilder,
    views: Mapping[str, View],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    fill: float | None,
    has_batch: bool,
) -> View:
    if "out" not in views:
        return builder.result("out", shape, dtype, fill, has_batch)
    if fill is None and builder.device.type == "cpu":
        fill = math.nan
    if fill is not None:
        value = fill
        builder.operate(f"fill with {value:g}", ("out",), lambda out: out.fill_(value))
    return builder.operand(views["out"])


def _split_shapes(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    (batch, *rows), (_, *lse_rows) = problem.q_shape, problem.lse_shape
    entries = batch * problem.num_splits
    if problem.lists_splits:
        _, heads, columns = rows
        entries, longest = problem.num_splits, problem.max_seqlen_q
        rows, lse_rows = [longest, heads, columns], [heads, longest]
    return (entries, *rows), (entries, *lse_rows)


def split_results(problem: Problem, both: Any) -> tuple[Any, Any]:
    """Return (out, lse) of the splits. both: what was allocated for them, a tensor or a view."""
    out_shape, lse_shape = _split_shapes(problem)
    size, of_lse = math.prod(out_shape), math.prod(lse_shape)
    out, lse = both.narrow(0, 0, size), both.narrow(0, size + BETWEEN_SPLITS, of_lse)
    return out.view(out_shape), lse.view(lse_shape)


# ---------------------------------------------------------------- what kernels read


def _tables(builder: PlanBuilder, problem: Problem, views: Mapping[str, View]) -> dict[str, View]:
    """Return what the kernel gets beside operands and results, by name."""
    found = {}
    for name in problem.tables:
        view = views[name]
        if name in problem.scales:
            view = builder.scale(view, problem.descale)
        elif name in BLOCK_SCALES:
            view = builder.operand(view).view(problem.dtype)
        elif name in problem.function_tensors:
            view = builder.dense(view)
        elif name == OUT_GATE:
            view = gate_operand(builder, view)
        elif view.ndim > 1:
            view = builder.table(view)
        found[name] = view
    if problem.sink:
        found["sink"] = _sink(builder, views["sink"])
    return found


def gate_operand(builder: PlanBuilder, gate: View) -> View:
    """The gate of the result as kernels read it; one of heads has a last stride of 1."""
    if gate.ndim == 4:
        return builder.operand(gate)
    has_stride = gate.shape[-1] > 1 and gate.strides[-1] != 1
    return builder.copied(gate) if has_stride else builder.table(gate)


def _sink(builder: PlanBuilder, sink: View) -> View:
    """Logits in float32, contiguous."""
    if sink.dtype == torch.float32:
        return builder.dense(sink)
    like = View.contiguous("sink in float32", sink.shape, torch.float32)
    builder.operate("float32", ("sink",), lambda sink: sink.detach().float().contiguous(), like)
    return like


def _finished(
    builder: PlanBuilder, problem: Problem, results: Mapping[str, View]
) -> tuple[View, ...]:
    found = results["out"], results["lse"]
    if not problem.options.max_logits:
        return found
    like = View.contiguous("max_logits", problem.q_shape[2:3], torch.float32)
    # Over (batch or splits, heads, queries).
    builder.operate("maximum of each head", (ROW_MAXIMA,), lambda rows: rows.amax((0, 2)), like)
    return *found, like


def _without_rows(
    builder: PlanBuilder, problem: Problem, views: Mapping[str, View], has_batch: bool
) -> tuple[View, ...]:
    """Return results without a launch: without sequences all rows are behind the last offset."""
    out = _out(builder, views, problem.q_shape, problem.dtype, 0.0, has_batch)
    lse = builder.result("lse", problem.lse_shape, torch.float32, -math.inf, has_batch, True)
    if not problem.options.max_logits:
        return out, lse
    heads = problem.q_shape[2:3]
    maxima = builder.allocate("max_logits", heads, torch.float32, whole(heads, -math.inf))
    return out, lse, maxima
