"""torch.nn.attention.flex_attention at head_dim 256.

    from fa4_hd256.integrations.flex_attention import flex_attention
    out = flex_attention(query, key, value, score_mod=score_mod, block_mask=block_mask)

The arguments are PyTorch's, and so is their meaning. A `score_mod` is traced and becomes part of
the kernels, and its derivative part of the backward's. So can the mask_mod of a `BlockMask`.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import flex_attention as pytorch
from torch.nn.attention.flex_attention import AuxOutput, BlockMask

from ..call.functions.state import FunctionState
from ..call.process import is_lasting
from ..call.tile_mask import TileMask
from ..gpus.devices import is_captured
from ..interface import flash_attn_func
from ..mask_mods import MaskMod
from ..score_mods import Scored, ScoreMod
from . import other_dims
from .score_graph import MASK, ScoreGraph


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
    traces_mask: bool = False,
) -> Any:
    """Compute what PyTorch's function of this name computes.

    query: (batch, heads, seqlen_q, 256); key, value: (1 or batch, heads_kv, seqlen_k, 256);
        bfloat16 or float16, any strides. PyTorch's function computes another head_dim, which is
        logged once.
    score_mod: of (score, batch, head, query, key), tensors of no dimension; or the result of
        `score_mod_of`, which spares tracing in every call.
    block_mask: a `BlockMask`, or a mask of `fa4_hd256.masks`.
    enable_gqa: needed where there are fewer KV heads than query heads.
    kernel_options: for PyTorch's own kernels, without effect.
    traces_mask: the kernels evaluate the mask_mod of a `BlockMask` in its partial blocks, instead
        of reading bits that PyTorch makes of it once.

    Returns out, (batch, heads, seqlen_q, 256); with return_lse (out, lse), with return_aux (out,
    AuxOutput). lse: (batch, heads, seqlen_q) float32, natural log. Tensors that score_mod reads get
    no gradients.

    Raises NotImplementedError for functions that kernels cannot evaluate (`score_mod_of`,
    `mask_mod_of`) and for max_scores in return_aux, ValueError for both return_lse and return_aux
    and for fewer KV heads without enable_gqa, TypeError for traces_mask without a `BlockMask`, and
    otherwise as `flash_attn_func` does.
    """
    if other_dims.has_other_dim(query, key, value):
        return _by_pytorch(
            (query, key, value), score_mod, block_mask, traces_mask, scale=scale,
            enable_gqa=enable_gqa, return_lse=return_lse, kernel_options=kernel_options,
            return_aux=return_aux,
        )  # fmt: skip
    if return_lse and return_aux is not None:
        raise ValueError(
            "both return_lse and return_aux are given; accepted: one of them, "
            "return_aux=AuxRequest(lse=True) for lse"
        )
    if return_aux is not None and return_aux.max_scores:
        raise NotImplementedError("max_scores in return_aux is True; accepted: False")
    heads, heads_kv = query.shape[1], key.shape[1]
    if heads != heads_kv and not enable_gqa:
        raise ValueError(
            f"query has {heads} heads and key {heads_kv}; accepted: equal, or enable_gqa=True"
        )
    if key.shape[0] == 1 < query.shape[0] and value.shape[0] == 1:
        key, value = (t.expand(query.shape[0], -1, -1, -1) for t in (key, value))
    if score_mod is not None and not isinstance(score_mod, ScoreMod):
        score_mod = score_mod_of(score_mod, query.device)
    mask_mod = _traced_mask(block_mask, query.device) if traces_mask else None
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    out, lse = flash_attn_func(
        q, k, v, softmax_scale=scale, block_mask=block_mask, score_mod=score_mod,
        mask_mod=mask_mod, return_lse=True,
    )  # fmt: skip
    out = out.transpose(1, 2)
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def _by_pytorch(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    score_mod: Any,
    block_mask: Any,
    traces_mask: bool,
    **options: Any,
) -> Any:
    """Call PyTorch's function. Raises ValueError for functions and masks that only the kernels here
    evaluate."""
    if isinstance(score_mod, ScoreMod) or isinstance(block_mask, TileMask) or traces_mask:
        raise ValueError(
            f"head_dim is {tensors[0].shape[-1]} with a ScoreMod, a mask of fa4_hd256.masks or "
            "traces_mask=True; accepted: head_dim 256, or a score_mod and a BlockMask of PyTorch's "
            "FlexAttention, which computes such calls"
        )
    other_dims.say_once("FlexAttention", "PyTorch's FlexAttention", *tensors)
    q, k, v = tensors
    return pytorch.flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask, **options)


def score_mod_of(
    function: Callable[..., torch.Tensor], device: torch.device | str = "cpu"
) -> ScoreMod:
    """Translate a score_mod of FlexAttention into one that attention functions take.

    function: of (score, batch, head, query, key), float32 and int32 tensors of no dimension on the
    device. It returns one such number. It may use the operators of `score_graph.OPERATIONS`, and
    elements of tensors by one number per dimension. An index beyond a dimension reads the nearest
    element. Kernels compute in float32 and int32. Contiguous tensors of these types are read again
    in every call. Other tensors, and numbers of Python, are read now: translate again when they
    change.

    Raises TranslationError, a NotImplementedError, for other functions.
    """
    tensors: list[torch.Tensor] = []
    device = torch.device(device)
    modified = ScoreGraph(function, device, tensors)
    slope = ScoreGraph(torch.func.grad(function), device, tensors)
    key, read = _key_and_tensors(f"{modified.text} {slope.text}", tensors)
    own = None if slope.number == 1 else _of_kernel(slope)
    return ScoreMod(_of_kernel(modified), own, key, read)


def mask_mod_of(
    function: Callable[..., torch.Tensor], device: torch.device | str = "cpu"
) -> MaskMod:
    """Translate a mask_mod of FlexAttention into one that `flash_attn_func` takes. function: of
    (batch, head, query, key), int32 tensors of no dimension on the device. It returns such a bool.
    It may use what `score_mod_of` accepts, and errors are the same."""
    tensors: list[torch.Tensor] = []
    graph = ScoreGraph(function, torch.device(device), tensors, MASK)
    key, read = _key_and_tensors(graph.text, tensors)

    def seen(batch: Any, head: Any, query: Any, key: Any, tensors: tuple[Any, ...]) -> Any:
        return graph((batch, head, query, key), tensors)

    return MaskMod(seen, key, read)


#: Traced mask_mods of living `BlockMask`s, and the state in which they were traced.
_masks: weakref.WeakKeyDictionary[BlockMask, tuple[FunctionState, MaskMod]]
_masks = weakref.WeakKeyDictionary()


def _traced_mask(block_mask: Any, device: torch.device) -> MaskMod:
    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            f"traces_mask is True and block_mask is {type(block_mask).__name__}; accepted: a "
            "BlockMask, whose mask_mod is traced"
        )
    mask_mod = block_mask.mask_mod
    if is_captured(device):
        # Copies of what it reads are made at each replay of the graph.
        return mask_mod_of(mask_mod, device)
    known = _masks.get(block_mask)
    if known is not None and known[0].is_of(mask_mod):
        return known[1]
    state = FunctionState.of(mask_mod)
    # No inference tensors, which a later training could not save.
    with torch.inference_mode(False):
        traced = mask_mod_of(mask_mod, device)
    if state is not None and all(map(is_lasting, traced.tensors)):
        _masks[block_mask] = state, traced
    return traced


def _key_and_tensors(
    text: str, tensors: list[torch.Tensor]
) -> tuple[str, tuple[torch.Tensor, ...]]:
    key = f"flex_attention_{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    return key, tuple(map(_as_read, tensors))


def _of_kernel(graph: ScoreGraph) -> Callable[..., Any]:
    def computed(score: Any, place: Scored, tensors: tuple[Any, ...]) -> Any:
        arguments = score, place.batch, place.head, place.query, place.key
        return graph(arguments, tensors)

    return computed


def _as_read(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as kernels read it: float32 or int32, of one dimension at least."""
    dtype = torch.float32 if tensor.is_floating_point() else torch.int32
    return tensor.to(dtype).contiguous().reshape(tensor.shape or (1,))
