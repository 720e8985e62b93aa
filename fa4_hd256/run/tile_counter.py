"""The counter of the dynamic tile scheduler, where it is one in global memory
(`fa4_hd256.schedulers.counter`).

A launch leaves it at 0, as it found it, so nothing is zeroed between launches of a stream, and
launches that may run at the same time have one each: every stream its own. A handle of a stream
that was destroyed may come back as another stream's; like PyTorch's allocator, which keeps memory
by stream, this relies on the old one's work being done by then. A captured graph may be replayed
beside anything but itself, so a call in it gets a counter that no other one ever gets; launches of
one call run one after the other. Counters are made `COUNT` at a time, which waits for the device
once; where a graph finds none left, it zeroes one of its own at every replay.
"""

from __future__ import annotations

import threading

import torch

from .kept_tensors import made_to_keep

#: Counters that are made at a time, 16 KiB.
COUNT = 4096

#: cudaStreamPerThread: one handle for a stream of each thread.
_PER_THREAD = 2

_counters: dict[tuple[int, int, int], torch.Tensor] = {}
#: Device -> counters that nobody has.
_free: dict[int, list[torch.Tensor]] = {}
_lock = threading.Lock()


def tile_counter(device: torch.device, stream: int) -> torch.Tensor:
    """Return (1,) int32, 0, that no other launch uses at the same time as one of this call, on this
    stream. stream: PyTorch's current one of the device; any number for the CPU."""
    index = device.index
    if index is None:
        if device.type == "cpu":
            return torch.zeros(1, dtype=torch.int32)
        index = torch.cuda.current_device()
    if torch.cuda.is_current_stream_capturing():
        with _lock:
            if _free.get(index):
                return _free[index].pop()
        return torch.zeros(1, dtype=torch.int32, device=device)
    thread = threading.get_ident() if stream == _PER_THREAD else 0
    key = (index, stream, thread)
    counter = _counters.get(key)
    if counter is None:
        with _lock:
            counter = _counters[key] = _new(index)
    return counter


def _new(index: int) -> torch.Tensor:
    """Return a counter that nobody has, on a device; not while a graph is captured."""
    free = _free.setdefault(index, [])
    if not free:
        device = torch.device("cuda", index)
        free += made_to_keep(lambda: _zeros(device), device)
    return free.pop()


def _zeros(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return `COUNT` new counters."""
    counters = torch.zeros(COUNT, dtype=torch.int32, device=device).split(1)
    # They are handed to any stream, and zero from now on.
    torch.cuda.current_stream(device.index).synchronize()
    return counters
