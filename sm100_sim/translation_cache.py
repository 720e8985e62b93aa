"""Native code of translated kernels on disk, so that a second process need not translate them.

An entry is one file: the length of a JSON header, the header (block functions, guarded
instructions) and the object code that LLVM made. Its name is a digest of everything the code
depends on: PTX, kernel, options, CPU, LLVM and the sources of this package.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import llvmlite

from .settings import read_settings

_LENGTH = struct.Struct("<Q")
#: Bytes that the directory may hold before the entries used least recently go.
CACHE_LIMIT = 1 << 30


@functools.cache
def _source_digest() -> bytes:
    digest = hashlib.sha256()
    root = Path(__file__).parent
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


def load(name: str) -> tuple[dict[str, Any], bytes] | None:
    """(header, object code) of an entry; None if there is none, or it is damaged."""
    directory = read_settings().cache_directory
    if directory is None:
        return None
    path = Path(directory) / name
    try:
        content = path.read_bytes()
        (length,) = _LENGTH.unpack_from(content)
        header = json.loads(content[_LENGTH.size : _LENGTH.size + length])
        os.utime(path)
    except (OSError, ValueError, struct.error):
        return None
    return header, content[_LENGTH.size + length :]


def store(name: str, header: dict[str, Any], code: bytes) -> None:
    """Keep an entry. A directory that cannot be written is no error: the cache stays empty."""
    directory = read_settings().cache_directory
    if directory is None:
        return
    text = json.dumps(header).encode()
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, suffix=".tmp", delete=False) as file:
            file.write(_LENGTH.pack(len(text)) + text + code)
        os.replace(file.name, Path(directory) / name)
        _prune(Path(directory))
    except OSError:
        return


def _prune(directory: Path) -> None:
    entries = sorted(
        ((path.stat().st_mtime, path.stat().st_size, path) for path in directory.glob("*.o")),
        reverse=True,
    )
    total = 0
    for _, size, path in entries:
        total += size
        if total > CACHE_LIMIT:
            path.unlink(missing_ok=True)
