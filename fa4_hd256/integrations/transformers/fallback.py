"""Attention by PyTorch's own operations, for layers of another head_dim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ...kernels.limits import HEAD_DIM
from ..warnings_once import warn_once


class _Layer(NamedTuple):
    num_key_value_groups: int


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor | None,
    causal: bool,
    options: Mapping[str, Any],
) -> torch.Tensor:
    """Compute attention as transformers' SDPA does, with a softcap or a sink by single operations.

    query: (batch, heads, seqlen_q, dim); key, value: (batch, heads_kv, seqlen_k, dim), value of any
    dim. seen: bool, (1 or batch, 1 or heads, seqlen_q, seqlen_k), or None for all keys. causal:
    replaces `seen` where lengths are equal. options: those of the layer: scaling, softcap, s_aux,
    dropout, position_bias, a bias of (1 or batch, 1 or heads, seqlen_q, seqlen_k). The first call
    for each head_dim is logged.

    Returns (batch, seqlen_q, heads, dim of value). Raises NotImplementedError for dropout beside a
    softcap or a sink.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    by_sdpa = not options.get("softcap") and options.get("s_aux") is None
    dims = "/".join(map(str, dict.fromkeys((query.shape[-1], value.shape[-1]))))
    how = "scaled_dot_product_attention" if by_sdpa else "single operations (softcap or sink)"
    warn_once(f"layers of head_dim {dims} run in PyTorch's {how}; kernels here take {HEAD_DIM}")
    bias = options.get("position_bias")
    if causal and (bias is not None or not by_sdpa):
        lengths = query.shape[2], key.shape[2]
        seen = torch.ones(lengths, dtype=torch.bool, device=query.device).tril()[None, None]
    groups = query.shape[1] // key.shape[1]
    if not by_sdpa:
        if groups > 1:
            key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
        return _by_operations(query, key, value, seen, options).transpose(1, 2).contiguous()
    mask = seen
    if bias is not None:
        # In the mask: a release of transformers whose SDPA takes no bias would drop it in silence.
        lowest = torch.finfo(query.dtype).min
        mask = bias if seen is None else torch.where(seen, bias, lowest)
    layer: Any = _Layer(groups)
    out, _ = sdpa_attention_forward(
        layer,
        query,
        key,
        value,
        mask,
        dropout=options.get("dropout") or 0.0,
        scaling=options.get("scaling"),
        is_causal=causal,
    )
    return out


def _by_operations(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor | None,
    options: Mapping[str, Any],
) -> torch.Tensor:
    if options.get("dropout"):
        raise NotImplementedError(
            f"dropout is {options['dropout']} in a layer with a softcap or a sink; accepted: 0 "
            "(config.attention_dropout=0, or model.eval())"
        )
    scale, softcap, sink = (options.get(name) for name in ("scaling", "softcap", "s_aux"))
    logits = (query @ key.mT).float() * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if options.get("position_bias") is not None:
        logits = logits + options["position_bias"]
    if seen is not None:
        logits = logits.masked_fill(~seen, torch.finfo(logits.dtype).min)
    if sink is not None:
        logits = torch.cat(
            (logits, sink.float().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)), -1
        )
    weights = logits.softmax(-1)[..., : key.shape[2]]
    if seen is not None:
        # A query that sees no key has weights of 0.
        weights = weights * seen
    return weights.to(value.dtype) @ value
