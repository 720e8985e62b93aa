"""Tensors in global memory that functions of a call read, its score_mod and mask_mod, and the facts
of these that are compiled in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ...kernels.functions.user_functions import ALIBI, FUNCTION_KINDS, SCORE_MOD, FunctionKind
from ...kernels.problem_class import FunctionClass

#: Dtypes of such tensors, and what they are called.
DTYPES = {torch.float32: "float32", torch.int32: "int32"}


def check_tensors(kind: FunctionKind, tensors: Any, key: str) -> None:
    """A tuple of tensors that kernels can read, for a function of a key. Raises TypeError for
    another kind or dtype, ValueError for too many of them, or one without dimensions or
    elements."""
    if not isinstance(tensors, tuple):
        given = type(tensors).__name__
        raise TypeError(f"tensors of a {kind.title} is {given}; accepted: a tuple")
    most = kind.most_tensors(key)
    if len(tensors) > most:
        raise ValueError(
            f"a {kind.title} has {len(tensors)} tensors; accepted: up to {most}; stack those of "
            "one shape"
        )
    for number, tensor in enumerate(tensors):
        name = f"tensor {number} of a {kind.title}"
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


def check_slopes(tensors: tuple[torch.Tensor, ...], heads: int, sequences: int) -> None:
    """Raise ValueError unless ALiBi's slopes are (heads,) or (sequences, heads)."""
    accepted = (heads,), (sequences, heads)
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len(shapes) != 1 or shapes[0] not in accepted:
        given = ", ".join(map(str, shapes)) or "none"
        raise ValueError(
            f"slopes of alibi has shape {given}; accepted: {accepted[0]}, of the query heads, or "
            f"{accepted[1]}, of each sequence and these"
        )


def functions_of_keys(
    keys: Iterable[str | None], given: dict[str, torch.Tensor], q: torch.Tensor
) -> tuple[FunctionClass | None, ...]:
    """Return the compiled-in facts of each of `FUNCTION_KINDS`, None without one. keys: of the
    functions, None for none; given: tensors of a call by name, theirs among them.

    Raises ValueError for a key that this process does not know, tensors on another device than q,
    or some without a key; else as `check_tensors`.
    """
    return tuple(
        _class_of(kind, key, given, q) for kind, key in zip(FUNCTION_KINDS, keys, strict=True)
    )


def _class_of(
    kind: FunctionKind, key: str | None, given: dict[str, torch.Tensor], q: torch.Tensor
) -> FunctionClass | None:
    tensors = tuple(given[name] for name in kind.tensors if name in given)
    if key is None:
        if tensors:
            raise ValueError(
                f"tensors of a {kind.argument} are given without one; accepted: its key, too"
            )
        return None
    kind.functions_of(key)
    check_tensors(kind, tensors, key)
    if kind is SCORE_MOD and key == ALIBI and q.ndim >= 3:  # fewer are refused with the shapes
        offsets = given.get("cu_seqlens_q")
        sequences = q.shape[0] if offsets is None else offsets.numel() - 1
        check_slopes(tensors, q.shape[-2], sequences)
    for number, tensor in enumerate(tensors):
        if tensor.device != q.device:
            raise ValueError(
                f"tensor {number} of the {kind.argument} is on {tensor.device}; accepted: "
                f"{q.device}, like q"
            )
    return FunctionClass(key, tuple(f"{DTYPES[t.dtype]} {t.ndim}" for t in tensors))
