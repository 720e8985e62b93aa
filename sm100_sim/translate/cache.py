"""Native code of translated kernels on disk, so that a second process need not translate them.

An entry (`native_cache`) is a header (block functions, guarded instructions) and the object code
that LLVM made. Its name is a digest of everything the code depends on: PTX, kernel, options, CPU,
LLVM and the sources of this package.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite

from sm100_sim.settings import read_settings

from .native_cache import NativeCache

_LENGTH = struct.Struct("<Q")
#: Bytes that the directory may hold before the entries used least recently go.
CACHE_LIMIT = 1 << 30


@functools.cache
def _source_digest() -> bytes:
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.digest()


def entry_name(*parts: Any) -> str:
    """File name of the entry for these parts, sources and LLVM included."""
    digest = hashlib.sha256(_source_digest())
    for part in (llvmlite.__version__, *parts):
        text = repr(part).encode()
        digest.update(_LENGTH.pack(len(text)) + text)
    return digest.hexdigest() + ".o"


def disk_cache() -> NativeCache | None:
    """The entries on disk; None if SM100_SIM_CACHE_DIR is "off"."""
    directory = read_settings().cache_directory
    if directory is None:
        return None
    return NativeCache(Path(directory), "translated kernels", "SM100_SIM_CACHE_DIR")


def obtain(
    name: str, make: Callable[[], tuple[dict[str, Any], bytes]]
) -> tuple[dict[str, Any], bytes]:
    """(header, object code) of an entry; `make` is called for one that cannot be found."""
    cache = disk_cache()
    if cache is None:
        return make()

    def as_parts() -> tuple[dict[str, Any], list[bytes]]:
        header, code = make()
        return header, [code]

    header, (code,), was_there = cache.obtain(name, as_parts)
    if was_there:
        # What is used stays longest. A directory that can only be read keeps all it has.
        with contextlib.suppress(OSError):
            os.utime(cache.directory / name)
    else:
        _prune(cache.directory)
    return header, code


def _prune(directory: Path) -> None:
    entries = []
    for path in directory.glob("*.o"):
        with contextlib.suppress(OSError):  # another process prunes, too
            status = path.stat()
            entries.append((status.st_mtime, status.st_size, path))
    total = 0
    for _, size, path in sorted(entries, reverse=True):
        total += size
        if total > CACHE_LIMIT:
            with contextlib.suppress(OSError):
                path.unlink()
