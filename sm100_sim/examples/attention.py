"""Inputs, exact results and errors of full attention, for the scripts beside this one."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

SEQLEN, HEADS_Q, HEADS_K = 256, 2, 1


def inputs(head_dim: int) -> list[torch.Tensor]:
    """Return q, k, v and the gradient of out, (1, seqlen, heads, head_dim), bf16, on the host."""
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS_Q, HEADS_K, HEADS_K, HEADS_Q)
    return [torch.randn(1, SEQLEN, n, head_dim, generator=generator).bfloat16() for n in heads]


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention by PyTorch in the dtype of the inputs."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(HEADS_Q // HEADS_K, 1) for t in (k, v))
    weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1)
    return (weights @ v).transpose(1, 2)


def results(attention: Callable, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return out, dq, dk and dv, on the host."""
    *operands, gradient = tensors
    operands = [t.detach().requires_grad_() for t in operands]
    out = attention(*operands)
    out.backward(gradient)
    names = ("out", "dq", "dk", "dv")
    return dict(zip(names, (t.detach().cpu() for t in (out, *(t.grad for t in operands)))))


def compare(attention: Callable, head_dim: int) -> None:
    """Print the largest errors of an attention function of CUDA tensors with a backward."""
    tensors = inputs(head_dim)
    report(results(attention, [t.cuda() for t in tensors]), tensors)


def report(found: dict[str, torch.Tensor], tensors: list[torch.Tensor]) -> None:
    """Print the largest error of each result against float64, and PyTorch's in bf16."""
    exact, low = results(reference, [t.double() for t in tensors]), results(reference, tensors)
    for name, result in found.items():
        errors = [(some.double() - exact[name]).abs().max().item() for some in (result, low[name])]
        print(f"{name}: max error {errors[0]:.1e}, of PyTorch in bf16 {errors[1]:.1e}")
