"""What is known of tensors as long as nobody writes to them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["UntilChanged"]


class UntilChanged:
    """A value by tensor, while this lives and is not changed in place. Nothing is kept of inference
    tensors: PyTorch does not count the changes of these."""

    def __init__(self, most: int | None = None) -> None:
        """most: values that are kept, of which the oldest goes first; None: of all tensors."""
        self._kept, self._most = WeakTensorKeyDictionary(), most

    def __setitem__(self, tensor: torch.Tensor, value: Any) -> None:
        self._kept.pop(tensor, None)
        if tensor.is_inference():
            return
        if self._most is not None:
            while len(self._kept) >= self._most:
                del self._kept[next(iter(self._kept.keys()))]
        self._kept[tensor] = tensor._version, value

    def get(self, tensor: torch.Tensor) -> Any:
        """None where nothing is known, or no longer."""
        if tensor not in self._kept:
            return None
        version, value = self._kept[tensor]
        return value if version == tensor._version else None
