"""The backward: which kernels run for the gradients that are asked for, on what, in which order."""

from __future__ import annotations

import math

import torch

from .backends import launch
from .backward_calling import PreprocessTensors, preprocess_call_arguments
from .backward_preprocess import PreprocessConfig
from .backward_problem import BackwardProblem
from .compile import compile_kernel
from .kernels import KernelSpec
from .sequences import padded_rows

__all__ = ["row_operand", "run_preprocess"]


def run_preprocess(problem: BackwardProblem, tensors: PreprocessTensors) -> None:
    """Fill `tensors.stats`; see `backward_preprocess`. Rows between sequences stay as they are."""
    spec = KernelSpec("backward_preprocess", PreprocessConfig(), problem.preprocess_class)
    launch(
        compile_kernel(spec),
        problem.forward.device,
        lambda clusters, stream: preprocess_call_arguments(tensors, problem, stream),
    )


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
