"""Training of a small model of Gemma's shape, once for each implementation of attention.

Weights, batches and everything around the attention are the same, in float32, so that losses
differ by the attention alone. Sequences are made up: a random walk over a table of successors,
whose second half repeats the first, so that a model that attends far back does better.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend

from bench.peers import flash_attn_4
from fa4_hd256.kernels.limits import HEAD_DIM

from .settings import Shape

#: (q, k, v, window) -> out: (batch, seqlen, heads, 256), causal; window: keys to the left of a
#: query that it sees, None for all.
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "int | None"], torch.Tensor]

#: Losses of single steps jump; compared are means over so many.
SMOOTHED = 20
SUCCESSORS = 8
LEARNING_RATE, WARM_UP_STEPS, LARGEST_GRADIENT = 1e-3, 50, 1.0


class Layer(nn.Module):
    """Attention with normalised and rotated queries and keys, then a gated product."""

    def __init__(self, shape: Shape, window: int | None) -> None:
        super().__init__()
        self.shape, self.window = shape, window
        rows = (shape.heads + 2 * shape.heads_kv) * HEAD_DIM
        self.qkv = nn.Linear(shape.hidden, rows, bias=False)
        self.out = nn.Linear(shape.heads * HEAD_DIM, shape.hidden, bias=False)
        self.gate_up = nn.Linear(shape.hidden, 8 * shape.hidden, bias=False)
        self.down = nn.Linear(4 * shape.hidden, shape.hidden, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(shape.hidden) for _ in range(2))
        self.norm_q, self.norm_k = nn.RMSNorm(HEAD_DIM), nn.RMSNorm(HEAD_DIM)

    def forward(
        self, x: torch.Tensor, rotation: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """x: (batch, seqlen, hidden); rotation: (seqlen, 1, 128) complex."""
        counts = [self.shape.heads, self.shape.heads_kv, self.shape.heads_kv]
        found = self.qkv(self.norms[0](x)).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = found.split(counts, dim=2)
        q, k = (_rotated(norm(t), rotation) for norm, t in ((self.norm_q, q), (self.norm_k, k)))
        x = x + self.out(attention(q, k, v, self.window).flatten(2))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(functional.gelu(gate, approximate="tanh") * up)


def _rotated(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * rotation).flatten(-2)


class Model(nn.Module):
    """Tokens to scores of the next one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(
            Layer(shape, shape.window_of(layer)) for layer in range(shape.layers)
        )
        self.norm = nn.RMSNorm(shape.hidden)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Map tokens (batch, seqlen) to logits (batch, seqlen, vocabulary)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        frequencies = 1e4 ** (-torch.arange(0, HEAD_DIM, 2, device=tokens.device) / HEAD_DIM)
        angles = positions[:, None] * frequencies
        rotation = torch.polar(torch.ones_like(angles), angles)[:, None]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, rotation, attention)
        return self.norm(x) @ self.embedding.weight.t()


@functools.cache
def batch_of(step: int, shape: Shape) -> torch.Tensor:
    """Return (batch, seqlen + 1) tokens on the host, always the same for a step."""
    generator = torch.Generator().manual_seed(1)
    successors = torch.randint(
        shape.vocabulary, (shape.vocabulary, SUCCESSORS), generator=generator
    )
    generator.manual_seed(1000 + step)
    half = shape.seqlen // 2 + 1
    choices = torch.randint(SUCCESSORS, (half, shape.batch), generator=generator)
    walk = [torch.randint(shape.vocabulary, (shape.batch,), generator=generator)]
    for chosen in choices[1:]:
        walk.append(successors[walk[-1], chosen])
    first = torch.stack(walk, dim=1)
    return torch.cat([first, first], dim=1)[:, : shape.seqlen + 1]


def in_bf16(attention: Attention) -> Attention:
    """Return an attention of operands in bf16, with its result in float32."""

    def rounded(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        return attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), window).float()

    return rounded


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """Run this project's operator."""
    from fa4_hd256 import flash_attn_func

    out = flash_attn_func(q, k, v, causal=True, window_size=(window, None))
    assert isinstance(out, torch.Tensor)
    return out


def flash_attention_4(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Run the public flash-attn-4."""
    sides = (None, None) if window is None else (window, 0)
    return flash_attn_4.attention(q, k, v, causal=True, window_size=sides)


def sdpa_float32(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Run PyTorch's, in the type of the operands."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    mask = None if window is None else _seen(q.shape[2], window, q.device)
    out = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
    return out.transpose(1, 2)


class _Rounded(torch.autograd.Function):
    """Attention in float32 that rounds to bf16 what flash attention's kernels do: P, out (for the
    backward's row sums) and dS."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        q, k, v, mask = given
        scores = (q @ k.mT * HEAD_DIM**-0.5).masked_fill(~mask, -math.inf)
        lse = scores.logsumexp(-1, keepdim=True)
        out = _to_bf16((scores - lse).exp()) @ v
        ctx.save_for_backward(q, k, v, mask, _to_bf16(out), lse)
        return _to_bf16(out)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        (d_out,) = map(_to_bf16, given)
        q, k, v, mask, out, lse = ctx.saved_tensors
        scale = HEAD_DIM**-0.5
        p = ((q @ k.mT * scale).masked_fill(~mask, -math.inf) - lse).exp()
        d_scores = _to_bf16(p * (d_out @ v.mT - (d_out * out).sum(-1, keepdim=True)))
        d_q, d_k = d_scores @ k * scale, d_scores.mT @ q * scale
        return _to_bf16(d_q), _to_bf16(d_k), _to_bf16(_to_bf16(p).mT @ d_out), None


def _to_bf16(x: torch.Tensor) -> torch.Tensor:
    """Float32 of fewer bits."""
    return x.bfloat16().float()


def rounded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """Run PyTorch's GEMMs in float32, rounded where a kernel in bf16 rounds."""
    q, k, v = (_to_bf16(t).transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    mask = _seen(q.shape[2], window, q.device)
    return _Rounded.apply(q, k, v, mask).transpose(1, 2)


def _seen(rows: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return (query, key): keys at or before a query, at most `window` before it."""
    numbers = torch.arange(rows, device=device)
    behind = numbers[:, None] - numbers
    return behind >= 0 if window is None else (behind >= 0) & (behind <= window)


def back_ends(shape: Shape, device: torch.device) -> str:
    """Return what PyTorch chooses for SDPA bf16, without a window and with one, under the settings
    of `train`."""
    q = torch.zeros(
        (shape.batch, shape.heads, shape.seqlen, HEAD_DIM), dtype=torch.bfloat16, device=device,
        requires_grad=True,
    )  # fmt: skip
    mask = _seen(shape.seqlen, shape.window, device)
    with _reproducible():
        chosen = (
            torch._fused_sdp_choice(q, q, q, None, 0.0, True),
            torch._fused_sdp_choice(q, q, q, mask, 0.0, False),
        )
    return ", ".join(SDPBackend(number).name for number in chosen)


IMPLEMENTATIONS: dict[str, Attention] = {
    "SDPA float32": sdpa_float32,
    "ours": in_bf16(ours),
    flash_attn_4.PACKAGE: in_bf16(flash_attention_4),
    # What rounding operands costs, whoever computes.
    "SDPA bf16": in_bf16(sdpa_float32),
    "float32, rounded as kernels do": rounded,
}


@dataclass(frozen=True)
class Run:
    """losses: of each step, in nats a token; milliseconds: of a step, the median."""

    losses: list[float]
    milliseconds: float


def smoothed(losses: Sequence[float]) -> np.ndarray:
    """Means over the last `SMOOTHED` steps before each, fewer at the start."""
    sums = np.cumsum([0.0, *losses])
    ends = np.arange(1, len(losses) + 1)
    begins = np.maximum(ends - SMOOTHED, 0)
    return (sums[ends] - sums[begins]) / (ends - begins)


def train(
    attention: Attention, shape: Shape, steps: int, device: torch.device, seed: int = 0
) -> Run:
    """Train from the same weights, those of a seed, on the same batches."""
    with _reproducible():
        torch.manual_seed(seed)
        model = Model(shape).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, (0.9, 0.95))
        losses, seconds = [], []
        for step in range(steps):
            tokens = batch_of(step, shape).to(device)
            begin = time.perf_counter()
            share = min(1.0, (step + 1) / WARM_UP_STEPS)
            share *= 0.5 + 0.5 * math.cos(math.pi * step / steps)
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * share
            scores = model(tokens[:, :-1], attention)
            loss = functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
            optimizer.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - begin)
    return Run(losses, 1e3 * sorted(seconds)[len(seconds) // 2])


@contextlib.contextmanager
def _reproducible() -> Iterator[None]:
    """Around the attention everything has the same bits in each run; no products in TF32."""
    was = torch.are_deterministic_algorithms_enabled()
    precision = torch.get_float32_matmul_precision()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)
        torch.set_float32_matmul_precision(precision)
