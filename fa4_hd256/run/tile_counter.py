"""The counter of the dynamic tile scheduler, where it is one in global memory
(`schedulers.counter`).

A launch leaves it at 0, as it found it, so nothing is zeroed between launches of a stream, and
launches that may run at the same time have one each: every stream its own. A handle of a stream
that was destroyed may come back as another stream's; like PyTorch's allocator, which keeps memory
by stream, this relies on the old one's work being done by then. A captured graph may be replayed
beside anything, so a launch in it gets a counter of the graph's own memory, zeroed by the graph.
"""

from __future__ import annotations

import threading

import torch

__all__ = ["tile_counter"]

#: cudaStreamPerThread: one handle for a stream of each thread.
_PER_THREAD = 2

_counters: dict[tuple[int, int, int], torch.Tensor] = {}


def tile_counter(device: torch.device, stream: int) -> torch.Tensor:
    """(1,) int32, 0, that no other launch uses at the same time as one on this stream.

    stream: PyTorch's current one of the device; any number for the CPU.
    """
    if device.type == "cpu" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    index = torch.cuda.current_device() if device.index is None else device.index
    thread = threading.get_ident() if stream == _PER_THREAD else 0
    key = (index, stream, thread)
    found = _counters.get(key)
    if found is None:
        found = _counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return found
