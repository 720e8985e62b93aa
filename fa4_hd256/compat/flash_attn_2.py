"""The public functions of flash-attention 2 (`flash_attn`), on this operator."""

from __future__ import annotations

from typing import Any

import torch

from .. import interface, kv_cache
from ..score_mods import alibi
from .arguments import FLASH_ATTN_2, other_head_dim
from .windows import window_of

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Window = tuple[int, int]
Result = torch.Tensor | tuple[torch.Tensor, ...]


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with q, k and v in one tensor, qkv: (batch, seqlen, 3, heads, 256)."""
    given = dict(locals())
    head_dim = other_head_dim(qkv)
    if head_dim is not None:
        return FLASH_ATTN_2.original("flash_attn_qkvpacked_func", head_dim)(**given)
    del given["qkv"]
    q, k, v = qkv.unbind(dim=-3)
    return flash_attn_func(q, k, v, **given)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with k and v in one tensor, kv: (batch, seqlen_k, 2, heads_kv, 256)."""
    given = dict(locals())
    head_dim = other_head_dim(q, kv)
    if head_dim is not None:
        return FLASH_ATTN_2.original("flash_attn_kvpacked_func", head_dim)(**given)
    del given["q"], given["kv"]
    k, v = kv.unbind(dim=-3)
    return flash_attn_func(q, k, v, **given)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention with the arguments and the result of flash-attention 2's function of this name.

    `fa4_hd256.compat.arguments` lists what becomes of each argument. Another head_dim than 256
    goes to flash-attention 2 itself.

    Returns out, or (out, lse, S) with return_attn_probs, S an empty tensor. Raises
    NotImplementedError for arguments that are not offered, ValueError for another head_dim without
    flash-attention 2, else as `fa4_hd256.flash_attn_func` does.
    """
    given = dict(locals())
    head_dim = other_head_dim(q, k, v)
    if head_dim is not None:
        return FLASH_ATTN_2.original("flash_attn_func", head_dim)(**given)
    FLASH_ATTN_2.refuse("flash_attn_func", given)
    found = interface.flash_attn_func(q, k, v, return_lse=return_attn_probs, **_options(given))
    return (*found, q.new_empty(0)) if return_attn_probs else found


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` with q, k and v in one tensor, qkv: (total, 3, heads, 256)."""
    given = dict(locals())
    head_dim = other_head_dim(qkv)
    if head_dim is not None:
        return FLASH_ATTN_2.original("flash_attn_varlen_qkvpacked_func", head_dim)(**given)
    del given["qkv"], given["cu_seqlens"], given["max_seqlen"]
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    q, k, v = qkv.unbind(dim=-3)
    return flash_attn_varlen_func(q, k, v, *lengths, **given)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` with k and v in one tensor, kv: (total_k, 2, heads_kv, 256)."""
    given = dict(locals())
    head_dim = other_head_dim(q, kv)
    if head_dim is not None:
        return FLASH_ATTN_2.original("flash_attn_varlen_kvpacked_func", head_dim)(**given)
    del given["q"], given["kv"]
    k, v = kv.unbind(dim=-3)
    return flash_attn_varlen_func(q, k, v, **given)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Result:
    """`flash_attn_func` for packed sequences, as flash-attention 2's function of this name.

    With block_table k and v are (pages, page_size, heads_kv, 256), and cu_seqlens_k says how many
    keys each sequence has.
    """
    given = dict(locals())
    head_dim = other_head_dim(q, k, v)
    if head_dim is not None:
        return FLASH_ATTN_2.original("flash_attn_varlen_func", head_dim)(**given)
    FLASH_ATTN_2.refuse("flash_attn_varlen_func", given)
    FLASH_ATTN_2.refuse_pages("block_table", block_table, k)
    keys: dict[str, Any] = {"cu_seqlens_k": cu_seqlens_k}
    if block_table is not None:
        keys = {"page_table": block_table, "seqused_k": cu_seqlens_k.diff()}
    found = interface.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        return_lse=return_attn_probs,
        **keys,
        **_options(given),
    )
    return (*found, q.new_empty(0)) if return_attn_probs else found


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """Attention over a cache, new rows written to it first, as flash-attention 2's of this name.

    Returns out, or (out, lse) with return_softmax_lse. Raises as `flash_attn_func` of this module
    and `fa4_hd256.flash_attn_with_kvcache` do.
    """
    given = dict(locals())
    head_dim = other_head_dim(q, k_cache, v_cache)
    if head_dim is not None:
        return FLASH_ATTN_2.original("flash_attn_with_kvcache", head_dim)(**given)
    FLASH_ATTN_2.refuse_pages("block_table", block_table, k_cache)
    places = {name: given[name] for name in _PLACES if given[name] is not None}
    return kv_cache.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        page_table=block_table,
        rotary_interleaved=rotary_interleaved,
        return_lse=return_softmax_lse,
        num_splits=num_splits,
        **places,
        **_options(given),
    )


#: Arguments of a cache that our function has under the same names.
_PLACES = ("rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad")


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of our functions that all of these share."""
    options = {
        "softmax_scale": given["softmax_scale"],
        "causal": given["causal"],
        "window_size": window_of(given["window_size"]),
        "softcap": max(given["softcap"], 0.0),
    }
    if given["alibi_slopes"] is not None:
        options["score_mod"] = alibi(given["alibi_slopes"])
    return options
