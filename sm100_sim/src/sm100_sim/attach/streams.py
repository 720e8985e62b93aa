"""Streams of the simulated device: their handles, and PyTorch's current one.

Launches are synchronous, so that a stream is its handle. Handles tell what a capture of a CUDA
graph records (`graphs`).
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

#: Handle of the default stream.
DEFAULT = 0
#: Handles by which the CUDA API names the default stream, per thread or not.
DEFAULTS = frozenset({DEFAULT, 1, 2})

_handles = itertools.count(0x1000, 0x10)
_current = [DEFAULT]


def new() -> int:
    """Return the handle of a new stream."""
    return next(_handles)


def handle(stream: Any) -> int:
    """Return the handle of a stream as cuda.bindings takes it; None is the default stream."""
    return DEFAULT if stream is None else int(stream)


def current() -> int:
    """Return the handle of the stream on which PyTorch's operators run."""
    return _current[0]


def set_current(stream: int) -> None:
    """Let PyTorch's operators run on a stream, and what tvm-ffi launches on its environment's."""
    _current[0] = stream
    if "tvm_ffi" in sys.modules:
        import tvm_ffi

        tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), stream).__enter__()
