"""Tensors that outlive the call that makes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["made_to_keep"]

Made = TypeVar("Made")


def made_to_keep(make: Callable[[], Made], device: torch.device) -> Made:
    """What `make` returns, from another thread, whose modes are PyTorch's defaults.

    A thread may send what it allocates into a memory pool (`torch.cuda.use_mem_pool`; PyTorch's
    own graphs of `torch.compile` do so in their warm-up). Memory of such a pool belongs to who has
    made it: kept, it would keep all of the pool, and be refused as a leak. The stream is the
    default one of the device.

    Not for the capture of a graph, where memory that is made anew is refused.
    """
    made = _Made(make, device)
    thread = threading.Thread(target=made, name="fa4_hd256 kept tensors", daemon=True)
    thread.start()
    thread.join()
    if made.error is not None:
        raise made.error
    return made.value


class _Made:
    """What a thread makes, or raises."""

    def __init__(self, make: Callable[[], Any], device: torch.device) -> None:
        self._make, self._device = make, device
        self.value: Any = None
        self.error: BaseException | None = None

    def __call__(self) -> None:
        try:
            if self._device.type == "cuda":
                with torch.cuda.device(self._device):
                    self.value = self._make()
            else:
                self.value = self._make()
        except BaseException as error:
            self.error = error
