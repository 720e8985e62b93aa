"""A small block of a Gemma-shaped model: its gradients, whole and divided over a group's ranks."""

from __future__ import annotations

import torch
from torch import nn

from lab.measure.parallel_block import DIVISIONS, Block, BlockShape

SHAPE = BlockShape(hidden=64, inner=96, heads=4, heads_kv=2, batch=2, tokens=100)


def block_and_input(device: str) -> tuple[Block, torch.Tensor]:
    """Return the block and its input, equal on every rank."""
    torch.manual_seed(7)
    return Block(SHAPE).to(device), torch.randn(SHAPE.batch, SHAPE.tokens, SHAPE.hidden).to(device)


def gradients(block: nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradient of each parameter, whole, wherever its parts are."""
    found = {}
    for name, parameter in block.named_parameters():
        gradient = parameter.grad
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        found[name] = whole.cpu()
    return found


def divided(rank: int, device: str, name: str, summed: bool = True) -> dict[str, torch.Tensor]:
    """Gradients of a block divided as one of `DIVISIONS`, of the mean over its sequences.  summed:
    whether under tensor parallelism the norms of q and k, which every rank has whole for its own
    heads, get the sum of the ranks' gradients."""
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    block, x = DIVISIONS[name](*block_and_input(device), mesh)
    (block(x).square().sum() / x.shape[0]).backward()
    if name == "tensor parallel" and summed:
        for norm in (block.q_norm, block.k_norm):
            dist.all_reduce(norm.weight.grad)
    return gradients(block)
