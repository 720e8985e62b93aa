"""Memory limit of dS in the backwards of adapters."""

from __future__ import annotations

from typing import Any

import torch

from ..call.process import constant_in_graphs
from ..gpus.family import architecture_of
from ..kernels.kernel_set import kernels_of
from ..words import shown


def check_ds_bytes(ds_bytes: Any) -> None:
    """Raise TypeError unless ds_bytes is an int or None, ValueError if it is below 0."""
    if ds_bytes is None:
        return
    if isinstance(ds_bytes, bool) or not isinstance(ds_bytes, int):
        raise TypeError(f"ds_bytes is {shown(ds_bytes)}; accepted: an int of 0 or more, or None")
    if ds_bytes < 0:
        raise ValueError(f"ds_bytes is {ds_bytes}; accepted: 0 (keep no dS) or more, or None")


@constant_in_graphs
def backward_config_of(ds_bytes: int | None, device: torch.device) -> Any:
    """Return the backward configuration with these ds_bytes on a device; None: the default one."""
    if ds_bytes is None:
        return None
    return kernels_of(architecture_of(device)).config("backward")(ds_bytes=ds_bytes)
