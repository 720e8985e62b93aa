"""A block of a Gemma-shaped model, whole or divided over the ranks of a group by PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fa4_hd256 import flash_attn_func
from fa4_hd256.kernels.limits import HEAD_DIM
from lab.measure.rank_processes import ONE_GPU

#: (q, k, v) -> out, causal: (batch, tokens, heads, 256).
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class BlockShape:
    """batch, tokens: of all ranks together."""

    hidden: int
    inner: int
    heads: int
    heads_kv: int
    batch: int
    tokens: int

    def __str__(self) -> str:
        return (
            f"{self.batch} x {self.tokens} tokens of {self.hidden}, inner {self.inner}, heads "
            f"{self.heads}/{self.heads_kv}"
        )


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Run this project's attention, in bf16."""
    q, k, v = (tensor.bfloat16() for tensor in (q, k, v))
    out = flash_attn_func(q, k, v, causal=True)
    assert isinstance(out, torch.Tensor)
    return out


class Block(nn.Module):
    """Attention with norms of q and k, and a gated feed-forward layer, each behind a norm and
    beside a residual."""

    def __init__(self, shape: BlockShape, attention: Attention = causal_attention) -> None:
        super().__init__()
        self.attention = attention
        hidden, inner = shape.hidden, shape.inner
        self.attention_norm, self.inner_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD_DIM), nn.RMSNorm(HEAD_DIM)
        self.q = nn.Linear(hidden, shape.heads * HEAD_DIM, bias=False)
        self.k = nn.Linear(hidden, shape.heads_kv * HEAD_DIM, bias=False)
        self.v = nn.Linear(hidden, shape.heads_kv * HEAD_DIM, bias=False)
        self.out = nn.Linear(shape.heads * HEAD_DIM, hidden, bias=False)
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (batch, tokens, hidden)."""
        normed = self.attention_norm(x)
        # This rank has so many heads.
        q, k, v = (
            linear(normed).unflatten(-1, (-1, HEAD_DIM)) for linear in (self.q, self.k, self.v)
        )
        attended = self.attention(self.q_norm(q), self.k_norm(k), v)
        x = x + self.out(attended.to(x.dtype).flatten(-2))
        normed = self.inner_norm(x)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


def _whole(block: Block, x: torch.Tensor, mesh: Any) -> tuple[nn.Module, torch.Tensor]:
    return block, x


def _tensor_parallel(block: Block, x: torch.Tensor, mesh: Any) -> tuple[nn.Module, torch.Tensor]:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan: dict[str, Any] = dict.fromkeys(("q", "k", "v", "gate", "up"), ColwiseParallel())
    plan |= dict.fromkeys(("out", "down"), RowwiseParallel())
    return parallelize_module(block, mesh, plan), x


def _fully_sharded(block: Block, x: torch.Tensor, mesh: Any) -> tuple[nn.Module, torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    if x.shape[0] % mesh.size():
        raise ValueError(
            f"{x.shape[0]} sequences over {mesh.size()} ranks; accepted under FSDP2: as many "
            "sequences for each rank"
        )
    fully_shard(block, mesh=mesh)
    return block, x.chunk(mesh.size())[mesh.get_local_rank()]


#: (block, its input, mesh) -> this rank's. Under tensor parallelism ranks have some heads and inner
#: columns, under FSDP2 sequences of their own and parts of each parameter.
DIVISIONS: dict[str, Callable[[Block, torch.Tensor, Any], tuple[nn.Module, torch.Tensor]]] = {
    ONE_GPU: _whole,
    "tensor parallel": _tensor_parallel,
    "FSDP2": _fully_sharded,
}
