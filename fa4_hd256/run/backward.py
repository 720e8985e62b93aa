"""The backward: which kernels run for the gradients that are asked for, on what, in which order.

preprocess (`backward_preprocess`), then the architecture's kernels (`kernel_set.BackwardSet`) that
store dS and read it, one portion (`portions`) after the other; where dS of none would be small
enough, or only dQ, or only dK and dV are asked for, those without a stored dS; then, where the
query heads of a group are divided, the sum of the parts (`backward_sum`). What is left, over a few
rows or between portions, is PyTorch's. Nothing here waits for the device.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from ..call.backward_problem import BackwardCall, BackwardProblem
from ..call.checks import reads_contents
from ..call.forward_problem import Problem, is_masked
from ..call.function_tensors import function_operand
from ..call.layouts import without_expanded_heads
from ..call.named_configs import spelled
from ..call.operator_arguments import BackwardTensors
from ..call.portions import Division, divide, least_ds_bytes
from ..environment import DS_BYTES
from ..kernels.kernel_set import BackwardKernel
from ..kernels.sequences import padded_rows
from .backward_arguments import (
    GradientTensors,
    PreprocessTensors,
    begin_of,
    gradient_call_arguments,
    preprocess_call_arguments,
    sum_call_arguments,
)
from .catalogue import KernelSpec, backward_specs, preprocess_spec, sum_spec
from .compile import compile_kernel
from .launch import gpu_of, launch
from .new_tensors import maker
from .recording import (
    Allocate,
    Finish,
    Tensors,
    give_up,
    in_place,
    made_for,
    operand,
    row_values,
)
from .tail import finish_packed

__all__ = [
    "Wanted",
    "empty_stats",
    "or_empty",
    "run_backward",
    "run_preprocess",
]


#: Place of the sink among a call's tensors.
SINK = BackwardTensors._fields.index("sink")


#: What one kernel makes, and the sum of parts is of.
OF_KEYS = "dk", "dv"


#: Makes a tensor, at every call a new one.
Make = Callable[[], torch.Tensor]


class Wanted(NamedTuple):
    """Which gradients are asked for; one kernel makes those of k and v."""

    dq: bool = True
    dkdv: bool = True
    dsink: bool = False


def run_backward(
    call: BackwardCall, problem: BackwardProblem, wanted: Wanted, config: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv, dsink), shaped and typed like q, k, v and sink; empty where not asked for.

    config: of the architecture's backward.
    """
    if reads_contents(call.q.device) and call.q.device.type != "cpu":
        give_up()  # contents are read again at every call
    division, made, finish = _divided(call, problem, wanted, config)
    problem = division.problem
    ragged = tuple(call.ragged[name] for name in problem.forward.ragged)
    inputs = (call.q, *without_expanded_heads(call.k, call.v), call.dout)
    q, k, v, dout = map(operand, inputs)
    if problem.has_no_queries or problem.has_no_keys:
        give_up()
    if not problem.has_no_queries:
        rows = PreprocessTensors(
            operand(call.out),
            dout,
            row_values(call.lse),
            None if call.dlse is None else row_values(call.dlse),
            made["stats"],
            tuple(call.ragged[name] for name in problem.preprocess_class.ragged),
        )
        run_preprocess(problem, rows)
    if not problem.has_no_queries and not problem.has_no_keys:
        given = (call.ragged[name] for name in problem.forward.function_tensors)
        read = tuple(in_place(tensor, function_operand(tensor)) for tensor in given)
        operands, ds = (q, k, v, dout), made.get("ds")
        tensors = GradientTensors(operands, made["stats"], (), ragged, ds, read)
        results = {
            name: made[_role(problem, name)] for name in ("dq", *OF_KEYS) if name in made
        }
        _run_gradients(division, tensors, results, config)
        _finish_packed(problem, results, call.ragged)
        if problem.sums and OF_KEYS[0] in made:
            _run_sum(problem, results, made)
    return or_empty(finish(call_tensors(call), tuple(made.values())), call)


def or_empty(
    results: Sequence[torch.Tensor | None], call: BackwardCall | BackwardTensors
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v and the sink, empty tensors in place of None."""
    like = call.q, call.k, call.v, call.q if call.sink is None else call.sink
    dq, dk, dv, dsink = (
        tensor.new_empty(0) if gradient is None else gradient
        for tensor, gradient in zip(like, results, strict=True)
    )
    return dq, dk, dv, dsink


def _divided(
    call: BackwardCall, problem: BackwardProblem, wanted: Wanted, config: Any
) -> tuple[Division, dict[str, torch.Tensor], Finish]:
    """How a call is divided, what is allocated for it, and what is done at the end.

    Where dS does not fit into the GPU's memory half of it is tried, and so on, as far as the call
    goes with less.
    """
    asked = wanted
    if is_masked(problem.forward.ragged):
        # Kernels of one gradient alone read no lists.
        wanted = wanted._replace(dq=True, dkdv=True)
    bound = config.ds_bytes if wanted.dq and wanted.dkdv else 0
    while True:
        division = divide(problem, bound, gpu_of(call.q.device))
        allocate = _allocation(division, wanted)
        finish = partial(_finish, division.problem, asked, allocate.roles)
        try:
            return division, made_for(call_tensors(call), allocate, finish), finish
        except torch.OutOfMemoryError:
            taken = max(portion.problem.ds_bytes for portion in division.portions)
            if not division.problem.keeps_ds or taken // 2 < least_ds_bytes(problem):
                raise
        bound = taken // 2
        warnings.warn(
            f"the {taken >> 20} MiB of dS that this backward stores at a time are not to be had; "
            f"it tries {bound >> 20} MiB, which takes longer. {DS_BYTES.name} or backward_config="
            f"{spelled(type(config))}(ds_bytes=...) asks for less from the start",
            RuntimeWarning,
            stacklevel=2,
        )


def call_tensors(call: BackwardCall) -> BackwardTensors:
    """The tensors of a call in the order of the operator's arguments."""
    return BackwardTensors(
        call.dout, call.dlse, call.q, call.k, call.v, call.out, call.lse, call.sink, **call.ragged
    )


def _allocation(division: Division, wanted: Wanted) -> Allocate:
    """What makes all that a backward needs beside its arguments, results in parts among it."""
    problem = division.problem
    made = {"stats": _stats_maker(problem)}
    if wanted.dkdv:
        made |= dict.fromkeys(OF_KEYS, _dkdv_maker(problem))
        if problem.sums:
            made |= {_role(problem, name): _parts_maker(problem) for name in OF_KEYS}
    if wanted.dq:
        made["dq"] = _dq_maker(problem)
    if problem.keeps_ds:
        # Room for the largest portion; every portion has a view of its begin.
        made["ds"] = _room_maker(problem, [p.problem.ds_shape for p in division.portions])
    makers = tuple(made.values())
    return Allocate(tuple(made), lambda tensors: tuple([make() for make in makers]))


def _finish(
    problem: BackwardProblem,
    wanted: Wanted,
    roles: tuple[str, ...],
    tensors: Tensors,
    made: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor | None, ...]:
    """(dq, dk, dv, dsink) from what the kernels wrote; None for those not asked for."""
    found = dict(zip(roles, made))
    dk = dv = dsink = None
    if wanted.dkdv:
        dk, dv = (found[name].to(problem.forward.dtype) for name in OF_KEYS)
    sink = tensors[SINK]
    if wanted.dsink and sink is not None:
        dsink = _sink_gradient(sink, found["stats"])
    return found.get("dq") if wanted.dq else None, dk, dv, dsink


def run_preprocess(problem: BackwardProblem, tensors: PreprocessTensors) -> None:
    """Fill `tensors.stats`; see `backward_preprocess`. Rows between sequences stay as they are."""
    dlse = () if tensors.dlse is None else ("dlse",)
    launch(
        compile_kernel(preprocess_spec(problem)),
        problem.forward.device,
        lambda gpu, stream: preprocess_call_arguments(tensors, problem, stream),
        ("out", "dout", "lse", *dlse, "stats", *problem.preprocess_class.ragged),
    )


def _finish_packed(
    problem: BackwardProblem, results: dict[str, torch.Tensor], ragged: dict[str, torch.Tensor]
) -> None:
    """See `finish_packed`. results: gradients, or their parts, by the gradients' names."""
    packed = [
        (_role(problem, name), "q" if name == "dq" else "k", tensor)
        for name, tensor in results.items()
    ]
    lengths = problem.k_shape[1], problem.forward.max_seqlen_k, problem.listed_tiles
    finish_packed(problem.forward, packed, None, ragged, lengths)


def _run_sum(
    problem: BackwardProblem, parts: dict[str, torch.Tensor], made: dict[str, torch.Tensor]
) -> None:
    """Fill "dk" and "dv" of `made` from their parts."""
    given, results = (tuple(tensors[name] for name in OF_KEYS) for tensors in (parts, made))
    launch(
        compile_kernel(sum_spec(problem)),
        problem.forward.device,
        lambda gpu, stream: sum_call_arguments(given, results, stream),
        (*(_role(problem, name) for name in OF_KEYS), *OF_KEYS),
    )


def _role(problem: BackwardProblem, name: str) -> str:
    """Of what a kernel writes for a gradient: the gradient, or its parts."""
    return f"{name} in parts" if problem.sums and name in OF_KEYS else name


def _run_gradients(
    division: Division,
    tensors: GradientTensors,
    results: dict[str, torch.Tensor],
    config: Any,
) -> None:
    """Fill `results`, by name: "dq", "dk", "dv", those that are in it."""
    whole, portions = division.problem, division.portions
    specs = backward_specs(whole, config)
    if whole.adds:
        # What is added between launches is PyTorch's.
        give_up()
    shapes = [p.problem.dkdv_shape for p in portions]
    room = _room_maker(whole, shapes, torch.float32)
    parts = [room() for _ in range(_key_results(whole))]
    for portion in portions:
        of_portion = tensors.with_lists_of(portion)
        for kernel in _kernels(whole):
            made = kernel.results
            if set(made) <= set(results):
                given = tuple(results[result] for result in made)
                own = replace(of_portion, results=given).of(portion, made)
                _launch_adding((kernel, specs[kernel.name]), portion.problem, own, parts)


def _kernels(problem: BackwardProblem) -> tuple[BackwardKernel, ...]:
    """Those that make the gradients of a divided backward."""
    return problem.kernels.stored if problem.keeps_ds else problem.kernels.anew


def _key_results(problem: BackwardProblem) -> int:
    """How many of dK and dV one kernel makes at most; 0 where portions do not add to them."""
    return problem.adds * max(len(set(k.results) - {"dq"}) for k in _kernels(problem))


def _launch_adding(
    kernel: tuple[BackwardKernel, KernelSpec],
    problem: BackwardProblem,
    tensors: GradientTensors,
    rooms: list[torch.Tensor],
) -> None:
    """Launch a kernel of a portion. rooms: for the dK and dV of its own, which are added to those
    of `tensors.results`; without them it writes to these."""
    (row, spec), given, left = kernel, list(tensors.results), list(rooms)
    problem, sums = problem.of_kernel(row), []
    for index, name in enumerate(row.results):
        if name != "dq" and left:
            given[index] = begin_of(left.pop(), problem.dkdv_shape)
            sums.append((tensors.results[index], given[index]))
    roles = (
        "q", "k", "v", "dout", "stats", *(_role(problem, name) for name in row.results),
        *(("ds",) if problem.keeps_ds else ()),
        *problem.forward.ragged, *problem.forward.function_tensors,
    )  # fmt: skip
    read = tensors.of_functions if row.computes_scores else ()
    _launch(spec, problem, replace(tensors, results=tuple(given), of_functions=read), roles)
    for total, own in sums:
        total += _sum_by_head(own, total.shape[2])


def _room_maker(
    problem: BackwardProblem, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype | None = None
) -> Make:
    """One-dimensional, as large as the largest of the shapes; NaN on the CPU."""
    forward = problem.forward
    size = max(map(math.prod, shapes))
    return _maker(forward, (size,), dtype or forward.dtype, False)


def _dq_maker(problem: BackwardProblem) -> Make:
    """The gradient of q to write to."""
    forward = problem.forward
    is_zero = problem.has_no_queries or problem.has_no_keys or "seqused_q" in forward.ragged
    return _maker(forward, forward.q_shape, forward.dtype, is_zero)


def _dkdv_maker(problem: BackwardProblem) -> Make:
    """The gradient of k, or of v, to write to; in float32 where it is added to or rounded later."""
    forward = problem.forward
    is_exact = problem.dkdv_class.partial and not problem.sums
    dtype = torch.float32 if is_exact else forward.dtype
    is_zero = problem.has_no_queries or problem.adds or _leaves_keys(problem)
    is_zero = is_zero and not problem.sums  # which fill all of it
    batch, rows, heads, columns = problem.k_shape
    return _maker(forward, (batch, rows, heads * problem.copies, columns), dtype, is_zero)


def _parts_maker(problem: BackwardProblem) -> Make:
    """The parts of such a gradient to write to."""
    return _maker(problem.forward, problem.dkdv_shape, torch.float32, _leaves_keys(problem))


def _leaves_keys(problem: BackwardProblem) -> bool:
    """Whether there are keys of no sequence, whose gradients kernels leave as they are."""
    return "seqused_k" in problem.forward.ragged


def _sum_by_head(parts: torch.Tensor, heads: int) -> torch.Tensor:
    """(batch, rows, heads, 256) from as many parts for each head."""
    return parts.unflatten(2, (heads, -1)).sum(dim=3)


def _launch(
    spec: KernelSpec, problem: BackwardProblem, tensors: GradientTensors, roles: Sequence[str]
) -> None:
    launch(
        compile_kernel(spec),
        problem.forward.device,
        lambda gpu, stream: gradient_call_arguments(tensors, problem, gpu, stream),
        roles,
    )


def _maker(
    forward: Problem, shape: tuple[int, ...], dtype: torch.dtype, is_zero: bool
) -> Make:
    """What makes a result to write to; NaN on the CPU, so that an element never written shows."""
    make = maker(shape, dtype, forward.device, is_zero)
    is_filled = forward.device.type == "cpu" and not is_zero
    return (lambda: make().fill_(math.nan)) if is_filled else make


def _sink_gradient(sink: torch.Tensor, stats: torch.Tensor) -> torch.Tensor:
    """-sum over the rows of P_sink * delta, P_sink = exp(sink - LSE) being the sink's share: all of
    the weight where its logit is +inf."""
    negative_lse, negative_delta = stats
    exponent = sink.detach().float()[:, None] * math.log2(math.e)
    share = torch.exp2(exponent + negative_lse).masked_fill(exponent == math.inf, 1.0)
    return (share * negative_delta).sum(dim=1).to(sink.dtype)


def empty_stats(problem: BackwardProblem) -> torch.Tensor:
    """Statistics to write to: (2, heads, padded rows) float32.

    Between packed sequences lie rows that no kernel writes; they are those of padding here, so that
    a sum over all rows is one over the rows that exist. NaN elsewhere on the CPU, so that an
    element never written shows.
    """
    return _stats_maker(problem)()


def _stats_maker(problem: BackwardProblem) -> Make:
    """`empty_stats` of a problem, for any number of calls."""
    forward = problem.forward
    _, seqlen, heads, _ = forward.q_shape
    packed = "cu_seqlens_q" in forward.ragged
    shape = (2, heads, padded_rows(seqlen, forward.sequences, packed))
    make = _maker(forward, shape, torch.float32, False)

    def padding() -> torch.Tensor:
        stats = make()
        stats[0].fill_(-math.inf)
        stats[1].zero_()
        return stats

    return padding if forward.ragged else make
