"""Cache of facts of tensors, valid until somebody writes to them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ... import environment
from ..process import is_stood_in, without_modes


class UntilChanged:
    """Values by tensor, each valid while the tensor lives and nobody changes it in place.

    Nothing is kept of a call inside a mode or a transform of torch.func, where new tensors are
    stand-ins.

    PyTorch counts changes of a tensor, but not all: not those of inference tensors, for which
    nothing is cached, nor those through other holders of the memory (a NumPy array, `.data`), by
    collectives (`broadcast`, `all_reduce`), by kernels of the user's and by replays of CUDA graphs.
    Tensors on the CPU are therefore compared with a copy, those on a GPU with FA4_HD256_CHECK=1,
    too. Without it a user must not change tensors on a GPU in these ways. Lengths that changed so
    are noticed by the kernels that use them (`kernels.small.tail_rows`, NOTE [wrong lengths]); a
    mask of packed rows is not. Safe for several threads at once.
    """

    def __init__(self, most: int | None = None) -> None:
        """most: cached values, the oldest dropped first; None: of all tensors."""
        self._kept, self._most = WeakTensorKeyDictionary(), most
        self._lock = threading.RLock()

    def __setitem__(self, tensor: torch.Tensor, value: Any) -> None:
        if tensor.is_inference() or is_stood_in():
            return
        with self._lock:
            self._kept.pop(tensor, None)
            if self._most is not None:
                while len(self._kept) >= self._most:
                    del self._kept[next(iter(self._kept.keys()))]
            self._kept[tensor] = tensor._version, _contents(tensor), value

    def get(self, tensor: torch.Tensor) -> Any:
        """Return the fact of a tensor, None where it is unknown or no longer valid."""
        with self._lock:
            if tensor not in self._kept:
                return None
            version, contents, value = self._kept[tensor]
        is_same = version == tensor._version
        if is_same and contents is not None:
            with without_modes():
                is_same = torch.equal(contents, tensor)
        return value if is_same else None

    def made(self, tensor: torch.Tensor, make: Callable[[], Any], key: Hashable = None) -> Any:
        """Return what is known of a tensor by a key, else what `make` returns, which is then known.
        Tensors that are made are no inference tensors, which a later training could not save."""
        known = self.get(tensor) or {}
        if key not in known:
            with torch.inference_mode(False):
                known = {**known, key: make()}
            self[tensor] = known
        return known[key]


def _contents(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy of what a tensor holds, None where nobody looks at it."""
    if type(tensor) is not torch.Tensor:
        return None
    if tensor.device.type != "cpu" and not environment.checks_contents():
        return None
    return tensor.detach().clone()
