"""Packed training steps: which kernels later ones make ready."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from fa4_hd256 import flash_attn_varlen_func
from fa4_hd256.kernels.limits import HEAD_DIM
from fa4_hd256.run.compile import counters

__all__ = ["MASKS", "Readied", "documents", "train"]

#: Tokens of a step, one of these, and the mean of its documents.
TOTALS, MEAN_TOKENS = (2048, 4000, 4096, 8192, 16000), 600
#: window_size of the two layers of a step, both causal: Gemma's kinds.
MASKS = ((None, None), (1023, 0))


class Readied(NamedTuple):
    """Kernels that became ready in a run of steps, and what it took. first: in the first step;
    later: in all others, which wait for each; compiled: how many of all were, and not loaded from a
    cache or a prebuilt directory; seconds: of the first step; step: of the others, the median."""

    first: int
    later: int
    compiled: int
    seconds: float
    step: float


def documents(steps: int, seed: int = 1) -> Iterator[list[int]]:
    """Yield the tokens of the documents of each step, exponentially distributed."""
    draw = random.Random(seed)
    for _ in range(steps):
        total, lengths = draw.choice(TOTALS), list[int]()
        while left := total - sum(lengths):
            lengths.append(min(left, max(1, int(draw.expovariate(1 / MEAN_TOKENS)))))
        yield lengths


def train(
    steps: int, heads: tuple[int, int], gradients: str, device: torch.device, seed: int = 1
) -> Readied:
    """Run forward and backward of both masks over so many steps. gradients: of which of q, k and v,
    "qkv" as in full training and with LoRA."""
    readied, seconds, compiled = list[int](), list[float](), counters["compiled"]
    for lengths in documents(steps, seed):
        before, begin = _readied(), time.perf_counter()
        _step(lengths, heads, gradients, device)
        torch.cuda.synchronize(device)
        readied.append(_readied() - before)
        seconds.append(time.perf_counter() - begin)
    others = sorted(seconds[1:])
    return Readied(
        readied[0], sum(readied[1:]), counters["compiled"] - compiled, seconds[0],
        others[len(others) // 2],
    )  # fmt: skip


def _readied() -> int:
    """Return how many kernels this process compiled, or loaded from a cache or a directory."""
    return sum(count for how, count in counters.items() if how != "memory")


def _step(lengths: list[int], heads: tuple[int, int], gradients: str, device: torch.device) -> None:
    offsets = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    for window in MASKS:
        q, k, v = (
            torch.randn(sum(lengths), count, HEAD_DIM, device=device, dtype=torch.bfloat16)
            for count in (heads[0], heads[1], heads[1])
        )
        for name, tensor in zip("qkv", (q, k, v), strict=True):
            tensor.requires_grad_(name in gradients)
        out = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=max(lengths),
            max_seqlen_k=max(lengths), causal=True, window_size=window,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        out.backward(torch.randn_like(out))
