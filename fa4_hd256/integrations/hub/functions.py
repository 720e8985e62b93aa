"""The functions of the Hugging Face kernel, as transformers calls them.

transformers reads their signatures and drops every option that is not a named parameter. Options
that the operator lacks are therefore parameters here, and refused.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import interface, kv_cache
from ...call.options import NO_WINDOW, window_of
from ...kernels.mask.windows import Window
from ..other_dims import attend_alone, has_other_dim


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
) -> torch.Tensor:
    """Return attention as `fa4_hd256.flash_attn_func` does. Layers of another head_dim than 256
    take PyTorch's SDPA. Raises NotImplementedError for dropout, and at another head_dim for a
    softcap or a sink."""
    _refuse_dropout(dropout_p)
    options: dict[str, Any] = {"softcap": softcap, "learnable_sink": learnable_sink}
    if has_other_dim(q, k, v):
        _refuse_at_other_dims(q, options)
        window = window_of(window_size, causal)
        return attend_alone((q, k, v), softmax_scale, window, (None, None))
    out: Any = interface.flash_attn_func(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        deterministic=deterministic,
        **options,
    )
    return out


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor,
    max_seqlen_k: int | torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    page_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention of packed sequences as `fa4_hd256.flash_attn_varlen_func` does. Raises as
    `flash_attn_func` does, and NotImplementedError for pages at another head_dim."""
    _refuse_dropout(dropout_p)
    options: dict[str, Any] = {
        "softcap": softcap,
        "learnable_sink": learnable_sink,
        "page_table": page_table,
    }
    if has_other_dim(q, k, v):
        _refuse_at_other_dims(q, options)
        offsets = cu_seqlens_q, cu_seqlens_k
        window = window_of(window_size, causal)
        return attend_alone((q, k, v), softmax_scale, window, offsets)
    out: Any = interface.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        deterministic=deterministic,
        **options,
    )
    return out


#: `fa4_hd256.flash_attn_with_kvcache`: its parameters have the names that transformers looks for.
flash_attn_with_kvcache = kv_cache.flash_attn_with_kvcache


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p:
        raise NotImplementedError(
            f"dropout_p is {dropout_p}; accepted: 0. Set attention_dropout=0 in the model's config"
        )


def _refuse_at_other_dims(q: torch.Tensor, options: dict[str, Any]) -> None:
    refused = [name for name, value in options.items() if value is not None and value != 0.0]
    if refused:
        raise NotImplementedError(
            f"a layer of head_dim {q.shape[-1]} is given {' and '.join(refused)}; accepted at "
            "another head_dim than 256: calls without them. Choose attn_implementation='eager' for "
            "such layers"
        )
