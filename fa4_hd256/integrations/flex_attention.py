"""torch.nn.attention.flex_attention at head_dim 256.

    from fa4_hd256.integrations.flex_attention import flex_attention
    out = flex_attention(query, key, value, score_mod=score_mod, block_mask=block_mask)

The arguments are PyTorch's, and so is their meaning. A `BlockMask` is taken as it is; a `score_mod`
is traced and becomes part of the kernels, its derivative of those of the backward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxOutput

from fa4_hd256.interface import flash_attn_func
from fa4_hd256.score_mods import Scored, ScoreMod

from .score_graph import ScoreGraph

__all__ = ["flex_attention", "score_mod_of"]


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor] | ScoreMod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """As PyTorch's function of this name.

    query: (batch, heads, seqlen_q, 256); key, value: (batch, heads_kv, seqlen_k, 256); bfloat16 or
    float16, any strides. score_mod: of (score, batch, head, query, key), tensors of no dimension;
    or what `score_mod_of` made of one, which spares tracing it in every call. block_mask: a
    `BlockMask`, or a mask of `fa4_hd256.masks`. enable_gqa: needed where there are fewer KV heads
    than query heads. kernel_options: for PyTorch's own kernels, without effect.

    Returns out, (batch, heads, seqlen_q, 256); with return_lse (out, lse), with return_aux (out,
    AuxOutput); lse: (batch, heads, seqlen_q) float32, natural log. Tensors that score_mod reads get
    no gradients.

    Raises NotImplementedError for a score_mod that kernels cannot evaluate (`score_mod_of`) and
    for max_scores in return_aux, ValueError for fewer KV heads without enable_gqa, and otherwise
    as `flash_attn_func` does.
    """
    del kernel_options
    if return_aux is not None and return_aux.max_scores:
        raise NotImplementedError("max_scores in return_aux is True; accepted: False")
    heads, heads_kv = query.shape[1], key.shape[1]
    if heads != heads_kv and not enable_gqa:
        raise ValueError(
            f"query has {heads} heads, key {heads_kv}; accepted: as many, or enable_gqa=True"
        )
    if score_mod is not None and not isinstance(score_mod, ScoreMod):
        score_mod = score_mod_of(score_mod, query.device)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    out, lse = flash_attn_func(
        q, k, v, softmax_scale=scale, block_mask=block_mask, score_mod=score_mod, return_lse=True
    )
    out = out.transpose(1, 2)
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def score_mod_of(
    function: Callable[..., torch.Tensor], device: torch.device | str = "cpu"
) -> ScoreMod:
    """What attention functions take as score_mod, made of FlexAttention's.

    function: of (score, batch, head, query, key), tensors of no dimension on the device, float32
    and int32; it returns one such number. It may use the operators of
    `score_graph.OPERATIONS` and elements of tensors, by one number a dimension; an index beyond a
    dimension is that of its nearest element. Kernels compute in float32 and int32. Contiguous
    tensors of these types are read anew in every call; others, and all numbers of Python, are of
    now, so make a new one where they change.

    Raises TranslationError, a NotImplementedError, for other functions; it says of what.
    """
    tensors: list[torch.Tensor] = []
    device = torch.device(device)
    modified = ScoreGraph(function, device, tensors)
    slope = ScoreGraph(torch.func.grad(function), device, tensors)
    text = f"{modified.text} {slope.text}"
    key = f"flex_attention_{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    return ScoreMod(
        _of_kernel(modified), None if slope.number == 1 else _of_kernel(slope), key,
        tuple(map(_as_read, tensors)),
    )  # fmt: skip


def _of_kernel(graph: ScoreGraph) -> Callable[..., Any]:
    def computed(score: Any, place: Scored, tensors: tuple) -> Any:
        arguments = score, place.batch, place.head, place.query, place.key
        return graph(arguments, tensors)

    return computed


def _as_read(tensor: torch.Tensor) -> torch.Tensor:
    """As kernels read it: float32 or int32, of one dimension at least."""
    dtype = torch.float32 if tensor.is_floating_point() else torch.int32
    return tensor.to(dtype).contiguous().reshape(tensor.shape or (1,))
