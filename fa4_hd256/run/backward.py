"""The backward: which kernels run for the gradients that are asked for, on what, in which order.

preprocess (`backward_preprocess`), then the architecture's kernels (`kernel_set.BackwardSet`) that
store dS and read it, one portion (`portions`) after the other; where dS of none would be small
enough, or only dQ, or only dK and dV are asked for, those without a stored dS. What is left, sums
over a few rows or parts, is PyTorch's. Nothing here waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from fa4_hd256.call.backward_problem import BackwardCall, BackwardProblem
from fa4_hd256.call.forward_problem import RAGGED, Problem
from fa4_hd256.call.layouts import without_expanded_heads
from fa4_hd256.call.portions import Division, divide
from fa4_hd256.kernels.kernel_set import BackwardKernel
from fa4_hd256.kernels.sequences import padded_rows

from .backward_arguments import (
    GradientTensors,
    PreprocessTensors,
    begin_of,
    gradient_call_arguments,
    preprocess_call_arguments,
)
from .catalogue import KernelSpec, backward_specs, preprocess_spec
from .compile import compile_kernel
from .launch import gpu_of, launch
from .recording import Tensors, give_up, made_for, operand, row_values

__all__ = [
    "Wanted",
    "empty_stats",
    "run_backward",
    "run_preprocess",
]


#: Places among a call's tensors, which are in the order of the operator's arguments.
Q, K, V, SINK = 2, 3, 4, 7


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
    ds_bytes = config.ds_bytes if wanted.dq and wanted.dkdv else 0
    division = divide(problem, ds_bytes, gpu_of(call.q.device))
    problem = division.problem
    finish = partial(_finish, problem, wanted)
    given = call_tensors(call)
    made = made_for(given, partial(_allocate, division, wanted), finish)
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
        tensors = GradientTensors((q, k, v, dout), made["stats"], (), ragged, made.get("ds"))
        results = {name: tensor for name, tensor in made.items() if name in ("dq", "dk", "dv")}
        _run_gradients(division, tensors, results, config)
    dq, dk, dv, dsink = finish(given, made)
    return dq, dk, dv, dsink


def call_tensors(call: BackwardCall) -> tuple[torch.Tensor | None, ...]:
    """The tensors of a call in the order of the operator's arguments."""
    ragged = (call.ragged.get(name) for name in RAGGED)
    return (
        call.dout, call.dlse, call.q, call.k, call.v, call.out, call.lse, call.sink, *ragged
    )  # fmt: skip


def _allocate(
    division: Division, wanted: Wanted, tensors: Tensors
) -> dict[str, torch.Tensor]:
    """What a backward makes beside its arguments, the results in parts among it."""
    problem = division.problem
    made = {"stats": empty_stats(problem)}
    if wanted.dkdv:
        made |= {name: _empty_dkdv(problem) for name in ("dk", "dv")}
    if wanted.dq:
        made["dq"] = _empty_dq(problem)
    if problem.keeps_ds:
        # Room for the largest portion; every portion has a view of its begin.
        made["ds"] = _room(problem, [p.problem.ds_shape for p in division.portions])
    return made


def _finish(
    problem: BackwardProblem, wanted: Wanted, tensors: Tensors, made: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv, dsink) from what the kernels wrote."""
    q, k, v = (cast(torch.Tensor, tensors[place]) for place in (Q, K, V))
    sink = tensors[SINK]
    dq = made["dq"] if wanted.dq else q.new_empty(0)
    if wanted.dkdv:
        dk, dv = (_sum_of_parts(problem, made[name]) for name in ("dk", "dv"))
    else:
        dk, dv = k.new_empty(0), v.new_empty(0)
    dsink = q.new_empty(0) if sink is None else sink.new_empty(0)
    if wanted.dsink and sink is not None:
        dsink = _sink_gradient(sink, made["stats"])
    return dq, dk, dv, dsink


def run_preprocess(problem: BackwardProblem, tensors: PreprocessTensors) -> None:
    """Fill `tensors.stats`; see `backward_preprocess`. Rows between sequences stay as they are."""
    dlse = () if tensors.dlse is None else ("dlse",)
    launch(
        compile_kernel(preprocess_spec(problem)),
        problem.forward.device,
        lambda gpu, stream: preprocess_call_arguments(tensors, problem, stream),
        ("out", "dout", "lse", *dlse, "stats", *problem.preprocess_class.ragged),
    )


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
    parts = [_room(whole, shapes, torch.float32) for _ in range(_key_results(whole))]
    for portion in portions:
        if not portion.keys:
            # Queries that see none: dQ is 0, and there is nothing to add to dK and dV.
            own = replace(tensors, results=(results["dq"],)).of(portion, ("dq",))
            own.results[0].zero_()
            give_up()
            continue
        for kernel in _kernels(whole):
            made = kernel.results
            if set(made) <= set(results):
                given = tuple(results[result] for result in made)
                own = replace(tensors, results=given).of(portion, made)
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
    sums = []
    for index, name in enumerate(row.results):
        if name != "dq" and left:
            given[index] = begin_of(left.pop(), problem.dkdv_shape)
            sums.append((tensors.results[index], given[index]))
    roles = (
        "q", "k", "v", "dout", "stats", *row.results, *(("ds",) if problem.keeps_ds else ()),
        *problem.forward.ragged,
    )  # fmt: skip
    _launch(spec, problem, replace(tensors, results=tuple(given)), roles)
    for total, own in sums:
        total += _sum_by_head(own, total.shape[2])


def _room(
    problem: BackwardProblem, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype | None = None
) -> torch.Tensor:
    """One-dimensional, as large as the largest of the shapes; NaN on the CPU."""
    forward = problem.forward
    size = max(map(math.prod, shapes))
    return _result(forward, (size,), dtype or forward.dtype, False)


def _empty_dq(problem: BackwardProblem) -> torch.Tensor:
    """The gradient of q to write to."""
    forward = problem.forward
    is_zero = problem.has_no_queries or problem.has_no_keys or "seqused_q" in forward.ragged
    return _result(forward, forward.q_shape, forward.dtype, is_zero)


def _empty_dkdv(problem: BackwardProblem) -> torch.Tensor:
    """The gradient of k, or of v, to write to, in parts, or to add to."""
    forward = problem.forward
    dtype = torch.float32 if problem.dkdv_class.partial else forward.dtype
    is_zero = problem.has_no_queries or problem.adds or "seqused_k" in forward.ragged
    shape = list(problem.dkdv_shape)
    if problem.adds:
        shape[2] = problem.k_shape[2] * problem.copies
    return _result(forward, tuple(shape), dtype, is_zero)


def _sum_of_parts(problem: BackwardProblem, parts: torch.Tensor) -> torch.Tensor:
    """The gradient of the user's k or v from what the kernel wrote."""
    if problem.head_parts > problem.copies and not problem.adds:
        parts = _sum_by_head(parts, problem.k_shape[2])
    return parts.to(problem.forward.dtype)


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


def _result(
    forward: Problem, shape: tuple[int, ...], dtype: torch.dtype, is_zero: bool
) -> torch.Tensor:
    """A result to write to; NaN on the CPU, so that an element never written shows."""
    if is_zero:
        return torch.zeros(shape, dtype=dtype, device=forward.device)
    result = torch.empty(shape, dtype=dtype, device=forward.device)
    return result.fill_(math.nan) if forward.device.type == "cpu" else result


def _sink_gradient(sink: torch.Tensor, stats: torch.Tensor) -> torch.Tensor:
    """-sum over the rows of P_sink * delta, P_sink = exp(sink - LSE) being the sink's share."""
    negative_lse, negative_delta = stats
    exponent = sink.detach().float()[:, None] * math.log2(math.e)
    share = torch.exp2(exponent + negative_lse)
    return (share * negative_delta).sum(dim=1).to(sink.dtype)


def empty_stats(problem: BackwardProblem) -> torch.Tensor:
    """Statistics to write to: (2, heads, padded rows) float32.

    Between packed sequences lie rows that no kernel writes; they are those of padding here, so that
    a sum over all rows is one over the rows that exist. NaN elsewhere on the CPU, so that an
    element never written shows.
    """
    forward = problem.forward
    _, seqlen, heads, _ = forward.q_shape
    packed = "cu_seqlens_q" in forward.ragged
    rows = padded_rows(seqlen, forward.sequences, packed)
    stats = torch.empty(2, heads, rows, dtype=torch.float32, device=forward.device)
    if forward.ragged:
        stats[0].fill_(-math.inf)
        stats[1].zero_()
    elif forward.device.type == "cpu":
        stats.fill_(math.nan)
    return stats
