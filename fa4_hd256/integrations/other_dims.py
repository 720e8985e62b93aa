"""Attention of layers with another head_dim, by PyTorch's own SDPA."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..kernels.limits import HEAD_DIM

__all__ = ["attend", "attend_alone", "gradients", "has_other_dim", "say_once"]

_log = logging.getLogger("fa4_hd256")
_said: set[tuple[Any, ...]] = set()

#: Kernels of SDPA; its flash attention is what calls come from.
_KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
#: Scores of a head whose LSE is computed at a time.
_SCORES = 1 << 24


def has_other_dim(*tensors: torch.Tensor) -> bool:
    """Return True if the kernels here do not serve the head_dim of one of these."""
    return any(tensor.shape[-1] != HEAD_DIM for tensor in tensors)


def say_once(adapter: str, to: str, *tensors: torch.Tensor) -> None:
    """Log that layers of this kind take another attention, once for each kind."""
    kind = adapter, *(tensor.shape[-1] for tensor in tensors)
    if kind not in _said and not torch.compiler.is_compiling():
        _said.add(kind)
        dims = " and ".join(map(str, dict.fromkeys(kind[1:])))
        _log.warning("%s: layers of head_dim %s take %s; kernels here have 256", adapter, dims, to)


def attend(
    tensors: Sequence[torch.Tensor],
    scale: float | None,
    window: tuple[Any, Any],
    offsets: tuple[Any, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) as flash attention lays them out.

    tensors: q, k, v, (batch, rows, heads, head_dim), or with offsets (rows, heads, head_dim).
    window: None for unbounded sides. offsets: cu_seqlens_q and cu_seqlens_k, or None; a GPU is
    waited for to read them.
    """
    parts = [_attend(q, k, v, scale, window) for q, k, v in _sequences(tensors, offsets)]
    if offsets[0] is None:
        (found,) = parts
        return found
    outs, lses = zip(*parts)
    return torch.cat([out[0] for out in outs]), torch.cat([lse[0] for lse in lses], dim=1)


def attend_alone(
    tensors: Sequence[torch.Tensor],
    scale: float | None,
    window: tuple[Any, Any],
    offsets: tuple[Any, Any],
) -> torch.Tensor:
    """Return out, differentiable by PyTorch's autograd; arguments as of `attend`."""
    outs = [
        _result(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale, window)
        for q, k, v in _sequences(tensors, offsets)
    ]
    if offsets[0] is None:
        return outs[0].transpose(1, 2)
    return torch.cat([one[0].transpose(0, 1) for one in outs])


def gradients(
    tensors: Sequence[torch.Tensor],
    dout: torch.Tensor,
    scale: float | None,
    window: tuple[Any, Any],
    offsets: tuple[Any, Any],
) -> tuple[torch.Tensor, ...]:
    """Return (dq, dk, dv), for which the forward is computed again; arguments as of `attend`."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        out = attend_alone(leaves, scale, window, offsets)
        return torch.autograd.grad(out, leaves, dout)


def _sequences(
    tensors: Sequence[torch.Tensor], offsets: tuple[Any, Any]
) -> list[tuple[torch.Tensor, ...]]:
    """Return q, k, v of each call of SDPA: of each packed sequence, with a batch of 1."""
    if offsets[0] is None:
        return [tuple(tensors)]
    lengths = [given.diff().tolist() for given in offsets]
    totals = [sum(of_side) for of_side in lengths]
    q, k, v = (
        tensor[:total].split(of_side)
        for tensor, total, of_side in zip(
            tensors, (totals[0], totals[1], totals[1]), (lengths[0], lengths[1], lengths[1])
        )
    )
    return [tuple(t[None] for t in part) for part in zip(q, k, v)]


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, window: tuple[Any, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    out = _result(q, k, v, scale, window)
    return out.transpose(1, 2), _lse(q, k, scale, window)


def _result(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, window: tuple[Any, Any]
) -> torch.Tensor:
    """Return out, heads first like the arguments. Queries that see no key get 0."""
    causal = window == (None, 0) and q.shape[2] == k.shape[2]
    mask = None if causal or window == (None, None) else _mask(q, k, window)
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


def _mask(
    q: torch.Tensor, k: torch.Tensor, window: tuple[Any, Any], chosen: range | None = None
) -> torch.Tensor:
    """Return the keys that the chosen queries see, bool."""
    chosen = chosen or range(q.shape[2])
    queries = torch.arange(chosen.start, chosen.stop, device=q.device)
    ahead = torch.arange(k.shape[2], device=q.device) - queries[:, None]
    ahead = ahead - (k.shape[2] - q.shape[2])
    left, right = window
    seen = torch.ones_like(ahead, dtype=torch.bool)
    seen = seen if left is None else seen & (ahead >= -left)
    return seen if right is None else seen & (ahead <= right)


def _lse(
    q: torch.Tensor, k: torch.Tensor, scale: float | None, window: tuple[Any, Any]
) -> torch.Tensor:
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
