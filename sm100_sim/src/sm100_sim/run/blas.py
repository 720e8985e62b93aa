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
def _openblas() -> tuple[ctypes.CDLL, str, str] | None:
    """Return (library, prefix, suffix of its symbols) of the OpenBLAS of numpy's wheel, if it has
    one."""
    folder = Path(np.__file__).parent
    places = (folder.parent / "numpy.libs", folder / ".libs")
    for library in (path for place in places for path in sorted(place.glob("*openblas*"))):
        loaded = ctypes.CDLL(str(library))
        for prefix in _PREFIXES:
            for suffix in _SUFFIXES:
                if getattr(loaded, f"{prefix}_set_num_threads{suffix}", None) is not None:
                    return loaded, prefix, suffix
    return None


@functools.cache
def _thread_functions() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """Return (get, set) of the number of threads of that OpenBLAS."""
    found = _openblas()
    if found is None:
        return None
    library, prefix, suffix = found
    names = (f"{prefix}_{verb}_num_threads{suffix}" for verb in ("get", "set"))
    get, put = (getattr(library, name, None) for name in names)
    return (get, put) if get is not None and put is not None else None


@functools.cache
def sgemm() -> tuple[int, bool]:
    """Return (address of cblas_sgemm, whether its integers have 64 bits) of that OpenBLAS; 0 if
    none.

    It is the routine that numpy's own float32 products call.
    """
    found = _openblas()
    if found is None:
        return 0, False
    library, prefix, suffix = found
    prefix = prefix.removesuffix("openblas")
    function = getattr(library, f"{prefix}cblas_sgemm{suffix}", None)
    if function is None:
        return 0, False
    return ctypes.cast(function, ctypes.c_void_p).value or 0, suffix == "64_"


@contextlib.contextmanager
def single_threaded() -> Iterator[bool]:
    """Give numpy's matrix products one thread; yield True if that could be arranged.

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
