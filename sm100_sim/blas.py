"""One thread for numpy's matrix products while a kernel runs.

The products of tcgen05.mma are small (128 x 128 x 256 takes a tenth of a millisecond), so a second
thread gains little on an idle machine; on a busy one its spinning makes a run several times slower.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

_PREFIXES, _SUFFIXES = ("scipy_openblas", "openblas"), ("64_", "")


@functools.cache
def _thread_functions() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """(get, set) of the number of threads of the OpenBLAS that numpy's wheel brings, if it does."""
    folder = Path(np.__file__).parent
    places = (folder.parent / "numpy.libs", folder / ".libs")
    for library in (path for place in places for path in sorted(place.glob("*openblas*"))):
        loaded = ctypes.CDLL(str(library))
        for prefix in _PREFIXES:
            for suffix in _SUFFIXES:
                get = getattr(loaded, f"{prefix}_get_num_threads{suffix}", None)
                put = getattr(loaded, f"{prefix}_set_num_threads{suffix}", None)
                if get is not None and put is not None:
                    return get, put
    return None


@contextlib.contextmanager
def single_threaded() -> Iterator[bool]:
    """While active, numpy's products take one thread; yields whether that could be arranged.

    With another BLAS than the OpenBLAS of numpy's wheels nothing changes.
    """
    functions = _thread_functions()
    if functions is None:
        yield False
        return
    get, put = functions
    before = get()
    put(1)
    try:
        yield True
    finally:
        put(before)
