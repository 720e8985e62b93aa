"""Checks of the arguments of `fa4_hd256.masks`."""

from __future__ import annotations

from typing import Any

import torch

from ..words import shown
from .memory import check_device
from .options import plain

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
#: Of any number that counts rows.
LARGEST = (1 << 31) - 1


def check_whole(name: str, given: Any, least: int = 0, accepted: str = "") -> None:
    """An int from `least` up. Raises TypeError for another kind, ValueError for another one."""
    accepted = accepted or f"an int, {least} or more"
    given = plain(given)
    if isinstance(given, bool) or not isinstance(given, int):
        raise TypeError(f"{name} is {shown(given)}; accepted: {accepted}")
    if not least <= given <= LARGEST:
        raise ValueError(f"{name} is {given}; accepted: {least} to {LARGEST}")


def check_integers(name: str, given: Any, ranks: tuple[int, ...], accepted: str) -> None:
    """A dense tensor of integers that is not empty. accepted: its shapes, of such ranks. Raises
    TypeError for another kind or dtype, ValueError for another shape."""
    if not isinstance(given, torch.Tensor) or given.dtype not in _INTEGERS:
        kind = given.dtype if isinstance(given, torch.Tensor) else type(given).__name__
        raise TypeError(f"{name} is {kind}; accepted: a tensor of integers, {accepted}")
    if given.is_nested or given.layout != torch.strided:
        raise ValueError(f"{name} is nested or of layout {given.layout}; accepted: dense tensors")
    if given.ndim not in ranks or given.numel() == 0:
        raise ValueError(
            f"{name} has shape {tuple(given.shape)}; accepted: {accepted}, none of them 0"
        )


def check_offsets(offsets: tuple[Any, Any], lengths: tuple[int, int], device: torch.device) -> None:
    """Check the offsets of packed sequences, queries' and keys', in a mask of these lengths on a
    device. Raises TypeError for another kind or dtype, ValueError for another shape or device, and
    on the CPU for other contents."""
    for name, given, length in zip(("cu_seqlens_q", "cu_seqlens_k"), offsets, lengths, strict=True):
        check_integers(name, given, (1,), "(batch + 1,)")
        check_device(name, given.device, device, "block_mask")
        if device.type == "cpu":
            falls = bool((given.long().diff() < 0).any())
            if falls or given[0] != 0 or given[-1] > length:
                raise ValueError(
                    f"{name} is {given.tolist()}; accepted: offsets that ascend from 0, to "
                    f"{length} at most, as the mask has"
                )
    counts = [given.numel() for given in offsets]
    if counts[0] != counts[1] or counts[0] < 2:
        raise ValueError(
            f"cu_seqlens_q has {counts[0]} offsets, cu_seqlens_k {counts[1]}; accepted: as many, "
            "one more than there are sequences, 1 or more of these"
        )
