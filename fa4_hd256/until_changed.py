"""What is known of tensors as long as nobody writes to them."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["UntilChanged"]


class UntilChanged:
    """A value by tensor, while this lives and is not changed in place. Nothing is kept of inference
    tensors: PyTorch does not count the changes of these. Nor does it count those by others that
    have the memory, a NumPy array or `.data`, by collectives as `broadcast` and `all_reduce`, by
    kernels of the user's and by replays of CUDA graphs: tensors on the CPU are compared with what
    they were, those on a GPU, which nothing waits for, may not be changed so. For several threads
    at once."""

    def __init__(self, most: int | None = None) -> None:
        """most: values that are kept, of which the oldest goes first; None: of all tensors."""
        self._kept, self._most = WeakTensorKeyDictionary(), most
        self._lock = threading.RLock()

    def __setitem__(self, tensor: torch.Tensor, value: Any) -> None:
        with self._lock:
            self._kept.pop(tensor, None)
            if tensor.is_inference():
                return
            if self._most is not None:
                while len(self._kept) >= self._most:
                    del self._kept[next(iter(self._kept.keys()))]
            self._kept[tensor] = tensor._version, _contents(tensor), value

    def get(self, tensor: torch.Tensor) -> Any:
        """None where nothing is known, or no longer."""
        with self._lock:
            if tensor not in self._kept:
                return None
            version, contents, value = self._kept[tensor]
        is_same = version == tensor._version
        if is_same and contents is not None:
            is_same = torch.equal(contents, tensor)
        return value if is_same else None


def _contents(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy of what a tensor holds, None where nobody looks at it."""
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu":
        return None
    return tensor.detach().clone()
