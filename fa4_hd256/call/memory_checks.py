"""Requirements on the memory of tensors: of those that a call writes to, and of those that it reads
where they lie, without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..kernels.limits import TMA_ALIGNMENT
from .layouts import tma_can_take
from .overlap import share_memory

__all__ = [
    "check_apart",
    "check_changeable",
    "check_in_place",
    "check_not_overlapping",
    "check_out",
    "check_writable",
    "check_writable_again",
    "require_dense",
]


def require_dense(name: str, tensor: torch.Tensor) -> None:
    """Raise TypeError for a tensor of another layout."""
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "a nested one" if tensor.is_nested else tensor.layout
        raise TypeError(f"{name} must be a dense (strided) tensor, got {kind}")


def check_in_place(tensors: dict[str, torch.Tensor], what: str) -> None:
    """Check that TMA can take tensors where they lie. what: needs that."""
    for name, tensor in tensors.items():
        if not tma_can_take(tensor):
            raise ValueError(
                f"{name} has strides {tensor.stride()} and begins at {tensor.data_ptr():#x}; "
                f"accepted with {what}: a last stride of 1, the other strides and the address "
                f"positive multiples of {TMA_ALIGNMENT} bytes"
            )


def check_out(out: Any, q: torch.Tensor) -> None:
    """A tensor to write the result to, like q, both as the user has them.

    Raises TypeError for another kind or dtype, ValueError for another shape or device.
    """
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out must be a torch.Tensor or None, got {type(out).__name__}")
    require_dense("out", out)
    if out.dtype != q.dtype:
        raise TypeError(f"out has dtype {out.dtype}; accepted: {q.dtype}, like q")
    if out.shape != q.shape:
        raise ValueError(f"out has shape {tuple(out.shape)}; accepted: {tuple(q.shape)}, like q")
    if out.device != q.device:
        raise ValueError(f"out is on {out.device}; accepted: {q.device}, like q")


def check_writable(out: torch.Tensor, inputs: Sequence[Any]) -> None:
    """Check that kernels can write to it in place. Raises TypeError for a sparse one, ValueError
    for other strides, and as `check_apart`."""
    require_dense("out", out)
    check_changeable("out", out)
    if not tma_can_take(out):
        raise ValueError(
            f"out has strides {out.stride()} from an address that is "
            f"{out.data_ptr() % TMA_ALIGNMENT} past a multiple of {TMA_ALIGNMENT}; accepted: a "
            f"last stride of 1, other strides and the address multiples of {TMA_ALIGNMENT} bytes"
        )
    check_not_overlapping("out", out)
    check_apart(out, inputs)


def check_writable_again(out: torch.Tensor, inputs: Sequence[Any]) -> None:
    """Check what no key of an earlier call has of `check_writable`: modes and addresses."""
    check_changeable("out", out)
    check_apart(out, inputs)


def check_changeable(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError for a tensor that PyTorch does not write to."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{name} was made under torch.inference_mode(), outside of which PyTorch does not "
            "write to it; accepted: a call under torch.inference_mode(), or another tensor"
        )


def check_not_overlapping(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError for a tensor that is written to, of whose elements some may share memory:
    where a dimension steps into what those of smaller strides reach; and for one that PyTorch reads
    negated (`torch.Tensor.is_neg`)."""
    if tensor.is_neg():
        raise ValueError(
            f"{name} is a negated view; accepted: a tensor whose memory holds its elements, as it "
            "is written to"
        )
    reached = 1
    sizes = sorted(zip(tensor.stride(), tensor.shape))
    for stride, size in sizes if tensor.numel() else ():
        if size > 1 and stride < reached:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, elements "
                "that share memory; accepted: memory of its own for each, as it is written to"
            )
        reached += (size - 1) * stride


def check_apart(
    out: torch.Tensor, inputs: Sequence[Any], what: str = "out lies in memory that the call reads"
) -> None:
    """Raise ValueError if a tensor that is written to shares memory with an input. inputs: tensors
    among any arguments. what: begins the error."""
    if out.is_meta:
        return
    for tensor in inputs:
        if isinstance(tensor, torch.Tensor) and tensor.device == out.device:
            if share_memory(out, tensor):
                raise ValueError(f"{what}; accepted: memory of its own")
