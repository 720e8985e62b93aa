"""Windows as users give them, and as operators' schemas take them."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..kernels.mask.windows import Window
from ..words import shown
from .plain_numbers import plain

__all__ = ["LARGEST_BOUND", "UNBOUNDED", "ExactWindow", "bounds_of_operator", "window_of"]

#: A side without a bound, in an operator's schema. No bound of `window_of` is as small.
UNBOUNDED = -(1 << 40)
#: The largest bound that differs from none, and of negative ones the smallest: more rows than a
#: sequence has. Larger ones mean the same.
LARGEST_BOUND = 1 << 39
#: An empty window: no query sees any key.
_EMPTY: Window = (None, -LARGEST_BOUND)


class ExactWindow(NamedTuple):
    """A window_size whose -1 is a bound, as flash-attention 4 means it; None for unbounded."""

    left: int | None
    right: int | None


def window_of(window_size: Any, causal: bool = False) -> Window:
    """Return (left, right), None for unbounded, from a window_size as users give it.

    -1 means unbounded, except in an `ExactWindow`; any other negative number is a bound. causal
    sets right to 0. An empty window, left + right < 0, is always the same one.

    Raises TypeError for a side that is no int, ValueError for what is no pair.
    """
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"window_size is {shown(window_size)}; accepted: a pair (left, right)")
    sides = [plain(side) for side in window_size]
    for side in sides:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int)):
            raise TypeError(
                f"window_size is {shown(window_size)}; each side must be an int or None"
            )
        if side is not None and not -(1 << 63) <= side < 1 << 63:
            raise ValueError(
                f"a side of window_size is {side}; accepted: a number that fits into 64 bits"
            )
    none = None if isinstance(window_size, ExactWindow) else -1
    left, right = (None if side is None or side == none else _bound(side) for side in sides)
    if causal:
        right = 0
    is_empty = left is not None and right is not None and left + right < 0
    return _EMPTY if is_empty else (left, right)


def _bound(side: int) -> int:
    return max(min(side, LARGEST_BOUND), -LARGEST_BOUND)


def bounds_of_operator(window: Window) -> tuple[int, int]:
    """Return a window as operators' schemas take it: `UNBOUNDED` for None."""
    left, right = (UNBOUNDED if side is None else side for side in window)
    return left, right
