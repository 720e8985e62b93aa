"""Attention by PyTorch's own operations, for layers of another head_dim."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch

from ...kernels.limits import HEAD_DIM

__all__ = ["Scores", "attend", "is_offered"]

_log = logging.getLogger("fa4_hd256")
_logged: set[str] = set()


class Scores(NamedTuple):
    """Options of a layer that change its scores and weights, as transformers names them.

    position_bias: added to the scores, (1 or batch, 1 or heads, seqlen_q, seqlen_k) or None.
    """

    scale: float | None
    softcap: float = 0.0
    sink: torch.Tensor | None = None
    dropout: float = 0.0
    position_bias: torch.Tensor | None = None


def is_offered(*tensors: torch.Tensor) -> bool:
    """Return True if the kernels take the head_dim of these tensors."""
    return all(tensor.shape[-1] == HEAD_DIM for tensor in tensors)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor | None,
    causal: bool,
    scores: Scores,
) -> torch.Tensor:
    """Compute attention by `scaled_dot_product_attention`, with a softcap or a sink by single
    operations.

    q: (batch, seqlen_q, heads, dim); k, v: (batch, seqlen_k, heads_kv, dim), v of any dim. seen:
    bool, (1 or batch, 1 or heads, seqlen_q, seqlen_k), or None for all keys. causal: replaces
    `seen` where lengths are equal. The first call for each head_dim is logged.

    Returns (batch, seqlen_q, heads, dim of v). Raises NotImplementedError for dropout beside a
    softcap or a sink.
    """
    by_sdpa = not scores.softcap and scores.sink is None
    dims = f"{q.shape[-1]}" if q.shape[-1] == v.shape[-1] else f"{q.shape[-1]}/{v.shape[-1]}"
    _log_once(dims, by_sdpa)
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (tensor.repeat_interleave(groups, 1) for tensor in (k, v))
    bias = scores.position_bias
    if by_sdpa and bias is None:
        found = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, dropout_p=scores.dropout, is_causal=causal, scale=scores.scale
        )
        return found.transpose(1, 2).contiguous()
    if causal:
        shape = q.shape[2], k.shape[2]
        seen = torch.ones(shape, dtype=torch.bool, device=q.device).tril()[None, None]
    if by_sdpa and bias is not None:
        lowest = torch.finfo(q.dtype).min
        mask = bias if seen is None else torch.where(seen, bias, lowest)
        found = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=scores.dropout, scale=scores.scale
        )
        return found.transpose(1, 2).contiguous()
    return _by_operations(q, k, v, seen, scores).transpose(1, 2).contiguous()


def _by_operations(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None, scores: Scores
) -> torch.Tensor:
    """Compute attention with all scores in memory.

    Tensors have heads before rows, and equal numbers of heads.
    """
    if scores.dropout:
        raise NotImplementedError(
            f"dropout is {scores.dropout} in a layer with a softcap or a sink; accepted: 0 "
            "(config.attention_dropout=0, or model.eval())"
        )
    scale = q.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    logits = (q @ k.mT).float() * scale
    if scores.softcap:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    if scores.position_bias is not None:
        logits = logits + scores.position_bias
    if seen is not None:
        logits = logits.masked_fill(~seen, torch.finfo(logits.dtype).min)
    if scores.sink is not None:
        sink = scores.sink.float().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        weights = torch.cat((logits, sink), -1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1)
    if seen is not None:
        # A query that sees no key has weights of 0.
        weights = weights * seen
    return weights.to(v.dtype) @ v


@torch.compiler.assume_constant_result
def _log_once(dims: str, by_sdpa: bool) -> bool:
    """Log once that PyTorch computes layers of this head_dim. torch.compile calls it while
    tracing."""
    how: Any = "scaled_dot_product_attention" if by_sdpa else "single operations (softcap or sink)"
    line = f"layers of head_dim {dims} run in PyTorch's {how}; kernels here take {HEAD_DIM}"
    if line not in _logged:
        _logged.add(line)
        _log.warning(line)
    return True
