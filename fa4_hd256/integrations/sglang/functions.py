"""The functions that SGLang's flash-attention backend calls.

The call sites are those of `sglang.srt.layers.attention.flashattention_backend` in SGLang 0.5.23.
Its embeddings without a cache call an attribute of the backend's object instead. SGLang writes its
cache itself, before the call.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ... import interface, kv_cache
from ...compat.arguments import Library, honoured, neutral, refused
from ...compat.flash_attn_3 import without_unread
from ..engines import METADATA, our_options
from ..given_results import written_to

_HONOURED = (
    "softmax_scale", "causal", "window_size", "softcap", "num_splits", "q_descale", "k_descale",
    "v_descale", METADATA,
)  # fmt: skip
_MLA = "The second part of a query (MLA) is not offered"
_CODE = refused("Changes of scores or masks given as code are not offered")
_BIAS = refused("A bias of relative positions is not offered")
_MX = refused("Block-scaled float8 is not offered")

OPTIONS = Library(
    "SGLang",
    "sglang.srt.layers.attention.flashattention_backend",
    {
        **dict.fromkeys(_HONOURED, honoured()),
        "sinks": honoured(ours="learnable_sink"),
        "ver": neutral("chooses among SGLang's own kernels"),
        "pack_gqa": neutral("a choice of another kernel's tiles"),
        "qv": refused(_MLA),
        "only_qv": refused(_MLA, False),
        "attention_chunk": refused("Attention in chunks is not offered", 0, None),
        "sm_margin": refused("No call reserves SMs; FA4_HD256_RESERVED_SMS does for a process", 0),
        "score_mod": _CODE,
        "mask_mod": _CODE,
        "aux_tensors": _CODE,
        "rel_bias": _BIAS,
        "rel_bias_prep_cache": _BIAS,
        "sfq": _MX,
        "sfk": _MX,
        "sfv": _MX,
    },
)

#: Options of `flash_attn_with_kvcache` beside `OPTIONS`, under the same names there.
CACHE_OPTIONS = (
    "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad",
    "page_table", "cu_seqlens_q", "cu_seqlens_k_new", "max_seqlen_q", "max_seqlen_k",
    "rotary_seqlens", "rotary_interleaved",
)  # fmt: skip


def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, **options: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute attention over pages of SGLang's cache.

    q: (total_q, heads, 256) with cu_seqlens_q and max_seqlen_q. k_cache, v_cache: (pages,
    page_size, heads_kv, 256) with page_table and cache_seqlens. options: out (written to, like q),
    return_softmax_lse, those of `CACHE_OPTIONS` and of `OPTIONS`.

    Returns out, or (out, lse), lse (heads, total_q) float32. Raises NotImplementedError for an
    option that requests what is not offered, TypeError for an unknown one, else as
    `fa4_hd256.flash_attn_with_kvcache` does.
    """
    out, wants_lse = options.pop("out", None), options.pop("return_softmax_lse", False)
    lengths = {name: options.pop(name) for name in CACHE_OPTIONS if name in options}
    without_unread(lengths, lengths.get("k") is lengths.get("v") is None)
    ours = our_options(OPTIONS, "flash_attn_with_kvcache", options, q, k_cache)
    attend = partial(kv_cache.flash_attn_with_kvcache, q, k_cache, v_cache, **lengths, **ours)
    return written_to(out, q, attend, wants_lse)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute attention over packed keys.

    q: (total_q, heads, 256); k, v: (total_k, heads_kv, 256). options: seqused_q, seqused_k,
    page_table, out (written to, like q), return_softmax_lse, and those of `OPTIONS`.

    Returns out, or (out, lse), lse (heads, total_q) float32. Raises as `flash_attn_with_kvcache`.
    """
    out, wants_lse = options.pop("out", None), options.pop("return_softmax_lse", False)
    others = ("seqused_q", "seqused_k", "page_table")
    lengths = {name: options.pop(name) for name in others if name in options}
    ours = our_options(OPTIONS, "flash_attn_varlen_func", options, q, k)
    if METADATA not in ours:
        # SGLang's own default is one KV split.
        ours.setdefault("num_splits", 1)
    attend = partial(
        interface.flash_attn_varlen_func,
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        **lengths,
        **ours,
    )
    return written_to(out, q, attend, wants_lse)
