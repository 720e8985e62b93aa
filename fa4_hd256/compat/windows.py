"""Windows of flash-attention 2 and 3."""

from __future__ import annotations

from typing import Any

__all__ = ["window_of"]


def window_of(window_size: Any) -> tuple[int | None, int | None]:
    """Return a window in which any negative number is unbounded as our functions take it."""
    left, right = (int(side) for side in window_size)
    return None if left < 0 else left, None if right < 0 else right
