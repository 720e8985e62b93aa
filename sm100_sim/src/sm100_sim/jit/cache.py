"""Native code of translated kernels on disk, so that a second process need not translate them.

An entry (`native_cache`) is a header (block functions, guarded instructions) and the object code
that LLVM made. Its name is a digest of everything the code depends on: PTX, kernel, options, CPU,
LLVM and the meaning of the sources that have a part in translation (`TRANSLATING`). An edit of a
docstring, or of the sanitizer, leaves the entries as they are.
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

#: Folders of the sources whose code says what a kernel is translated to: these import nothing else
#: of the package but a few modules that hold errors, settings and device figures.
TRANSLATING = ("isa", "jit", "native", "ptx", "state", "translate")
_LENGTH = struct.Struct("<Q")
#: Bytes that the directory may hold before the entries used least recently go.
CACHE_LIMIT = 1 << 30
#: Bytes that this process has added to each directory since it looked at all of the files there.
_added: dict[Path, int] = {}


def translating_sources(root: Path = Path(__file__).parents[1]) -> list[tuple[str, bytes]]:
    """Return (path below `root`, content) of the package's sources that have a part in
    translation."""
    paths = sorted(path for folder in TRANSLATING for path in (root / folder).rglob("*.py"))
    return [(path.relative_to(root).as_posix(), path.read_bytes()) for path in paths]


def _source_digest() -> bytes:
    """Return the digest of the sources that translate; empty without a cache, which names no entry
    then."""
    cache = disk_cache()
    return b"" if cache is None else _meaning(cache)


@functools.cache
def _meaning(cache: NativeCache) -> bytes:
    return cache.meaning(translating_sources()).encode()


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


def cache_state() -> str:
    """One line about the directory of translated kernels, for a bug report; it leaves nothing
    behind. Raises ValueError for SM100_SIM_* variables with wrong values."""
    cache = disk_cache()
    if cache is None:
        return "translated kernels are not kept: SM100_SIM_CACHE_DIR is off"
    return f"{cache.contents} in {cache.directory}: {cache.state()}"


def obtain(
    name: str, make: Callable[[], tuple[dict[str, Any], bytes]]
) -> tuple[dict[str, Any], bytes]:
    """Return (header, object code) of an entry; `make` is called for one that cannot be found."""
    cache = disk_cache()
    if cache is None:
        return make()

    def as_parts() -> tuple[dict[str, Any], list[bytes]]:
        header, code = make()
        return header, [code]

    header, (code,), was_there = cache.obtain(name, as_parts)
    if was_there:
        # Used entries stay longest. A directory that can only be read keeps all it has.
        with contextlib.suppress(OSError):
            os.utime(cache.directory / name)
    else:
        _count(cache.directory, len(code))
    return header, code


def _count(directory: Path, size: int) -> None:
    """Prune at a process's first entry, and whenever it has added a 32nd of the limit: looking at
    all files for each entry would cost the square of their number."""
    added = _added.get(directory)
    if added is None or added + size >= CACHE_LIMIT // 32:
        _prune(directory)
        _added[directory] = 0
    else:
        _added[directory] = added + size


def _prune(directory: Path) -> None:
    """Delete the entries used least recently, beyond the limit."""
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
