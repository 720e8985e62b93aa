"""The public functions of flash-attention 2 (`flash_attn`), on this operator."""

from __future__ import annotations

import numbers
from typing import Any

import torch

from .. import interface, kv_cache
from ..call.cache_checks import check_int32
from ..score_mods import alibi
from .arguments import FLASH_ATTN_2, check_requests, given, parts_of
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
    arguments = dict(locals())
    original = FLASH_ATTN_2.checked("flash_attn_qkvpacked_func", arguments, qkv)
    if original is not None:
        return original(**arguments)
    del arguments["qkv"]
    q, k, v = parts_of("qkv", qkv, 3, "batch, seqlen")
    return flash_attn_func(q, k, v, **arguments)


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
    arguments = dict(locals())
    original = FLASH_ATTN_2.checked("flash_attn_kvpacked_func", arguments, q, kv)
    if original is not None:
        return original(**arguments)
    del arguments["q"], arguments["kv"]
    k, v = parts_of("kv", kv, 2, "batch, seqlen_k")
    return flash_attn_func(q, k, v, **arguments)


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
    """Compute attention with the arguments and the result of flash-attention 2's function.

    `fa4_hd256.compat.arguments` lists what becomes of each argument. Another head_dim than 256
    goes to flash-attention 2 itself.

    Returns out, or (out, lse, S) with return_attn_probs, S an empty tensor. Raises
    NotImplementedError for arguments that are not offered, ValueError for another head_dim without
    flash-attention 2, else as `fa4_hd256.flash_attn_func` does.
    """
    arguments = dict(locals())
    original = FLASH_ATTN_2.checked("flash_attn_func", arguments, q, k, v)
    if original is not None:
        return original(**arguments)
    result = interface.flash_attn_func(q, k, v, return_lse=return_attn_probs, **_options(arguments))
    return (*result, q.new_empty(0)) if return_attn_probs else result


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
    arguments = dict(locals())
    original = FLASH_ATTN_2.checked("flash_attn_varlen_qkvpacked_func", arguments, qkv)
    if original is not None:
        return original(**arguments)
    del arguments["qkv"], arguments["cu_seqlens"], arguments["max_seqlen"]
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    q, k, v = parts_of("qkv", qkv, 3, "total")
    return flash_attn_varlen_func(q, k, v, *lengths, **arguments)


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
    arguments = dict(locals())
    original = FLASH_ATTN_2.checked("flash_attn_varlen_kvpacked_func", arguments, q, kv)
    if original is not None:
        return original(**arguments)
    del arguments["q"], arguments["kv"]
    k, v = parts_of("kv", kv, 2, "total_k")
    return flash_attn_varlen_func(q, k, v, **arguments)


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
    """`flash_attn_func` for packed sequences, as flash-attention 2's function of this name. With
    block_table k and v are (pages, page_size, heads_kv, 256), and cu_seqlens_k counts the keys of
    each sequence."""
    arguments = dict(locals())
    original = FLASH_ATTN_2.checked("flash_attn_varlen_func", arguments, q, k, v)
    if original is not None:
        return original(**arguments)
    check_int32("cu_seqlens_q", cu_seqlens_q)
    check_int32("cu_seqlens_k", cu_seqlens_k)
    lengths = given(arguments, ("cu_seqlens_q", "max_seqlen_q", "max_seqlen_k"))
    if block_table is None:
        lengths["cu_seqlens_k"] = cu_seqlens_k
    else:
        lengths |= {"page_table": block_table, "seqused_k": cu_seqlens_k.diff()}
    result = interface.flash_attn_varlen_func(
        q, k, v, return_lse=return_attn_probs, **lengths, **_options(arguments)
    )
    return (*result, q.new_empty(0)) if return_attn_probs else result


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
    """Write new rows to a cache, then attend over it, as flash-attention 2's function does. Returns
    out, or (out, lse) with return_softmax_lse. Raises as `flash_attn_func` of this module and
    `fa4_hd256.flash_attn_with_kvcache` do."""
    arguments = dict(locals())
    original = FLASH_ATTN_2.checked("flash_attn_with_kvcache", arguments, q, k_cache, v_cache)
    if original is not None:
        return original(**arguments)
    cache = given(arguments, _OF_CACHE)
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
        **cache,
        **_options(arguments),
    )


#: Arguments of a cache that our function has under the same names.
_OF_CACHE = ("rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad")


def _options(arguments: dict[str, Any]) -> dict[str, Any]:
    check_requests(arguments)
    softcap = arguments["softcap"]
    options = {
        "softmax_scale": arguments["softmax_scale"],
        "causal": arguments["causal"],
        "window_size": window_of(arguments["window_size"]),
        "softcap": 0.0 if isinstance(softcap, numbers.Real) and softcap <= 0 else softcap,
    }
    if arguments["alibi_slopes"] is not None:
        options["score_mod"] = alibi(arguments["alibi_slopes"])
    return options
