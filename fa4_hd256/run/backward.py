"""The backward: which kernels run for the gradients that are asked for, on what, in which order.

preprocess (`backward_preprocess`), then dK/dV, which stores dS, and dQ as a product of it, one
portion (`portions`) after the other; where dS of none would be small enough, or only one of the two
is asked for, dK/dV and dQ each on their own. What is left, sums over a few rows or parts, is
PyTorch's. Nothing here waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fa4_hd256.call.backward_problem import BackwardProblem, check_gradients
from fa4_hd256.call.forward_problem import (
    Options,
    Problem,
    as_kernel_operand,
    without_expanded_heads,
)
from fa4_hd256.call.portions import Division, divide
from fa4_hd256.kernels.backward_preprocess import PreprocessConfig
from fa4_hd256.kernels.blackwell.backward.config import BackwardConfig
from fa4_hd256.kernels.sequences import padded_rows

from .backward_arguments import (
    GradientTensors,
    PreprocessTensors,
    begin_of,
    gradient_call_arguments,
    preprocess_call_arguments,
)
from .catalogue import KernelSpec
from .compile import compile_kernel
from .launch import gpu_of, launch

__all__ = [
    "BackwardCall",
    "Wanted",
    "empty_stats",
    "kernel_specs",
    "row_operand",
    "run_backward",
    "run_preprocess",
]


class Wanted(NamedTuple):
    """Which gradients are asked for; one kernel makes those of k and v."""

    dq: bool = True
    dkdv: bool = True
    dsink: bool = False


@dataclass(frozen=True)
class BackwardCall:
    """The tensors of a backward call, as the user has them.

    q, out, dout: (batch, seqlen_q, heads_q, 256); k, v: (batch, seqlen_k, heads_kv, 256); lse,
    dlse: (batch, heads_q, seqlen_q) float32, dlse None for zero; sink: (heads_q,) or None; packed
    sequences have a batch of 1. ragged: those of `problem.RAGGED` that are given.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None
    sink: torch.Tensor | None
    ragged: dict[str, torch.Tensor]

    def describe(
        self, options: Options, max_seqlen_q: int | None, max_seqlen_k: int | None
    ) -> BackwardProblem:
        """Validate the call; raises as `Problem.describe` and `check_gradients` do."""
        k, v = without_expanded_heads(self.k, self.v)
        forward = Problem.describe(
            (self.q, k, v), options, self.sink, self.ragged, max_seqlen_q, max_seqlen_k
        )
        check_gradients(
            {"out": self.out, "dout": self.dout, "lse": self.lse, "dlse": self.dlse},
            self.q,
            forward.lse_shape,
        )
        # One head that was expanded: each of its copies has its own gradient, which is the part of
        # the query heads that read it.
        copies = self.k.shape[2] // k.shape[2]
        lse_gradient = self.dlse is not None
        problem = BackwardProblem(forward, tuple(k.shape), lse_gradient, copies, copies)
        head_parts = problem.head_parts_for(k.shape[2], forward.sequences, gpu_of(self.q.device))
        return replace(problem, head_parts=head_parts)


def run_backward(
    call: BackwardCall, problem: BackwardProblem, wanted: Wanted, config: BackwardConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv, dsink), shaped and typed like q, k, v and sink; empty where not asked for."""
    ds_bytes = config.ds_bytes if wanted.dq and wanted.dkdv else 0
    division = divide(problem, ds_bytes, gpu_of(call.q.device))
    problem = division.problem
    ragged = tuple(call.ragged[name] for name in problem.forward.ragged)
    q, k, v, dout = (
        as_kernel_operand(t)
        for t in (call.q, *without_expanded_heads(call.k, call.v), call.dout)
    )
    stats = empty_stats(problem)
    if not problem.has_no_queries:
        rows = PreprocessTensors(
            as_kernel_operand(call.out),
            dout,
            row_operand(call.lse),
            None if call.dlse is None else row_operand(call.dlse),
            stats,
            tuple(call.ragged[name] for name in problem.preprocess_class.ragged),
        )
        run_preprocess(problem, rows)
    results: dict[str, tuple[torch.Tensor, ...]] = {}
    if wanted.dkdv:
        results["dkdv"] = _empty_dkdv(problem)
    if wanted.dq:
        results["dq"] = (_empty_dq(problem),)
    if not problem.has_no_queries and not problem.has_no_keys:
        tensors = GradientTensors((q, k, v, dout), stats, (), ragged)
        _run_gradients(division, tensors, results, config)
    (dq,) = results.get("dq", (call.q.new_empty(0),))
    dk, dv = (t.new_empty(0) for t in (call.k, call.v))
    if wanted.dkdv:
        dk, dv = (_sum_of_parts(problem, t) for t in results["dkdv"])
    dsink = q.new_empty(0) if call.sink is None else call.sink.new_empty(0)
    if wanted.dsink and call.sink is not None:
        dsink = _sink_gradient(call.sink, stats)
    return dq, dk, dv, dsink


def kernel_specs(problem: BackwardProblem, config: BackwardConfig) -> dict[str, KernelSpec]:
    """The kernels of a problem by what they make: "preprocess", "dkdv", "dq"."""
    dq = "backward_dq_product" if problem.keeps_ds else "backward_dq"
    return {
        "preprocess": _preprocess_spec(problem),
        "dkdv": KernelSpec("backward_dkdv", config.of_kernel("backward_dkdv"), problem.dkdv_class),
        "dq": KernelSpec(dq, config.of_kernel(dq), problem.dq_class),
    }


def _preprocess_spec(problem: BackwardProblem) -> KernelSpec:
    return KernelSpec("backward_preprocess", PreprocessConfig(), problem.preprocess_class)


def run_preprocess(problem: BackwardProblem, tensors: PreprocessTensors) -> None:
    """Fill `tensors.stats`; see `backward_preprocess`. Rows between sequences stay as they are."""
    launch(
        compile_kernel(_preprocess_spec(problem)),
        problem.forward.device,
        lambda gpu, stream: preprocess_call_arguments(tensors, problem, stream),
    )


def _run_gradients(
    division: Division,
    tensors: GradientTensors,
    results: dict[str, tuple[torch.Tensor, ...]],
    config: BackwardConfig,
) -> None:
    """Fill `results`: of the kernels "dkdv" and "dq", in this order, those that are in it."""
    whole, portions = division.problem, division.portions
    specs = kernel_specs(whole, config)
    # Room for the largest portion; every portion has a view of its begin.
    ds = _room(whole, [p.problem.ds_shape for p in portions]) if whole.keeps_ds else None
    parts = tuple(
        _room(whole, [p.problem.dkdv_shape for p in portions], torch.float32)
        for _ in range(2 * whole.adds)
    )
    for portion in portions:
        for name, wanted in results.items():
            own = replace(tensors, results=wanted, ds=ds).of(portion)
            if not portion.keys:
                # Queries that see none: dQ is 0, and there is nothing to add to dK and dV.
                if name == "dq":
                    own.results[0].zero_()
            elif name == "dkdv" and whole.adds:
                _add_dkdv(specs[name], portion.problem, own, parts)
            else:
                _launch(specs[name], portion.problem, own)


def _add_dkdv(
    spec: KernelSpec,
    problem: BackwardProblem,
    tensors: GradientTensors,
    room: tuple[torch.Tensor, ...],
) -> None:
    """Add the dK and dV of a portion to `tensors.results`; room: for its own."""
    own = tuple(begin_of(tensor, problem.dkdv_shape) for tensor in room)
    _launch(spec, problem, replace(tensors, results=own))
    for total, parts in zip(tensors.results, own, strict=True):
        total += _sum_by_head(parts, total.shape[2])


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


def _empty_dkdv(problem: BackwardProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of k and v to write to, in parts, or to add to."""
    forward = problem.forward
    dtype = torch.float32 if problem.dkdv_class.partial else forward.dtype
    is_zero = problem.has_no_queries or problem.adds or "seqused_k" in forward.ragged
    shape = list(problem.dkdv_shape)
    if problem.adds:
        shape[2] = problem.k_shape[2] * problem.copies
    dk, dv = (_result(forward, tuple(shape), dtype, is_zero) for _ in range(2))
    return dk, dv


def _sum_of_parts(problem: BackwardProblem, parts: torch.Tensor) -> torch.Tensor:
    """The gradient of the user's k or v from what the kernel wrote."""
    if problem.head_parts > problem.copies and not problem.adds:
        parts = _sum_by_head(parts, problem.k_shape[2])
    return parts.to(problem.forward.dtype)


def _sum_by_head(parts: torch.Tensor, heads: int) -> torch.Tensor:
    """(batch, rows, heads, 256) from as many parts for each head."""
    return parts.unflatten(2, (heads, -1)).sum(dim=3)


def _launch(spec: KernelSpec, problem: BackwardProblem, tensors: GradientTensors) -> None:
    launch(
        compile_kernel(spec),
        problem.forward.device,
        lambda gpu, stream: gradient_call_arguments(tensors, problem, gpu, stream),
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


def row_operand(tensor: torch.Tensor) -> torch.Tensor:
    """One float per row as the kernel may read it: itself, or a copy where a stride is 0, which
    CuTe DSL 4.8 takes for a static one."""
    if 0 in tensor.stride():
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor
