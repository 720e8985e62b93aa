"""The public functions of flash-attn-4 (`flash_attn.cute`, 4.0.0b36), on this operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import interface
from ..call.operator_arguments import wrong_rank
from ..call.options import ExactWindow, flags_of, plain, sides_of
from ..kernels.limits import HEAD_DIM
from ..kernels.mask.windows import Window
from .arguments import FLASH_ATTN_4, given
from .combine import combine
from .functions import translate_blocks, translate_mask_mod, translate_score_mod

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func"]

Pair = tuple[torch.Tensor, torch.Tensor | None]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: list | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> Pair:
    """Compute attention with the arguments and the result of flash-attn-4's function.

    `fa4_hd256.compat.arguments` lists what becomes of each argument. Another head_dim than 256
    goes to flash-attn-4 itself.

    Returns (out, lse) always; lse is None without return_lse where no input requires gradients.
    Raises NotImplementedError for arguments that are not offered, ValueError for another head_dim
    without flash-attn-4, else as `fa4_hd256.flash_attn_func` does.
    """
    arguments = dict(locals())
    original = FLASH_ATTN_4.checked("flash_attn_func", arguments, q, k, v)
    if original is not None:
        return original(**arguments)
    _check_request(return_lse)
    options = _options(arguments)
    if mask_mod is not None or block_sparse_tensors is not None:
        options |= _masks(arguments)
    out, lse = interface.flash_attn_func(q, k, v, return_lse=True, **options)
    return out, _lse_of(lse, return_lse, (q, k, v, learnable_sink))


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: Any = None,
    aux_tensors: list | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> Pair:
    """`flash_attn_func` for sequences of different lengths, as flash-attn-4's of this name. Returns
    and raises as `flash_attn_func` does, and NotImplementedError for mask_mod and
    block_sparse_tensors with cu_seqlens, seqused or page_table."""
    arguments = dict(locals())
    original = FLASH_ATTN_4.checked("flash_attn_varlen_func", arguments, q, k, v)
    if original is not None:
        return original(**arguments)
    _check_request(return_lse)
    options = _options(arguments, (cu_seqlens_q, cu_seqlens_k))
    lengths = given(arguments, _LENGTHS)
    if mask_mod is not None or block_sparse_tensors is not None:
        _check_unpacked(lengths)
        options |= _masks(arguments)
        out, lse = interface.flash_attn_func(q, k, v, return_lse=True, **options)
    else:
        if cu_seqlens_q is not None and max_seqlen_q is None:
            max_seqlen_q = q.shape[0]
        options |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, **lengths}
        out, lse = interface.flash_attn_varlen_func(q, k, v, return_lse=True, **options)
    return out, _lse_of(lse, return_lse, (q, k, v, learnable_sink))


#: Arguments that say where the rows of sequences are.
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "page_table")


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: torch.Tensor | None = None,
    seqused: torch.Tensor | None = None,
    virtual_batch_idx: torch.Tensor | None = None,
    return_lse: bool = True,
) -> Pair:
    """Combine results of KV splits, as flash-attn-4's function of this name. Returns (out, lse),
    lse None without return_lse; see `fa4_hd256.compat.combine.combine`."""
    FLASH_ATTN_4.refuse("flash_attn_combine", {"virtual_batch_idx": virtual_batch_idx})
    result, lse = combine(out_partial, lse_partial, out, out_dtype)
    return result, lse if return_lse else None


def _options(
    arguments: dict[str, Any],
    offsets: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> dict[str, Any]:
    num_splits = plain(arguments["num_splits"])
    options = {
        "softmax_scale": arguments["softmax_scale"],
        "causal": arguments["causal"],
        "window_size": window_of(arguments["window_size"]),
        "learnable_sink": arguments["learnable_sink"],
        "softcap": arguments["softcap"] or 0.0,
        "num_splits": max(num_splits, 0) if isinstance(num_splits, int) else num_splits,
    }
    if arguments["score_mod"] is not None:
        aux = arguments["aux_tensors"], arguments["aux_scalars"]
        functions = arguments["score_mod"], arguments["score_mod_bwd"]
        options["score_mod"] = translate_score_mod(*functions, aux, offsets)
    return options


def window_of(window_size: Window) -> Window:
    left, right = sides_of(window_size)
    if left is not None and right is not None and left < 0 and right < 0:
        return None, None
    is_shifted = any(side is not None and side < 0 for side in (left, right))
    return ExactWindow(left, right) if is_shifted else (left, right)


def _masks(arguments: dict[str, Any]) -> dict[str, Any]:
    q, k, mask_mod = arguments["q"], arguments["k"], arguments["mask_mod"]
    for name, tensor in (("q", q), ("k", k)):
        if tensor.ndim != 4:
            form = f"(batch, seqlen, heads, {HEAD_DIM})"
            raise ValueError(wrong_rank(name, tensor, 4, form))
    lengths = q.shape[1], k.shape[1]
    left, right = window_of(arguments["window_size"])
    window = left, 0 if arguments["causal"] else right
    options: dict[str, Any] = {"causal": False, "window_size": (None, None)}
    options["block_mask"] = translate_blocks(
        arguments["block_sparse_tensors"], lengths, q.device, mask_mod is not None, window
    )
    if mask_mod is not None:
        aux = arguments["aux_tensors"], arguments["aux_scalars"]
        options["mask_mod"] = translate_mask_mod(mask_mod, aux, lengths, q.device)
    return options


def _check_unpacked(lengths: dict[str, Any]) -> None:
    if lengths:
        raise NotImplementedError(
            f"mask_mod or block_sparse_tensors is given with {', '.join(lengths)}; accepted: "
            "sequences of one length. Use block_mask and mask_mod of "
            "fa4_hd256.flash_attn_varlen_func, whose positions are those of the packed rows"
        )


def _check_request(return_lse: Any) -> None:
    """Raise TypeError unless return_lse is True or False."""
    if return_lse is not False and return_lse is not True:
        flags_of(return_lse=return_lse)


def _lse_of(lse: torch.Tensor, wanted: bool, inputs: tuple[Any, ...]) -> torch.Tensor | None:
    """Return lse as flash-attn-4 does: without return_lse no gradients go through it."""
    if wanted:
        return lse
    return lse.detach() if any(t is not None and t.requires_grad for t in inputs) else None
