"""Layouts of a call's tensors: read in place, or copied first."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from ..kernels.limits import TMA_ALIGNMENT, TMA_STRIDE_LIMIT

__all__ = ["tma_can_take", "without_expanded_heads", "without_loose_strides"]

#: A tensor, or a view of one that a plan names (`run.slots.View`).
Strided = TypeVar("Strided", bound=Any)


def tma_can_take(tensor: Strided) -> bool:
    """Return True if TMA can read the tensor where it lies; strides of dimensions of size 1 mean
    nothing.

    A stride of 0 (an expanded dimension) is refused: CuTe DSL 4.8 encodes it as a positive one into
    the descriptor.
    """
    if tensor.numel() == 0:
        return True
    if tensor.data_ptr() % TMA_ALIGNMENT:
        return False
    *outer, last = zip(tensor.shape, tensor.stride())
    if last[0] > 1 and last[1] != 1:
        return False
    strides = (stride * tensor.element_size() for size, stride in outer if size > 1)
    return all(s % TMA_ALIGNMENT == 0 and 0 < s < TMA_STRIDE_LIMIT for s in strides)


def without_expanded_heads(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v with one head where all their heads are one expanded head: grouped queries read
    it without a copy. Tensors of another rank, not yet refused, as they are."""
    if k.ndim == v.ndim == 4 and k.shape[2] > 1 and k.stride(2) == 0 and v.stride(2) == 0:
        return k[:, :, :1], v[:, :, :1]
    return k, v


def without_loose_strides(tensor: Strided) -> Strided:
    """Return the same memory; dimensions of size 1 have strides as in a contiguous tensor, so that
    every stride which the kernel sees keeps TMA's rule."""
    strides, below = [], 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride())):
        strides.append(stride if size > 1 else below)
        below = max(below, size * strides[-1])
    found: Strided = tensor.as_strided(tensor.shape, strides[::-1])
    return found
