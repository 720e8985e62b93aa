"""Memory that a test process holds between modules, and its release."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path

#: Resident bytes above which `release_above` empties caches. Imports take 0.7 to 1 GiB of them.
LIMIT = 3 << 29
#: Bytes by which a process may grow before it is trimmed, or its caches are emptied, again.
GROWTH = 1 << 28
_resident_after_trim = _resident_after_release = 0


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory; 0 where Linux's /proc is missing."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def release_above(limit: int, forget: Callable[[], None] = lambda: None) -> bool:
    """Empty the simulator's caches, and others by `forget`, if more than `limit` bytes are
    resident, and `GROWTH` more than the last time has left. Return True if it did so.

    Translations are on disk, and are loaded again in half a second. What tests have imported stays:
    it alone may take more than the limit.
    """
    global _resident_after_release
    if resident_bytes() <= max(limit, _resident_after_release + GROWTH):
        return False
    from sm100_sim.launcher import forget_kernels

    forget()
    forget_kernels()
    gc.collect()
    trim()
    _resident_after_release = resident_bytes()
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
