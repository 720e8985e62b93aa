"""The backward: which kernels run for the gradients that are asked for, on what, in which order.

preprocess (`backward_preprocess`), then dQ and dK/dV, each only where its result is asked for; what
is left, sums over a few rows or parts, is PyTorch's. Nothing here waits for the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .backends import launch, num_clusters
from .backward_calling import (
    GradientTensors,
    PreprocessTensors,
    gradient_call_arguments,
    preprocess_call_arguments,
)
from .backward_config import BackwardConfig
from .backward_preprocess import PreprocessConfig
from .backward_problem import (
    BackwardProblem,
    check_gradients,
    choose_splits,
    count_key_tiles,
)
from .compile import compile_kernel
from .kernels import KernelSpec
from .problem import Options, Problem, as_kernel_operand, without_expanded_heads
from .sequences import padded_rows

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
        if k.shape[2] < self.k.shape[2]:
            # One head that was expanded: each of its copies has its own gradient, which is the
            # part of the query heads that read it.
            splits = self.k.shape[2]
        else:
            heads_kv = k.shape[2]
            splits = choose_splits(
                heads_kv * count_key_tiles(forward, k.shape),
                self.q.shape[2] // heads_kv,
                num_clusters(self.q.device),
            )
        return BackwardProblem(forward, tuple(k.shape), self.dlse is not None, splits)


def run_backward(
    call: BackwardCall, problem: BackwardProblem, wanted: Wanted, config: BackwardConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv, dsink), shaped and typed like q, k, v and sink; empty where not asked for."""
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
    tensors = GradientTensors((q, k, v, dout), stats, (), ragged)
    dq = call.q.new_empty(0)
    dk, dv = (tensor.new_empty(0) for tensor in (call.k, call.v))
    dsink = q.new_empty(0) if call.sink is None else call.sink.new_empty(0)
    if wanted.dq:
        dq = _run_dq(problem, tensors, config)
    if wanted.dkdv:
        dk, dv = _run_dkdv(problem, tensors, config, call.k.shape)
    if wanted.dsink:
        dsink = _sink_gradient(call.sink, stats)
    return dq, dk, dv, dsink


def kernel_specs(problem: BackwardProblem, config: BackwardConfig) -> dict[str, KernelSpec]:
    """The kernels of a call, by kind, in the order in which they run."""
    specs = (
        KernelSpec("backward_preprocess", PreprocessConfig(), problem.preprocess_class),
        KernelSpec("backward_dq", config, problem.dq_class),
        KernelSpec("backward_dkdv", config, problem.dkdv_class),
    )
    return {spec.kind: spec for spec in specs}


def run_preprocess(problem: BackwardProblem, tensors: PreprocessTensors) -> None:
    """Fill `tensors.stats`; see `backward_preprocess`. Rows between sequences stay as they are."""
    spec = kernel_specs(problem, BackwardConfig())["backward_preprocess"]
    launch(
        compile_kernel(spec),
        problem.forward.device,
        lambda clusters, stream: preprocess_call_arguments(tensors, problem, stream),
    )


def _run_dq(
    problem: BackwardProblem, tensors: GradientTensors, config: BackwardConfig
) -> torch.Tensor:
    """The gradient of q."""
    forward = problem.forward
    is_zero = problem.has_no_queries or problem.has_no_keys or "seqused_q" in forward.ragged
    dq = _result(forward, forward.q_shape, forward.dtype, is_zero)
    if not problem.has_no_queries and not problem.has_no_keys:
        spec = kernel_specs(problem, config)["backward_dq"]
        _launch(spec, problem, _with_results(tensors, dq))
    return dq


def _run_dkdv(
    problem: BackwardProblem,
    tensors: GradientTensors,
    config: BackwardConfig,
    shape: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of k and v, of the shape that the user's k and v have."""
    forward, splits = problem.forward, problem.splits
    batch, seqlen, heads, columns = problem.k_shape
    dtype = torch.float32 if problem.dkdv_class.partial else forward.dtype
    is_zero = problem.has_no_queries or "seqused_k" in forward.ragged
    dk, dv = (
        _result(forward, (batch, seqlen, heads * splits, columns), dtype, is_zero)
        for _ in range(2)
    )
    if not problem.has_no_queries and not problem.has_no_keys:
        spec = kernel_specs(problem, config)["backward_dkdv"]
        _launch(spec, problem, _with_results(tensors, dk, dv))
    if shape[2] == heads and splits > 1:
        dk, dv = (t.unflatten(2, (heads, splits)).sum(dim=3) for t in (dk, dv))
    return dk.to(forward.dtype), dv.to(forward.dtype)


def _launch(spec: KernelSpec, problem: BackwardProblem, tensors: GradientTensors) -> None:
    launch(
        compile_kernel(spec),
        problem.forward.device,
        lambda clusters, stream: gradient_call_arguments(tensors, problem, clusters, stream),
    )


def _with_results(tensors: GradientTensors, *results: torch.Tensor) -> GradientTensors:
    return GradientTensors(tensors.operands, tensors.stats, results, tensors.ragged)


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
