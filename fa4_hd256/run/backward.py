"""The plan of a backward: which kernels run for the gradients that are requested, in which order.

First comes the preprocess (`backward_preprocess`). Then the architecture's kernels
(`kernel_set.BackwardSet`) store dS and read it, one chunk (`chunks`) after the other. Kernels
without a stored dS run instead where no chunk would be small enough, or where only dQ, or only dK
and dV, are requested. Where the query heads of a group are divided, the parts are added last
(`backward_sum`). What is left, over a few rows or between chunks, is PyTorch's.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from .. import environment
from ..call import named_configs
from ..call.backward_problem import BackwardProblem
from ..call.chunks import BackwardDivision, Chunk, divide, least_ds_bytes
from ..call.forward_problem import is_masked
from ..call.functions.tensors import functions_of_keys
from ..call.memory import View, without_expanded_heads
from ..call.mxfp8_gradients import CODES, SCALES
from ..call.operator_arguments import BackwardTensors, BackwardValues
from ..call.options import Options
from ..call.packed_ds import check_begins
from ..call.tile_mask import blocks_of_queries, shape_of_queries
from ..gpus.devices import Gpu, gpu_of
from ..kernels.kernel_set import BackwardKernel
from ..kernels.problem_class import GATE_OF_ELEMENTS, OF_BLOCKS, OUT_GATE
from ..kernels.small.backward_preprocess import PreprocessRows
from .backward_arguments import (
    TABLE_RANK,
    GradientTensors,
    begin_of,
    gradient_call_arguments,
    padded_rows,
    preprocess_call_arguments,
    sum_call_arguments,
)
from .catalogue import KernelSpec, backward_specs, preprocess_spec, sum_spec
from .forward import gate_operand
from .plan import LaunchPlan, PlanBuilder, whole
from .tail import add_tail

#: What one kernel makes, and the sum of parts is of.
OF_KEYS = "dk", "dv"
#: Names of the rows' statistics, and of the dS of a chunk.
STATS, DS = "stats", "ds"
#: With a gate of the result: the gradient of O before it, and that of the gate.
DO, DGATE = "do", "dgate"


class Wanted(NamedTuple):
    dq: bool = True
    dkdv: bool = True
    dsink: bool = False
    dgate: bool = False


@dataclass(frozen=True)
class BackwardWork:
    """A described backward. tensors: 4-D. wanted: requested gradients."""

    tensors: BackwardTensors
    problem: BackwardProblem
    wanted: Wanted
    config: Any

    @property
    def computed(self) -> Wanted:
        """The gradients that kernels make: requested ones; under a block mask all, if any."""
        if is_masked(self.problem.forward.ragged):
            return self.wanted._replace(dq=True, dkdv=True)
        return self.wanted

    def divided(self, ds_bytes: int | None) -> BackwardDivision:
        """Return the chunks. ds_bytes: how many dS may take; None for those of the configuration,
        but 0, which stores no dS, where not all gradients of q, k and v are computed. Raises as
        `divide` does."""
        if ds_bytes is None:
            computed = self.computed
            ds_bytes = self.config.ds_bytes if computed.dq and computed.dkdv else 0
        return divide(self.problem, ds_bytes, gpu_of(self.problem.forward.device))

    def views(self) -> dict[str, View]:
        """The tensors that are given, by name; k and v as kernels may read them."""
        k, v = without_expanded_heads(self.tensors.k, self.tensors.v)
        given = {**self.tensors._asdict(), "k": k, "v": v}
        return {name: View.of(name, tensor) for name, tensor in given.items() if tensor is not None}


def work_of(tensors: BackwardTensors, values: BackwardValues) -> BackwardWork:
    """Describe a backward. Raises as `BackwardProblem.describe` does."""
    tensors = tensors.with_batches()
    others = tensors.others()
    own = values.options
    functions = functions_of_keys((own.score_mod, own.mask_mod), others, tensors.q)
    options = Options.of_operator(own, functions)
    problem = BackwardProblem.describe(tensors, options, own.max_seqlen_q, own.max_seqlen_k)
    problem = replace(problem, listed_tiles=own.listed_tiles)
    check_begins(problem, others)
    kind = problem.forward.kernels.config("backward")
    config = named_configs.decode(own.config, kind)
    if own.config == named_configs.DEFAULT:
        ds_bytes = environment.ds_bytes()
        config = config if ds_bytes is None else replace(config, ds_bytes=ds_bytes)
    return BackwardWork(tensors, problem, Wanted(*values.wanted), config)


def plan_call(given: Sequence[Any], values: BackwardValues) -> LaunchPlan:
    """Return the plan of a backward. Raises as `work_of` and `plan_backward` do."""
    tensors = BackwardTensors(*given)
    return plan_backward(work_of(tensors, values), tensors)


def or_empty(
    results: Sequence[torch.Tensor | None], tensors: BackwardTensors
) -> tuple[torch.Tensor, ...]:
    given = tensors.sink, tensors.out_gate
    optional = (tensors.q if one is None else one for one in given)
    like = tensors.q, tensors.k, tensors.v, *optional
    return tuple(
        tensor.new_empty(0) if gradient is None else gradient
        for tensor, gradient in zip(like, results, strict=True)
    )


def plan_backward(
    work: BackwardWork, tensors: BackwardTensors, ds_bytes: int | None = None
) -> LaunchPlan:
    """Return the plan of a backward, whose results are (dq, dk, dv, dsink, dgate), None for those
    not requested. tensors: those of the call; packed ones may lack the batch, which their gradients
    then lack, too. ds_bytes: as of `BackwardWork.divided`."""
    device = work.problem.forward.device
    builder = PlanBuilder.for_tensors(device, BackwardTensors._fields, tensors)
    division = work.divided(ds_bytes)
    views = work.views()
    has_batch = {name: getattr(tensors, name).ndim == views[name].ndim for name in "qkv"}
    gpu = gpu_of(device)
    made = add_division(builder, division, work.computed, has_batch, views, work.config, gpu)
    return builder.plan(*results_of(builder, work.wanted, made, views))


def add_division(
    builder: PlanBuilder,
    division: BackwardDivision,
    wanted: Wanted,
    has_batch: Mapping[str, bool],
    views: Mapping[str, View],
    config: Any,
    gpu: Gpu,
) -> dict[str, View]:
    """Add the launches of a divided backward; return what they write, by name. wanted: gradients
    that kernels make. has_batch: whether q, k and v, and so their gradients, have the batch of
    packed sequences. views: as of `BackwardWork.views`, in mxfp8 of `Mxfp8BackwardTensors`."""
    problem = division.problem
    made = memory_of(builder, division, wanted, has_batch)
    dout = builder.operand(views["dout"])
    if not problem.has_no_queries:
        add_preprocess(builder, problem, dout, views, made)
    if not problem.has_no_queries and not problem.has_no_keys:
        operands = _operands(builder, problem, views, made.get(DO, dout))
        add_gradients(builder, division, config, gpu, operands, views, made)
    return made


def _operands(
    builder: PlanBuilder, problem: BackwardProblem, views: Mapping[str, View], dout: View
) -> tuple[View, ...]:
    """Return `GradientTensors.operands` as kernels read them. dout: read so."""
    if not problem.is_mxfp8:
        return *(builder.operand(views[name]) for name in "qkv"), dout
    # Bytes in twos: CuTe DSL takes no tensor of single ones from PyTorch.
    codes = (builder.operand(views[name]).view(problem.forward.dtype) for name in CODES)
    return *codes, *(builder.scale(views[name], OF_BLOCKS) for name in SCALES)


def smaller_plan(
    given: Sequence[Any], values: BackwardValues, plan: LaunchPlan
) -> LaunchPlan | None:
    """Return the plan with half of the dS at a time, and say so; None where less does not go."""
    tensors = BackwardTensors(*given)
    work, ds = work_of(tensors, values), plan.allocation(DS)
    taken = 0 if ds is None else math.prod(ds.shape) * ds.dtype.itemsize
    if not taken or taken // 2 < least_ds_bytes(work.problem):
        return None
    bound = taken // 2
    warnings.warn(
        f"the {taken >> 20} MiB of dS that this backward stores at a time are not to be had; "
        f"it tries {bound >> 20} MiB, which takes longer. {environment.DS_BYTES.name} or "
        f"backward_config={named_configs.spelled(type(work.config))}(ds_bytes=...) requests less "
        "from the start",
        RuntimeWarning,
        stacklevel=2,
    )
    return plan_backward(work, tensors, bound)


# ---------------------------------------------------------------- memory


def memory_of(
    builder: PlanBuilder, division: BackwardDivision, wanted: Wanted, has_batch: Mapping[str, bool]
) -> dict[str, View]:
    """Allocate all that a backward needs beside arguments. has_batch: as users have q, k and v."""
    problem = division.problem
    forward = problem.forward
    made = {STATS: stats_view(builder, problem, wanted.dsink)}
    if forward.out_gate:
        made |= _of_gate(builder, problem, has_batch["q"])
    if wanted.dkdv:
        for name in OF_KEYS:
            made[name] = _dkdv(builder, problem, name, has_batch[name[1]])
        for name in OF_KEYS if problem.sums else ():
            own, shape = _written(problem, name), problem.dkdv_shape
            fills = whole(shape, 0.0) if _leaves_keys(problem) else ()
            made[own] = builder.allocate(own, shape, torch.float32, fills)
    if wanted.dq:
        is_zero = problem.has_no_queries or problem.has_no_keys or "seqused_q" in forward.ragged
        fill = 0.0 if is_zero else None
        made["dq"] = builder.result("dq", forward.q_shape, forward.dtype, fill, has_batch["q"])
    if problem.keeps_ds:
        # Room for the largest chunk; every chunk has a view of its begin.
        size = max(math.prod(chunk.problem.ds_shape) for chunk in division.chunks)
        made[DS] = builder.allocate(DS, (size,), forward.dtype)
    return made


def _dkdv(builder: PlanBuilder, problem: BackwardProblem, name: str, has_batch: bool) -> View:
    """The gradient of k, or of v; in float32 where it is added to or rounded later."""
    is_exact = problem.dkdv_class.partial and not problem.sums
    dtype = torch.float32 if is_exact else problem.forward.dtype
    is_zero = problem.has_no_queries or problem.adds or _leaves_keys(problem)
    is_zero = is_zero and not problem.sums  # which fill all of it
    batch, rows, heads, columns = problem.k_shape
    shape = batch, rows, heads * problem.copies, columns
    return builder.result(name, shape, dtype, 0.0 if is_zero else None, has_batch)


def _of_gate(builder: PlanBuilder, problem: BackwardProblem, has_batch: bool) -> dict[str, View]:
    """Allocate the gradient of O before the gate, and the gate's. Rows of no sequence have none."""
    forward = problem.forward
    shape = forward.q_shape if forward.out_gate == GATE_OF_ELEMENTS else forward.q_shape[:3]
    is_zero = forward.ragged or problem.has_no_queries
    fill = 0.0 if is_zero else None
    return {
        DO: builder.allocate(DO, forward.q_shape, forward.dtype),
        DGATE: builder.result(DGATE, shape, forward.dtype, fill, has_batch),
    }


def _leaves_keys(problem: BackwardProblem) -> bool:
    """Return True if there are keys of no sequence, whose gradients kernels leave as they are."""
    return "seqused_k" in problem.forward.ragged


def _written(problem: BackwardProblem, name: str) -> str:
    return f"{name} in parts" if problem.sums and name in OF_KEYS else name


def stats_view(builder: PlanBuilder, problem: BackwardProblem, are_summed: bool = False) -> View:
    """Statistics of the rows: (2, heads, padded rows) float32. Between ragged sequences lie rows
    that no kernel writes or reads. are_summed: whether a sum over all rows follows, for which they
    are those of padding."""
    forward = problem.forward
    _, seqlen, heads, _ = forward.q_shape
    packed = "cu_seqlens_q" in forward.ragged
    shape = (2, heads, padded_rows(seqlen, forward.sequences, packed))
    half = math.prod(shape) // 2
    is_filled = are_summed and forward.ragged
    fills = ((0, half, -math.inf), (half, 2 * half, 0.0)) if is_filled else ()
    return builder.allocate(STATS, shape, torch.float32, fills)


# ---------------------------------------------------------------- launches


def add_preprocess(
    builder: PlanBuilder,
    problem: BackwardProblem,
    dout: View,
    views: Mapping[str, View],
    made: Mapping[str, View],
) -> None:
    """Fill the statistics of the rows, and with a gate its gradient and that of O before it. dout:
    as kernels may read it. views, made: as of `add_gradients`."""
    gates: tuple[View, ...] = ()
    if problem.forward.out_gate:
        gates = gate_operand(builder, views[OUT_GATE]), made[DO], made[DGATE]
    rows = PreprocessRows(
        builder.operand(views["out"]),
        dout,
        builder.rows(views["lse"]),
        builder.rows(views["dlse"]) if "dlse" in views else None,
        *gates,
    )
    gpu = gpu_of(problem.forward.device)
    arguments = preprocess_call_arguments(rows, made[STATS], views, problem, gpu)
    builder.launch(preprocess_spec(problem), arguments)


def add_gradients(
    builder: PlanBuilder,
    division: BackwardDivision,
    config: Any,
    gpu: Gpu,
    operands: tuple[View, ...],
    views: Mapping[str, View],
    made: Mapping[str, View],
) -> None:
    """Fill the gradients. views: all tensors of the call. made: of `memory_of`."""
    whole = division.problem
    specs = backward_specs(whole, config)
    results = {name: made[_written(whole, name)] for name in ("dq", *OF_KEYS) if name in made}
    ragged = {name: views[name] for name in whole.forward.ragged}
    read = {name: builder.dense(views[name]) for name in whole.forward.function_tensors}
    given = GradientTensors(operands, made[STATS], (), {}, made.get(DS))
    scratch = _scratch(builder, division)
    for number, chunk in enumerate(division.chunks):
        lists = {name: _lists(builder, chunk, number, view) for name, view in ragged.items()}
        of_chunk = replace(given, optional=lists | read)
        for kernel in _kernels(whole):
            if set(kernel.results) <= set(results):
                written = tuple(results[name] for name in kernel.results)
                own = replace(of_chunk, results=written).of(chunk, kernel.results)
                spec = specs[kernel.name]
                _add_kernel(builder, kernel, spec, chunk.problem, gpu, own, scratch)
    packed = [("q" if name == "dq" else "k", view) for name, view in results.items()]
    lengths = whole.k_shape[1], whole.forward.max_seqlen_k, whole.listed_tiles
    add_tail(builder, whole.forward, packed, None, ragged, *lengths)
    if whole.sums and OF_KEYS[0] in made:
        parts, sums = (tuple(of[name] for name in OF_KEYS) for of in (results, made))
        builder.launch(sum_spec(whole), sum_call_arguments(parts, sums))
    builder.with_other_lengths(_of_other_lengths(whole, config, set(results)))


def _of_other_lengths(problem: BackwardProblem, config: Any, results: set[str]) -> list[KernelSpec]:
    """Return the kernels of dK and dV that other lengths take: groups divided, or not."""
    can_divide = problem.group > problem.copies and not problem.adds
    if "cu_seqlens_k" not in problem.forward.ragged or not can_divide or "dk" not in results:
        return []
    of_keys = [k.name for k in _kernels(problem) if {*OF_KEYS} & {*k.results} <= results]
    specs: list[KernelSpec] = []
    for parts in (problem.copies, problem.group):
        found = backward_specs(replace(problem, head_parts=parts), config)
        specs += [found[name] for name in (*of_keys, "sum") if name in found]
    return specs


def _kernels(problem: BackwardProblem) -> tuple[BackwardKernel, ...]:
    return problem.kernels.stored if problem.keeps_ds else problem.kernels.recomputed


def _scratch(builder: PlanBuilder, division: BackwardDivision) -> list[View]:
    """Allocate dK and dV of the largest chunk, where chunks are added to the call's."""
    whole = division.problem
    if not whole.adds:
        return []
    size = max(math.prod(chunk.problem.dkdv_shape) for chunk in division.chunks)
    count = max(len(set(kernel.results) - {"dq"}) for kernel in _kernels(whole))
    return [builder.allocate(f"of a chunk {i}", (size,), torch.float32) for i in range(count)]


def _lists(builder: PlanBuilder, chunk: Chunk, number: int, table: View) -> View:
    """Return a block mask's lists of a chunk; other ragged tensors as they are."""
    if table.ndim != TABLE_RANK:
        return table
    given = chunk.lists_in(table)
    if chunk.has_all_lists(given):
        return given
    keys, queries = len(chunk.keys), chunk.queries

    def listed(blocks: torch.Tensor) -> torch.Tensor:
        return blocks_of_queries(given.in_memory(blocks), keys, queries)

    name = f"{table.name} of chunk {number}"
    like = View.contiguous(name, shape_of_queries(given.shape, keys, queries), table.dtype)
    builder.operate("lists of some queries", (table.name,), listed, like)
    return like


def _add_kernel(
    builder: PlanBuilder,
    kernel: BackwardKernel,
    spec: KernelSpec,
    chunk_problem: BackwardProblem,
    gpu: Gpu,
    tensors: GradientTensors,
    scratch: list[View],
) -> None:
    """Launch a kernel of a chunk. scratch: memory for dK and dV of the chunk, which are then added
    to those of `tensors.results`; empty where the kernel writes to these itself."""
    written, unused = list(tensors.results), list(scratch)
    problem, sums = chunk_problem.of_kernel(kernel), []
    for index, name in enumerate(kernel.results):
        if name != "dq" and unused:
            written[index] = begin_of(unused.pop(), problem.dkdv_shape)
            sums.append((tensors.results[index], written[index]))
    own = replace(tensors, results=tuple(written))
    builder.launch(spec, gradient_call_arguments(own, problem, gpu))
    for total, part in sums:
        _add_sum(builder, total, part)


def _add_sum(builder: PlanBuilder, total: View, part: View) -> None:
    def add(totals: torch.Tensor, parts: torch.Tensor) -> None:
        own, heads = part.in_memory(parts), total.shape[2]
        total.in_memory(totals).add_(own.unflatten(2, (heads, -1)).sum(dim=3))

    builder.operate("add parts", (total.name, part.name), add)


def results_of(
    builder: PlanBuilder, wanted: Wanted, made: Mapping[str, View], views: Mapping[str, View]
) -> tuple[View | None, ...]:
    """Return the requested of (dq, dk, dv, dsink, dgate), typed like their tensors, else None."""
    dk = dv = dsink = None
    if wanted.dkdv:
        dk, dv = (_rounded(builder, made[name], views["dout"].dtype) for name in OF_KEYS)
    if wanted.dsink and "sink" in views:
        sink = views["sink"]
        dsink = View.contiguous("dsink", sink.shape, sink.dtype)
        builder.operate("gradient of the sink", ("sink", STATS), _sink_gradient, dsink)
    dgate = made.get(DGATE) if wanted.dgate else None
    return made.get("dq") if wanted.dq else None, dk, dv, dsink, dgate


def _rounded(builder: PlanBuilder, gradient: View, dtype: torch.dtype) -> View:
    if gradient.dtype == dtype:
        return gradient
    like = View.contiguous(f"{gradient.name} rounded", gradient.shape, dtype)
    builder.operate("round", (gradient.name,), lambda exact: exact.to(dtype), like)
    return like


def _sink_gradient(sink: torch.Tensor, stats: torch.Tensor) -> torch.Tensor:
    """-sum over the rows of P_sink * delta, P_sink = exp(sink - LSE) being the sink's share: all of
    the weight where its logit is +inf."""
    negative_lse, negative_delta = stats
    exponent = sink.detach().float()[:, None] * math.log2(math.e)
    share = torch.exp2(exponent + negative_lse).masked_fill(exponent == math.inf, 1.0)
    return (share * negative_delta).sum(dim=1).to(sink.dtype)
