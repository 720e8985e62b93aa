"""`out=` of functions of other projects, which lay it out as they like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..call.memory import check_out, tma_can_take
from ..call.process import is_intercepted

__all__ = ["written_to"]


def written_to(out: Any, q: torch.Tensor, attend: Callable[..., Any], wants_lse: bool) -> Any:
    """Return out, or (out, lse), of `attend`: a function of attention with all its arguments but
    out and return_lse.

    out: like q, to which the result is written, by the kernels themselves in the layouts that the
    function's own `out=` accepts, else by a copy; None for a new tensor. In a graph that is being
    traced there is no address to look at, and such layouts are the only ones.

    Raises TypeError for an out of another kind or dtype, ValueError for another shape or device,
    and as `attend` does.
    """
    if not isinstance(out, torch.Tensor) or is_intercepted() or tma_can_take(out):
        given = {} if out is None else {"out": out}
        return attend(return_lse=wants_lse, **given)
    check_out(out, q)
    result = attend(return_lse=wants_lse)
    if wants_lse:
        found, lse = result
        return out.copy_(found), lse
    return out.copy_(result)
