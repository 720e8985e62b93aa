"""What a score_mod reads of global memory, and what of it is compiled in."""

from __future__ import annotations

import math
from typing import Any

import torch

from fa4_hd256.kernels.score_change import (
    MOST_TENSORS,
    SCORE_TENSORS,
    ScoreModClass,
    functions_of,
    is_in_part,
)

__all__ = ["check_tensors", "score_class_of", "score_operand"]

#: Dtypes of such tensors, and what they are called.
DTYPES = {torch.float32: "float32", torch.int32: "int32"}


def check_tensors(tensors: Any, key: str) -> None:
    """A tuple of tensors that kernels can read, for the score_mod of a key.

    Raises TypeError for another kind or dtype, ValueError for too many of them, or one without
    dimensions or elements.
    """
    if not isinstance(tensors, tuple):
        raise TypeError(f"tensors of a ScoreMod is {type(tensors).__name__}; accepted: a tuple")
    most = MOST_TENSORS + is_in_part(key)
    if len(tensors) > most:
        raise ValueError(
            f"a ScoreMod has {len(tensors)} tensors; accepted: up to {most}; stack those of one "
            "shape"
        )
    for number, tensor in enumerate(tensors):
        name = f"tensor {number} of a ScoreMod"
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is {type(tensor).__name__}; accepted: a torch.Tensor")
        if tensor.dtype not in DTYPES:
            accepted = " or ".join(map(str, DTYPES))
            raise TypeError(f"{name} has dtype {tensor.dtype}; accepted: {accepted}")
        if tensor.ndim < 1 or tensor.numel() == 0 or tensor.layout != torch.strided:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and layout {tensor.layout}; accepted: "
                "dense tensors of one or more dimensions, none of them 0"
            )


def score_class_of(
    key: str | None, given: dict[str, torch.Tensor], q: torch.Tensor
) -> ScoreModClass | None:
    """What of a score_mod is compiled in, None without one. key: None for none; given: tensors of
    a call by name, those of `SCORE_TENSORS` among them.

    Raises ValueError for a key that this process does not know, tensors on another device than q,
    or some without a key; else as `check_tensors`.
    """
    tensors = tuple(given[name] for name in SCORE_TENSORS if name in given)
    if key is None:
        if tensors:
            raise ValueError("tensors of a score_mod are given without one; accepted: its key, too")
        return None
    functions_of(key)
    check_tensors(tensors, key)
    for number, tensor in enumerate(tensors):
        if tensor.device != q.device:
            raise ValueError(
                f"tensor {number} of the score_mod is on {tensor.device}; accepted: {q.device}, "
                "like q"
            )
    return ScoreModClass(key, tuple(f"{DTYPES[t.dtype]} {t.ndim}" for t in tensors))


def score_operand(tensor: torch.Tensor) -> torch.Tensor:
    """As kernels read it: contiguous, in place where it is."""
    tensor, shape = tensor.detach().contiguous(), tensor.shape
    # Dimensions of size 1 may carry any stride.
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return tensor.as_strided(shape, strides)
