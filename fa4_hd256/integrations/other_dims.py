"""Attention of layers with another head_dim, by PyTorch's own SDPA."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..compat.windows import seen_in_window
from ..kernels.limits import HEAD_DIM
from ..kernels.mask.windows import Window
from .warnings_once import warn_once

#: Kernels of SDPA without flash attention, from which the calls come.
_KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
#: Scores of a head whose LSE is computed at a time.
_SCORES = 1 << 24


def has_other_dim(*tensors: torch.Tensor) -> bool:
    return any(tensor.shape[-1] != HEAD_DIM for tensor in tensors)


def say_once(adapter: str, to: str, *tensors: torch.Tensor) -> None:
    """Log that layers of this kind take another attention, once for each kind."""
    dims = " and ".join(map(str, dict.fromkeys(tensor.shape[-1] for tensor in tensors)))
    warn_once(f"{adapter}: layers of head_dim {dims} take {to}; kernels here have {HEAD_DIM}")


def attend(
    tensors: Sequence[torch.Tensor], scale: float | None, window: Window, offsets: tuple[Any, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) as flash attention lays them out. tensors: q, k, v, (batch, rows, heads,
    head_dim), or with offsets (rows, heads, head_dim). offsets: cu_seqlens_q and cu_seqlens_k, or
    None. Reading them waits for the GPU."""
    outs, lses = [], []
    for q, k, v in _sequences(tensors, offsets):
        outs.append(_result(q, k, v, scale, window).transpose(1, 2))
        lses.append(_lse(q, k, scale, window))
    if offsets[0] is None:
        return outs[0], lses[0]
    return torch.cat([out[0] for out in outs]), torch.cat([lse[0] for lse in lses], dim=1)


def attend_alone(
    tensors: Sequence[torch.Tensor], scale: float | None, window: Window, offsets: tuple[Any, Any]
) -> torch.Tensor:
    outs = [_result(*of_one, scale, window) for of_one in _sequences(tensors, offsets)]
    if offsets[0] is None:
        return outs[0].transpose(1, 2)
    return torch.cat([out[0].transpose(0, 1) for out in outs])


def gradients(
    tensors: Sequence[torch.Tensor],
    dout: torch.Tensor,
    scale: float | None,
    window: Window,
    offsets: tuple[Any, Any],
) -> tuple[torch.Tensor, ...]:
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        return torch.autograd.grad(attend_alone(leaves, scale, window, offsets), leaves, dout)


def _sequences(
    tensors: Sequence[torch.Tensor], offsets: tuple[Any, Any]
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return q, k, v of each call of SDPA, heads first, packed sequences one by one."""
    if offsets[0] is None:
        q, k, v = (tensor.transpose(1, 2) for tensor in tensors)
        return [(q, k, v)]
    counts = [side.diff().tolist() for side in offsets]
    pieces = [
        tensor[: sum(counts[side])].split(counts[side]) for tensor, side in zip(tensors, (0, 1, 1))
    ]
    return [
        (q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None])
        for q, k, v in zip(*pieces)
    ]


def _result(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, window: Window
) -> torch.Tensor:
    causal = window == (None, 0) and q.shape[2] == k.shape[2]
    mask = None if causal or window == (None, None) else _mask(q, k, window, range(q.shape[2]))
    if not q.shape[2] or not k.shape[2]:
        return q.new_zeros((*q.shape[:3], v.shape[3])) + 0 * (q.sum() + k.sum() + v.sum())
    with sdpa_kernel(_KERNELS):
        out = torch.nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=causal,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    return out if mask is None else torch.where(mask.any(1)[:, None], out, 0)


def _mask(q: torch.Tensor, k: torch.Tensor, window: Window, rows: range) -> torch.Tensor:
    queries = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
    keys = torch.arange(k.shape[2], device=q.device)
    return seen_in_window(keys - queries - (k.shape[2] - q.shape[2]), window)


def _lse(q: torch.Tensor, k: torch.Tensor, scale: float | None, window: Window) -> torch.Tensor:
    """Return (batch, heads, rows) float32, some queries at a time."""
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1).float().transpose(2, 3)
    found, rows = [], max(1, _SCORES // max(1, k.shape[2] * q.shape[0] * q.shape[1]))
    for first in range(0, q.shape[2], rows):
        part = q[:, :, first : first + rows]
        scores = part.float() @ keys * scale
        if window != (None, None):
            hidden = ~_mask(q, k, window, range(first, first + part.shape[2]))
            scores = scores.masked_fill(hidden, -math.inf)
        found.append(scores.logsumexp(-1))
    return torch.cat(found, 2) if found else q.new_zeros(q.shape[:3], dtype=torch.float32)
