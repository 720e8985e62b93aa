"""Memory that a test process holds between modules, and its release."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import sys
from pathlib import Path

#: Resident bytes above which `release_above` empties caches. Imports take 0.7 to 1 GiB of them.
LIMIT = 3 << 29
#: Bytes by which a process may grow before `trim_if_grown` trims it again.
GROWTH = 1 << 28
_resident_after_trim = 0


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory; 0 where Linux's /proc is missing."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def release_above(limit: int) -> bool:
    """Empty the caches if more than `limit` bytes are resident, and return True if it did so.

    Kernels and translations are on disk, and are loaded again in half a second. Cached traces and
    replays of the timing model are computed again.
    """
    if resident_bytes() <= limit:
        return False
    from fa4_hd256.plans import forget_plans
    from fa4_hd256.run import compile
    from sm100_sim.launcher import forget_kernels

    forget_plans()
    compile.forget()
    forget_kernels()
    for name, module in list(sys.modules.items()):
        if name.startswith("bench."):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()
    gc.collect()
    return True


def trim() -> None:
    """Return freed memory to the operating system.

    Compilers and the simulator leave gigabytes in pieces on the heap of glibc, which keeps them.
    """
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if release is not None:
        release(0)


def trim_if_grown() -> bool:
    """Trim if the process has grown by `GROWTH` since the last time; return True if it did so."""
    global _resident_after_trim
    if resident_bytes() < _resident_after_trim + GROWTH:
        return False
    trim()
    _resident_after_trim = resident_bytes()
    return True
