"""Cast what a call is given as autocast does with PyTorch's own attention."""

from __future__ import annotations

from typing import Any

import torch

from ..private_torch import is_any_autocast

#: Return True if autocast is on for some type of devices.
is_autocasting = is_any_autocast

#: Dtypes that autocast casts.
_CAST: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
_HALF = (torch.float16, torch.bfloat16)


def autocast(*tensors: Any, fixed: torch.Tensor | None = None) -> tuple[Any, ...]:
    """Return tensors of a call, cast to autocast's dtype where autocast is on for their device.

    fixed: a tensor of the call that is never cast, such as a cache or out; in half precision its
    dtype is taken instead, for tensors in float32 alone. Keys and values in float8_e4m3fn, float64
    and what is no tensor stay as they are.
    """
    first = next((tensor for tensor in tensors if isinstance(tensor, torch.Tensor)), None)
    if first is None or not _is_on(first.device.type):
        return tensors
    dtype, cast = torch.get_autocast_dtype(first.device.type), _CAST
    if isinstance(fixed, torch.Tensor):
        cast = _CAST[:1]
        dtype = fixed.dtype if fixed.dtype in _HALF else dtype
    return tuple(
        [
            tensor.to(dtype)
            if isinstance(tensor, torch.Tensor) and tensor.dtype in cast
            else tensor
            for tensor in tensors
        ]
    )


def _is_on(device_type: str) -> bool:
    return device_type in ("cpu", "cuda") and torch.is_autocast_enabled(device_type)
