"""Results of other projects' functions, written to their `out=` in any layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..call.memory import check_out, tma_can_take
from ..call.process import is_intercepted


def written_to(out: Any, q: torch.Tensor, attend: Callable[..., Any], wants_lse: bool) -> Any:
    """Call `attend` with out and return_lse, and return out, or (out, lse).

    out: like q, or None for a new tensor. Kernels write to it if they can take its layout, else the
    result is copied. A graph that is being traced has no addresses to check, so there only such
    layouts are accepted. attend: a function of attention with all its other arguments.

    Raises TypeError or ValueError for an out of another kind, dtype, shape or device.
    """
    if not isinstance(out, torch.Tensor) or is_intercepted() or tma_can_take(out):
        given = {} if out is None else {"out": out}
        return attend(return_lse=wants_lse, **given)
    check_out(out, q)
    result = attend(return_lse=wants_lse)
    return (out.copy_(result[0]), result[1]) if wants_lse else out.copy_(result)
