"""Tensors that outlive the call that makes them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

Made = TypeVar("Made")


def made_to_keep(make: Callable[[], Made], device: torch.device) -> Made:
    """Return the result of `make` from another thread, whose modes are PyTorch's defaults.

    A thread may send what it allocates into a memory pool (`torch.cuda.use_mem_pool`; PyTorch's own
    graphs of `torch.compile` do so in their warm-up). Memory of such a pool belongs to who has made
    it: cached, it would keep all of the pool, and be refused as a leak. The stream is the default
    one of the device.

    Not for the capture of a graph, where newly made memory is refused.
    """
    made: Future[Made] = Future()

    def run() -> None:
        is_cuda = device.type == "cuda"
        try:
            with torch.cuda.device(device) if is_cuda else contextlib.nullcontext():
                made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    # Of no pool of threads: those end with the main thread, which others may outlive.
    threading.Thread(target=run, name="fa4_hd256 kept tensors", daemon=True).start()
    return made.result()
