"""The public functions of flash-attention 3 (`flash_attn_interface`), on this operator."""

from __future__ import annotations

from typing import Any

import torch

from .. import interface, kv_cache
from ..call.options import plain
from ..kernels.problem_class import DESCALES, KV_DESCALES, KV_DTYPES
from ..words import shown
from .arguments import FLASH_ATTN_3, SEQUENCES, check_requests, given, parts_of
from .combine import combine
from .windows import window_of

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

Window = tuple[int, int]
Result = torch.Tensor | tuple[torch.Tensor, ...]


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with q, k and v in one tensor, as flash-attention 3's function. qkv:
    (batch, seqlen, 3, heads, 256), or (batch, seqlen, heads + 2 heads_kv, 256) with num_heads_q.
    Returns and raises as `flash_attn_func` does."""
    arguments = dict(locals())
    original = FLASH_ATTN_3.checked("flash_attn_qkvpacked_func", arguments, qkv)
    if original is not None:
        return original(**arguments)
    del arguments["qkv"], arguments["num_heads_q"]
    q, k, v = _parts_of(qkv, plain(num_heads_q))
    return flash_attn_func(q, k, v, **arguments)


def _parts_of(qkv: torch.Tensor, num_heads_q: Any) -> tuple[torch.Tensor, ...]:
    """Return q, k and v of `flash_attn_qkvpacked_func`. Raises TypeError or ValueError for what is
    not accepted."""
    if qkv.ndim != 4:
        return parts_of("qkv", qkv, 3, "batch, seqlen")
    if num_heads_q is None:
        raise ValueError(
            f"qkv has {qkv.ndim} dimensions and num_heads_q is None; accepted: num_heads_q, or qkv "
            "of (batch, seqlen, 3, heads, 256)"
        )
    if isinstance(num_heads_q, bool) or not isinstance(num_heads_q, (int, torch.SymInt)):
        raise TypeError(f"num_heads_q must be an int, got {shown(num_heads_q)}")
    heads_kv = (qkv.shape[-2] - num_heads_q) // 2
    if num_heads_q < 1 or heads_kv < 1 or num_heads_q + 2 * heads_kv != qkv.shape[-2]:
        raise ValueError(
            f"num_heads_q is {num_heads_q} of {qkv.shape[-2]} heads; accepted: 1 or more, and "
            "behind them as many heads of k as of v"
        )
    return qkv.split([num_heads_q, heads_kv, heads_kv], dim=-2)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Compute attention with the arguments and the result of flash-attention 3's function.

    `fa4_hd256.compat.arguments` lists what becomes of each argument. Another head_dim than 256
    goes to flash-attention 3 itself.

    Returns out, or (out, lse) with return_attn_probs. Raises NotImplementedError for arguments
    that are not offered, ValueError for another head_dim without flash-attention 3, else as
    `fa4_hd256.flash_attn_func` does.
    """
    arguments = dict(locals())
    original = FLASH_ATTN_3.checked("flash_attn_func", arguments, q, k, v)
    if original is not None:
        return original(**arguments)
    return interface.flash_attn_func(q, k, v, return_lse=return_attn_probs, **_options(arguments))


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` for packed sequences, as flash-attention 3's function of this name."""
    arguments = dict(locals())
    original = FLASH_ATTN_3.checked("flash_attn_varlen_func", arguments, q, k, v)
    if original is not None:
        return original(**arguments)
    lengths = given(arguments, SEQUENCES)
    return interface.flash_attn_varlen_func(
        q, k, v, return_lse=return_attn_probs, **lengths, **_options(arguments)
    )


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine results of KV splits; see `fa4_hd256.compat.combine.combine`."""
    return combine(out_partial, lse_partial, out, out_dtype)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """Write new rows to a cache, then attend over it, as flash-attention 3's function does. Returns
    out, or (out, lse) with return_softmax_lse. Raises as `flash_attn_func` of this module and
    `fa4_hd256.flash_attn_with_kvcache` do."""
    arguments = dict(locals())
    original = FLASH_ATTN_3.checked("flash_attn_with_kvcache", arguments, q, k_cache, v_cache)
    if original is not None:
        return original(**arguments)
    cache = given(arguments, _OF_CACHE)
    without_unread(cache, k is v is None)
    return kv_cache.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_interleaved=rotary_interleaved,
        return_lse=return_softmax_lse,
        **cache,
        **_options(arguments),
    )


def without_unread(options: dict[str, Any], only_reads: bool) -> None:
    """Remove the arguments of `flash_attn_with_kvcache` that flash-attention 3 ignores, and our
    function refuses. only_reads: k and v are None."""
    if only_reads:
        options.pop("cu_seqlens_k_new", None)
    if options.get("rotary_cos") is options.get("rotary_sin") is None:
        options.pop("rotary_seqlens", None)


#: Arguments of a cache that our function has under the same names.
_OF_CACHE = (
    "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad", "page_table",
    "cu_seqlens_q", "cu_seqlens_k_new", "max_seqlen_q", "rotary_seqlens",
)  # fmt: skip


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Any:
    """Return None at head_dim 256: calls here need no scheduler_metadata, and ignore it.
    `fa4_hd256.get_scheduler_metadata` makes metadata for `fa4_hd256.flash_attn_with_kvcache`.
    Another headdim goes to flash-attention 3 itself."""
    arguments = dict(locals())
    other = next((dim for dim in (headdim, headdim_v) if dim not in (None, 256)), None)
    if other is None:
        return None
    return FLASH_ATTN_3.original("get_scheduler_metadata", other)(**arguments)


def _options(arguments: dict[str, Any]) -> dict[str, Any]:
    check_requests(arguments)
    options = {
        "softmax_scale": arguments["softmax_scale"],
        "causal": arguments["causal"],
        "window_size": window_of(arguments["window_size"]),
        "softcap": arguments["softcap"],
        "num_splits": arguments.get("num_splits", 1),
    }
    if arguments["q"].dtype in KV_DTYPES:
        return options | _scales(arguments, DESCALES)
    return options | _scales(arguments, KV_DESCALES)


def _scales(arguments: dict[str, Any], names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Return the scales of these names, 1 for one that is not given beside others."""
    scales = given(arguments, names)
    if not scales:
        return {}
    device = arguments["q"].device
    missing = {name: torch.ones((), device=device) for name in names if name not in scales}
    return scales | missing
