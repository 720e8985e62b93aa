"""A block of a Gemma-shaped model, trained whole and divided over the ranks of a group."""

from __future__ import annotations

import torch
from torch import nn

from fa4_hd256 import flash_attn_func

HIDDEN, INNER, HEADS, HEADS_KV, HEAD_DIM = 64, 96, 4, 2, 256
BATCH, TOKENS = 2, 100


class Block(nn.Module):
    """Attention with norms of q and k, and a gated feed-forward layer, each behind a norm and
    beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.inner_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD_DIM), nn.RMSNorm(HEAD_DIM)
        self.q = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k = nn.Linear(HIDDEN, HEADS_KV * HEAD_DIM, bias=False)
        self.v = nn.Linear(HIDDEN, HEADS_KV * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.gate = nn.Linear(HIDDEN, INNER, bias=False)
        self.up = nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(x)
        # As many heads as this rank has.
        q, k, v = (
            linear(normed).unflatten(-1, (-1, HEAD_DIM)) for linear in (self.q, self.k, self.v)
        )
        attended = flash_attn_func(
            *(t.bfloat16() for t in (self.q_norm(q), self.k_norm(k), v)), causal=True
        )
        x = x + self.out(attended.to(x.dtype).flatten(-2))
        normed = self.inner_norm(x)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


def block_and_input(device: str) -> tuple[Block, torch.Tensor]:
    """The same on every rank."""
    torch.manual_seed(7)
    return Block().to(device), torch.randn(BATCH, TOKENS, HIDDEN).to(device)


def loss_of(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Mean over the sequences of x."""
    return block(x).square().sum() / x.shape[0]


def gradients(block: nn.Module) -> dict[str, torch.Tensor]:
    """Of each parameter, whole, wherever its parts are."""
    found = {}
    for name, parameter in block.named_parameters():
        gradient = parameter.grad
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        found[name] = whole.cpu()
    return found


def whole(rank: int, device: str) -> dict[str, torch.Tensor]:
    """Gradients of a block that is not divided."""
    del rank
    block, x = block_and_input(device)
    loss_of(block, x).backward()
    return gradients(block)


def tensor_parallel(rank: int, device: str, summed: bool = True) -> dict[str, torch.Tensor]:
    """Of one whose heads and inner columns are divided.  summed: whether the norms of q and k,
    which every rank has whole for its own heads, get the sum of the ranks' gradients."""
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    del rank
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    block, x = block_and_input(device)
    columns = dict.fromkeys(("q", "k", "v", "gate", "up"), ColwiseParallel())
    rows = dict.fromkeys(("out", "down"), RowwiseParallel())
    block = parallelize_module(block, mesh, columns | rows)
    loss_of(block, x).backward()
    if summed:
        for norm in (block.q_norm, block.k_norm):
            dist.all_reduce(norm.weight.grad)
    return gradients(block)


def fully_sharded(rank: int, device: str) -> dict[str, torch.Tensor]:
    """Of one whose parameters are divided (FSDP2), each rank with sequences of its own."""
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ranks = dist.get_world_size()
    mesh = init_device_mesh(device, (ranks,))
    block, x = block_and_input(device)
    block = fully_shard(block, mesh=mesh)
    loss_of(block, x.chunk(ranks)[rank]).backward()
    return gradients(block)
