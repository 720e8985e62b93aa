"""PyTorch's own context_parallel over our operator: what each rank of `ranks.Pool` runs.

It hands DTensors to SDPA, whose flash-attention operators have a handler for these: it exchanges
keys and calls the same operators with rows of one rank, for which the SDPA adapter is registered.
PyTorch registers that for CUDA tensors alone, and SDPA of CPU tensors takes another operator. So on
CPUs two things stand in: the adapter's functions are registered for CPU tensors, their look at the
device left out, and the operator is chosen here. The rest is PyTorch's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import _attention as experimental
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import attention as torch_attention
from torch.nn.attention import _fa4 as adapter

from fa4_hd256.check import reference
from fa4_hd256.integrations import sdpa

#: Rows of the whole sequence, and heads of q and of k and v.
ROWS, HEADS, HEADS_KV = 128, 2, 1

_OPERATORS = {
    "_scaled_dot_product_flash_attention": "_fa4_scaled_dot_product_flash_attention_forward_impl",
    "_scaled_dot_product_flash_attention_backward": (
        "_fa4_scaled_dot_product_flash_attention_backward_impl"
    ),
}


def inputs() -> list[torch.Tensor]:
    """q, k, v and the gradient of the result, (2, heads, ROWS, 256) bf16; the same in all ranks."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(2, heads, ROWS, 256, generator=generator).bfloat16()
        for heads in (HEADS, HEADS_KV, HEADS_KV, HEADS)
    ]


def run(
    rank: int, device: str, causal: bool, balanced: bool, rotation: str
) -> tuple[dict[str, np.ndarray], list[int]]:
    """out and gradients of the whole sequence, (batch, ROWS, heads, 256), and how many calls of our
    forward and of our backward this rank made.

    balanced: whether rows are divided head to tail. rotation: "allgather" or "alltoall", of
    PyTorch's set_rotate_method.
    """
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    buffers = [tensor.to(device) for tensor in inputs()]
    experimental.set_rotate_method(rotation)
    ours = [mock.Mock(wraps=function) for function in (sdpa._flash_attn_fwd, sdpa._flash_attn_bwd)]
    with (
        mock.patch.object(experimental._cp_options, "enable_load_balance", balanced),
        mock.patch.object(sdpa, "_flash_attn_fwd", ours[0]),
        mock.patch.object(sdpa, "_flash_attn_bwd", ours[1]),
        _active(device),
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4),
    ):
        q, k, v, dout = (buffer.clone() for buffer in buffers)
        leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
        out = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
        found = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
        whole = experimental.context_parallel_unshard(mesh, found, [2] * 4)
    rows = (tensor.transpose(1, 2).float().cpu().numpy() for tensor in whole)
    return dict(zip(("out", "q", "k", "v"), rows)), [function.call_count for function in ours]


def errors(found: dict[str, np.ndarray], causal: bool) -> dict[str, float]:
    """Return the error of each result, in units of what is accepted against the float64 reference:
    what a single call is granted, and a rounding for the second part that is summed."""
    q, k, v, dout = (tensor.transpose(1, 2) for tensor in inputs())
    one = {name: torch.from_numpy(rows).bfloat16() for name, rows in found.items()}
    lse = reference.attention(q, k, v, causal=causal)[1].float()
    compared = reference.compare(one.pop("out"), lse, (q, k, v), causal=causal)
    gradients = reference.compare_gradients(one, (q, k, v), dout, causal=causal)
    return {
        name: c.max_error / (c.tolerance + c.rounding)
        for name, c in {"out": compared, **gradients}.items()
    }


@contextlib.contextmanager
def _active(device: str) -> Iterator[None]:
    """Our implementation is the one of SDPA's flash-attention operators."""
    if device == "cpu":
        with _on_cpu(sdpa.__name__):
            yield
        return
    torch_attention.activate_flash_attention_impl(sdpa.register())
    try:
        with torch_attention.sdpa_kernel(torch_attention.SDPBackend.FLASH_ATTENTION):
            yield
    finally:
        torch_attention.restore_flash_attention_impl()


@contextlib.contextmanager
def _on_cpu(module: str) -> Iterator[None]:
    def scaled_dot_product_attention(
        query: Any, key: Any, value: Any, *, is_causal: bool, enable_gqa: bool
    ) -> Any:
        """Call what SDPA calls for CUDA tensors where flash attention is chosen."""
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, 0.0, is_causal)[0]

    with (
        torch.library._scoped_library("aten", "IMPL", "CPU") as library,
        mock.patch.object(adapter, "_FA4_MODULE_PATH", module),
        mock.patch.object(adapter, "_get_device_major", lambda device: 10),
        mock.patch.object(adapter, "_fa4_common_support_error", lambda *args, **kwargs: None),
        mock.patch.object(F, "scaled_dot_product_attention", scaled_dot_product_attention),
    ):
        for operator, function in _OPERATORS.items():
            library.impl(operator, getattr(adapter, function), "CPU")
        yield
