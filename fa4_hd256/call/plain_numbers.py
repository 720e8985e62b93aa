"""Numbers of calls: those of NumPy, and those that a traced graph knows by a symbol alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["is_sure", "is_unknown", "plain"]

#: No number of rows is greater.
_BEYOND = 1 << 40


def plain(value: Any) -> Any:
    """Return a scalar of NumPy as Python's, anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def is_sure(condition: Any) -> bool:
    """Return a condition, False where it depends on data that a traced graph has not."""
    if isinstance(condition, bool) and not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return bool(guard_or_false(condition))


def is_unknown(number: Any) -> bool:
    """Return True for a number that depends on data, such as one of `Tensor.item` in a graph."""
    if isinstance(number, int) and not torch.compiler.is_compiling():
        return False
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

    return bool(guard_or_true(number > _BEYOND)) and not guard_or_false(number > _BEYOND)
