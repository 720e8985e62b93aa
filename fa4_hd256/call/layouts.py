"""Where the tensors of a call are read in place, and where they are copied first."""

from __future__ import annotations

import torch

from ..kernels.limits import TMA_ALIGNMENT, TMA_STRIDE_LIMIT

__all__ = [
    "as_kernel_operand", "row_operand", "table_operand", "tma_can_take", "without_expanded_heads",
]  # fmt: skip


def tma_can_take(tensor: torch.Tensor) -> bool:
    """Whether TMA can read the tensor where it lies; strides of dimensions of size 1 mean nothing.

    A stride of 0 (an expanded dimension) is refused: CuTe DSL 4.8 encodes it as a positive one
    into the descriptor.
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


def without_expanded_heads(
    k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v with one head where all their heads are one expanded head: grouped queries read
    it without a copy. Tensors of another rank, not yet refused, as they are."""
    if k.ndim == v.ndim == 4 and k.shape[2] > 1 and k.stride(2) == 0 and v.stride(2) == 0:
        return k[:, :, :1], v[:, :, :1]
    return k, v


def as_kernel_operand(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as the kernel may read it: itself where TMA can take it, else one copy.

    A dimension of size 1 may carry any stride; it gets that of a contiguous tensor, so that every
    stride the kernel sees keeps TMA's rule.
    """
    if not tma_can_take(tensor):
        return tensor.clone(memory_format=torch.contiguous_format)
    return _without_loose_strides(tensor)


def _without_loose_strides(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory; dimensions of size 1 have strides as in a contiguous tensor."""
    strides, below = [], 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride())):
        strides.append(stride if size > 1 else below)
        below = max(below, size * strides[-1])
    return tensor.as_strided(tensor.shape, strides[::-1])


def row_operand(tensor: torch.Tensor) -> torch.Tensor:
    """One float per row as the kernel may read it: itself, or a copy where a stride is 0, which
    CuTe DSL 4.8 takes for a static one."""
    if 0 in tensor.stride():
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def table_operand(tensor: torch.Tensor) -> torch.Tensor:
    """A table with a last stride of 1 as the kernel may read it: itself, or a copy where its rows
    are one expanded row."""
    return _without_loose_strides(row_operand(tensor))
