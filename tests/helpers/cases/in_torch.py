"""The operator's functions in PyTorch, for tests of what is measured around them.

`in_torch(monkeypatch)` puts them in the place of ours: a call takes milliseconds and compiles
nothing. They know the options that bench hands on, and no others.
"""

from __future__ import annotations

from typing import Any

import cache_reference
import torch

from fa4_hd256.check import reference
from fa4_hd256.quantize import dequantize_nvfp4

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "in_torch"]

_IGNORED = ("use_clc", "config", "num_splits", "backward_config")


def in_torch(monkeypatch: Any, *modules: Any) -> None:
    """Replace the functions in fa4_hd256, and in modules that hold them by name."""
    for function in (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache):
        monkeypatch.setattr(f"fa4_hd256.{function.__name__}", function)
        for module in modules:
            if hasattr(module, function.__name__):
                monkeypatch.setattr(module, function.__name__, function)


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool = False, **options: Any
) -> Any:
    """(batch, seqlen, heads, 256) in float64, rounded to the inputs' dtype."""
    chosen = {name: value for name, value in options.items() if name not in _IGNORED}
    scales = [chosen.pop(name, None) for name in ("k_descale", "v_descale")]
    k, v = (
        tensor if scale is None else reference.dequantised(tensor, scale)
        for tensor, scale in zip((k, v), scales, strict=True)
    )  # fmt: skip
    out, lse = reference.attention(q, k, v, **chosen)
    return (out.to(q.dtype), lse) if return_lse else out.to(q.dtype)


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, **options: Any,
) -> torch.Tensor:  # fmt: skip
    """(total, heads, 256), sequence by sequence."""
    outs = []
    for (q0, q1), (k0, k1) in zip(
        cu_seqlens_q.unfold(0, 2, 1).tolist(), cu_seqlens_k.unfold(0, 2, 1).tolist(), strict=True
    ):
        assert q1 - q0 <= max_seqlen_q and k1 - k0 <= max_seqlen_k
        outs.append(flash_attn_func(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], **options)[0])
    return torch.cat(outs)


def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *new: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None = None, page_table: torch.Tensor | None = None,
    k_block_scale: torch.Tensor | None = None, v_block_scale: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:  # fmt: skip
    """(batch, seqlen, heads, 256) over caches in pages, or of NVFP4 without; new: k and v of one
    row per sequence."""
    if k_block_scale is not None and v_block_scale is not None:
        k = dequantize_nvfp4(k_cache, k_block_scale, dtype=q.dtype)
        v = dequantize_nvfp4(v_cache, v_block_scale, dtype=q.dtype)
        found: torch.Tensor = flash_attn_func(q, k, v, **options)
        return found
    assert cache_seqlens is not None and page_table is not None
    tables = [options.pop(name, None) for name in ("rotary_cos", "rotary_sin")]
    scales = {name: options.pop(name, None) for name in ("k_descale", "v_descale")}
    outs = []
    for b, (length, pages) in enumerate(zip(cache_seqlens.tolist(), page_table.long())):
        query = q[b : b + 1]
        if new and new[0] is not None:
            page, row = divmod(length, k_cache.shape[1])
            key, value = (tensor[b] for tensor in new)
            if tables[0] is not None:
                query, key = (_rotated(rows, *(t[length] for t in tables)) for rows in (query, key))
            k_cache[pages[page], row] = key[0].to(k_cache.dtype)
            v_cache[pages[page], row] = value[0].to(v_cache.dtype)
            length += 1
        rows = [
            cache_reference.gathered(cache, pages, length)[None] for cache in (k_cache, v_cache)
        ]
        own = {name: None if scale is None else scale[b : b + 1] for name, scale in scales.items()}
        outs.append(flash_attn_func(query, *rows, **own, **options))
    return torch.cat(outs)


def _rotated(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of neighbours in the first columns, as many as the tables have."""
    turned = rows.clone()
    even, odd = (rows[..., start : 2 * len(cos) : 2].float() for start in (0, 1))
    turned[..., 0 : 2 * len(cos) : 2] = (even * cos - odd * sin).to(rows.dtype)
    turned[..., 1 : 2 * len(cos) : 2] = (even * sin + odd * cos).to(rows.dtype)
    return turned
