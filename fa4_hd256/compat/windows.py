"""Windows of other libraries."""

from __future__ import annotations

from typing import Any

import torch

from ..call.options import sides_of
from ..kernels.mask.windows import Window


def window_of(window_size: Any) -> Window:
    """Return a window of flash-attention 2 or 3, where negative means unbounded, as ours. Raises as
    `call.options.sides_of` does."""
    left, right = (None if side is None or side < 0 else side for side in sides_of(window_size))
    return left, right


def seen_in_window(ahead: torch.Tensor, window: Window) -> torch.Tensor:
    left, right = window
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if left is not None:
        seen = seen & (ahead >= -left)
    return seen if right is None else seen & (ahead <= right)
