"""The replay's queue of signals: what reaches an mbarrier, and when.

A heap of rows (clock, order, barrier, arrivals, bytes, event) in `Model.signal`;
signals of one clock leave it in the order in which they were queued.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sm100_sim.errors import MissingExtra

try:
    import numba
except ImportError as error:
    raise MissingExtra("the timing model's replay", "timing", error) from error

_HERE = Path(__file__).parent


def compiled(function: Callable) -> Callable:
    """Compile with numba, and keep the code: beside the source, else in the user's cache.

    numba knows the code that it keeps by the file of the function alone, not by those of the
    functions that it calls: it gets a directory for each version of these files.
    No array is created in compiled code, so it needs no reference counts: nine times faster.
    """
    given = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(_directory())
    try:
        return numba.njit(cache=True, _nrt=False)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        # All functions give one text, which Python then shows once.
        warnings.warn(
            "the timing model's replay is compiled in every process (15 s): numba finds no "
            "directory to keep it in. Set NUMBA_CACHE_DIR to one that can be written",
            RuntimeWarning,
            stacklevel=1,
        )
        return numba.njit(_nrt=False)(function)
    finally:
        numba.config.CACHE_DIR = given


def _directory() -> Path:
    """Directory of the code that numba keeps of this version."""
    return Path(numba.config.CACHE_DIR or _HERE / "__pycache__", f"replay-{_version()}")


def compile_once(function: Any, *arguments: Any) -> None:
    """Compile a function of this package for a call with these arguments, in one process while
    others wait, which then load its code.

    numba has no lock: processes that start together would each take 15 s for the same code.
    """
    if getattr(function, "signatures", True):
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # no directory, or one without locks
            file = stack.enter_context(open(_directory() / "compiling.lock", "w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        function.compile(tuple(map(numba.typeof, arguments)))


@functools.cache
def _version() -> str:
    """Digest of the files whose functions are compiled."""
    names = ("engine.py", "products.py", "shared_port.py", "signals.py", "state.py")
    files = (_HERE / name for name in names)
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


#: Rows of the heap.
SIGNALS = 1 << 16
SIGNAL_COLUMNS = 6
# Entries of Model.counts.
SIGNALLED, ORDER = range(2)


@compiled
def push(m):
    """Add a signal to the heap."""
    heap, counts = m.signal, m.counts
    here = counts[SIGNALLED]
    counts[SIGNALLED] = here + 1
    heap[here, 1] = counts[ORDER]
    counts[ORDER] += 1
    while here > 0:
        above = (here - 1) // 2
        if heap[above, 0] < heap[here, 0] or (
            heap[above, 0] == heap[here, 0] and heap[above, 1] < heap[here, 1]
        ):
            break
        for field in range(SIGNAL_COLUMNS):
            heap[above, field], heap[here, field] = heap[here, field], heap[above, field]
        here = above


@compiled
def drop(m):
    """Remove the first signal of the heap."""
    heap, counts = m.signal, m.counts
    counts[SIGNALLED] -= 1
    size = counts[SIGNALLED]
    for field in range(SIGNAL_COLUMNS):
        heap[0, field] = heap[size, field]
    here = 0
    while True:
        least = here
        for below in (2 * here + 1, 2 * here + 2):
            if below < size and (
                heap[below, 0] < heap[least, 0]
                or (heap[below, 0] == heap[least, 0] and heap[below, 1] < heap[least, 1])
            ):
                least = below
        if least == here:
            return
        for field in range(SIGNAL_COLUMNS):
            heap[least, field], heap[here, field] = heap[here, field], heap[least, field]
        here = least


@compiled
def signal(m, clock, barrier, arrivals, nbytes, event):
    """Queue a signal."""
    row = m.signal[m.counts[SIGNALLED]]
    row[0], row[2], row[3], row[4], row[5] = clock, barrier, arrivals, nbytes, event
    push(m)
