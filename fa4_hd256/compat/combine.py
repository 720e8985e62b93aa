"""flash-attention's `flash_attn_combine`: results of KV splits, in PyTorch's operations."""

from __future__ import annotations

import torch

from ..call.memory import check_tensor
from ..words import shown


def combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of a call's KV splits.

    out_partial: (splits, ..., heads, head_dim). lse_partial: (splits, ..., heads) float32, -inf
    where a split sees no key. out: where the result is written; None: a new tensor of out_dtype, or
    of out_partial's dtype. lse: (..., heads) float32. A row without keys has out = 0 and lse =
    -inf. Raises TypeError for what is no tensor or dtype, ValueError for shapes that do not
    agree.
    """
    for name, tensor in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        check_tensor(name, tensor)
    if not isinstance(out, (torch.Tensor, type(None))):
        raise TypeError(f"out must be a torch.Tensor or None, got {type(out).__name__}")
    if not isinstance(out_dtype, (torch.dtype, type(None))):
        raise TypeError(f"out_dtype must be a torch.dtype or None, got {shown(out_dtype)}")
    if out_partial.shape[:-1] != lse_partial.shape:
        raise ValueError(
            f"out_partial has shape {tuple(out_partial.shape)} and lse_partial "
            f"{tuple(lse_partial.shape)}; accepted: (splits, ..., heads, head_dim) and (splits, "
            "..., heads)"
        )
    if out is not None and out.shape != out_partial.shape[1:]:
        raise ValueError(
            f"out has shape {tuple(out.shape)}; accepted: {tuple(out_partial.shape[1:])}"
        )
    lse = torch.logsumexp(lse_partial.float(), dim=0)
    weights = torch.exp(lse_partial.float() - lse).masked_fill(lse_partial == -torch.inf, 0.0)
    # A split without keys may hold anything.
    partial = out_partial.float().masked_fill((weights == 0.0)[..., None], 0.0)
    combined = (weights[..., None] * partial).sum(0)
    if out is None:
        return combined.to(out_dtype or out_partial.dtype), lse
    return out.copy_(combined), lse
