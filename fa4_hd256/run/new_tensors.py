"""Tensors that every call makes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from ..gpus.devices import is_captured
from .kept_tensors import made_to_keep

__all__ = ["maker"]


def maker(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, is_zero: bool = False
) -> Callable[[], torch.Tensor]:
    """Return the maker of contiguous tensors of a shape, of zeros or of anything.

    It calls `torch.empty_like`, or zeros_like, on one element expanded to the shape: PyTorch reads
    shape, dtype and device of a tensor in half the time that they take as arguments from Python.
    """
    if is_captured(device):
        # What is made now is of the graph's own memory, which nothing may keep.
        make = torch.zeros if is_zero else torch.empty
        return functools.partial(make, tuple(shape), dtype=dtype, device=device)
    like = torch.zeros_like if is_zero else torch.empty_like
    model = _element(dtype, device).expand(tuple(shape))
    return functools.partial(like, model, memory_format=torch.contiguous_format)


@functools.cache
def _element(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Nobody reads what it holds."""
    return made_to_keep(lambda: torch.empty((), dtype=dtype, device=device), device)
