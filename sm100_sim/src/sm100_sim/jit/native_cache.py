"""Files of native code in a cache directory: whom to trust, how to write them, who makes them.

sm100_sim and fa4_hd256 share this file by a link.

An entry is one file: the SHA-256 of all that follows; the length of a JSON header (eight bytes,
little-endian); the header, with the entry's name, what the caller adds, and the sizes of the parts;
the parts one after the other. A damaged or misplaced file is thus never taken for an entry. A file
appears under its name only when complete, by a rename, and is replaced by another, so that readers
need no lock and see one version or the other. Whatever the directory does not allow (writing,
locks, space) costs time and one warning, never a result.

What an entry was made by is part of its name as a digest of the meaning of the sources: neither
comments nor docstrings nor line numbers are in it.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import stat
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LENGTH = struct.Struct("<Q")
#: Seconds after which temporary files and lock files are taken for left over.
_LEFT_OVER = 86400.0

_warned: set[tuple[Path, str]] = set()
#: Directories that this process has swept: listing all files at each write would cost the square
#: of their number.
_swept: set[Path] = set()


@dataclass(frozen=True)
class NativeCache:
    """The entries in one directory.

    contents: what is kept, for messages ("compiled kernels"); variable: the environment variable
    that names the directory.
    """

    directory: Path
    contents: str
    variable: str

    def obtain(
        self, name: str, make: Callable[[], tuple[dict[str, Any], list[bytes]]]
    ) -> tuple[dict[str, Any], list[bytes], bool]:
        """Return (header, parts, whether it was there) of an entry, made and kept if it is not
        there.

        One process makes it while others that want it wait.
        """
        found = self.read(name)
        if found is not None:
            return *found, True
        with self.exclusive(name):
            found = self.read(name)
            if found is not None:
                return *found, True
            made = make()
            self.write(name, *made)
        return *made, False

    def read(self, name: str) -> tuple[dict[str, Any], list[bytes]] | None:
        """Return (what `write` was given, parts) of an entry.

        None if there is none, or it is damaged, or somebody else could have written it.
        """
        if not self._is_trusted():
            return None
        path = self.directory / name
        try:
            # Without O_NONBLOCK a FIFO put there would never open.
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with open(file, "rb") as opened:
                # Of the open file: nobody can exchange it between this check and its use.
                reason = writable_by_others(os.fstat(file))
                if reason is None:
                    return _unpacked(name, opened.read())
        except OSError:
            return None
        self._warn(f"{path} is not used: {reason}; delete it")
        return None

    def write(self, name: str, header: dict[str, Any], parts: Sequence[bytes]) -> None:
        """Keep an entry, whatever was there under its name; without effect where that fails."""
        content = _packed(name, header, parts)
        try:
            if self._is_trusted(create=True):
                self._sweep()
                self._replace(name, content)
        except OSError as error:
            self._warn(
                f"{self.contents} cannot be kept in {self.directory}: {error.strerror or error}; "
                f"they are made again in every process. Set {self.variable} to a directory that "
                "can be written"
            )

    def meaning(self, sources: Sequence[tuple[str, bytes]]) -> str:
        """`meaning_of` the sources, kept here by their bytes: parsing them takes half a second."""
        digest = hashlib.sha256(sys.version.encode())
        for name, content in sources:
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        entry = f"{digest.hexdigest()}.sources"
        found = self.read(entry)
        if found is not None:
            return found[0]["meaning"]
        meaning = meaning_of(sources)
        self.write(entry, {"meaning": meaning}, [])
        return meaning

    @contextlib.contextmanager
    def exclusive(self, name: str) -> Iterator[None]:
        """One process at a time may make the entry; those that waited then find it.

        Where the directory allows no lock, every process makes its own: the same entry.
        """
        with contextlib.ExitStack() as stack:
            while (file := self._lock_file(name)) is not None:
                stack.callback(_release, file)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX)
                except OSError as error:
                    self._warn(
                        f"{self.directory} is on a file system without locks "
                        f"({error.strerror or error}): processes that start together each make "
                        f"the same {self.contents}. Set {self.variable} to a directory on a local "
                        "disk"
                    )
                    break
                if self._is_current(name, file):
                    break
            yield

    def state(self) -> str:
        """One line about the directory, for a bug report. It leaves nothing behind."""
        try:
            status = os.stat(self.directory)
        except FileNotFoundError:
            return "not there yet"
        except OSError as error:
            return f"cannot be used: {error.strerror}"
        facts = [f"owner {status.st_uid}", f"mode {stat.S_IMODE(status.st_mode):04o}"]
        reason = writable_by_others(status)
        if reason is not None:
            return ", ".join([*facts, f"not used: {reason}"])
        try:
            with tempfile.TemporaryFile(dir=self.directory) as file:
                facts.append("writable")
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                facts.append("locks work")
        except OSError as error:
            what = "no locks" if "writable" in facts else "not writable"
            facts.append(f"{what} ({error.strerror})")
        return ", ".join(facts)

    def _is_trusted(self, create: bool = False) -> bool:
        """Return True if the directory is there and nobody else can write it; create: make it
        first.

        Raises OSError if it cannot be made.
        """
        if create:
            _make(self.directory)
        try:
            status = os.stat(self.directory)
        except OSError:
            return False
        if not stat.S_ISDIR(status.st_mode):
            return False
        reason = writable_by_others(status)
        if reason is not None:
            self._warn(
                f"{self.directory} is not used: {reason}, and native code would be loaded from it. "
                f"Set {self.variable} to a directory of your own, for instance a new one in it, or "
                "let nobody else write it (chmod go-w)"
            )
        return reason is None

    def _lock_file(self, name: str) -> int | None:
        """Descriptor of the entry's lock file, None where there can be none."""
        try:
            if not self._is_trusted(create=True):
                return None
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            return os.open(self.directory / f"{name}.lock", flags, 0o600)
        except OSError:
            return None  # nothing can be written here, which `write` says

    def _is_current(self, name: str, file: int) -> bool:
        """Return True if a lock file that was waited for is still the entry's: newcomers lock the
        file that has the name."""
        with contextlib.suppress(OSError):
            os.utime(file)  # so that nobody sweeps a lock that has just been taken
        try:
            return os.path.samestat(os.fstat(file), os.stat(self.directory / f"{name}.lock"))
        except OSError:
            return False

    def _replace(self, name: str, content: bytes) -> None:
        """Write a file beside its place, for its owner alone, and rename it."""
        descriptor, temporary = tempfile.mkstemp(".tmp", f"{name}.", self.directory)
        try:
            # Closing may fail too: file systems on a network write late.
            with open(descriptor, "wb") as file:
                file.write(content)
            os.replace(temporary, self.directory / name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _sweep(self) -> None:
        """Delete what processes that were killed left behind, and digests of sources; once in a
        process.

        A lock file that has been in use for so long may go too: then two processes make the same
        entry.
        """
        if self.directory in _swept:
            return
        _swept.add(self.directory)
        oldest = time.time() - _LEFT_OVER
        for pattern in ("*.tmp", "*.lock", "*.sources"):
            for path in self.directory.glob(pattern):
                with contextlib.suppress(OSError):
                    if path.stat().st_mtime < oldest:
                        path.unlink()

    def _warn(self, message: str) -> None:
        """Warn once for each directory and message."""
        if (self.directory, message) not in _warned:
            _warned.add((self.directory, message))
            warnings.warn(message, RuntimeWarning, stacklevel=4)


def meaning_of(sources: Sequence[tuple[str, bytes]]) -> str:
    """Hexadecimal digest of what Python sources, (name, content) each, mean: of their syntax trees
    without string statements (docstrings), comments and positions.

    Trees differ between versions of Python. Raises SyntaxError for a source that is no Python.
    """
    digest = hashlib.sha256()
    for name, content in sources:
        tree = ast.parse(content, name)
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                body[:] = [statement for statement in body if not _is_text(statement)]
        text = ast.dump(tree)
        digest.update(f"{name}\0{len(text)}\0{text}".encode())
    return digest.hexdigest()


def _is_text(statement: ast.stmt) -> bool:
    """Return True if a statement is a string and nothing else."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def writable_by_others(status: os.stat_result) -> str | None:
    """Return why a user other than this one and root could have written a file or directory, else
    None.

    In a directory with the sticky bit others cannot touch what is not theirs. Groups count as
    others whoever is in them: that cannot be known where accounts come over a network.
    """
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {status.st_uid}"
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISDIR(status.st_mode) and mode & stat.S_ISVTX:
        return None
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        who = "everybody" if mode & stat.S_IWOTH else "its group"
        return f"{who} may write it (mode {mode:04o})"
    return None


def _make(directory: Path) -> None:
    """Make a directory and its parents for this user alone, whatever the umask."""
    if not directory.parent.exists():
        _make(directory.parent)
    directory.mkdir(mode=0o700, exist_ok=True)


def _release(file: int) -> None:
    """Unlock and close. Closing alone would leave the lock to a child forked meanwhile."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)
    with contextlib.suppress(OSError):
        os.close(file)


def _packed(name: str, header: dict[str, Any], parts: Sequence[bytes]) -> bytes:
    described = {"name": name, "sizes": [len(part) for part in parts], "header": header}
    text = json.dumps(described).encode()
    content = b"".join((_LENGTH.pack(len(text)), text, *parts))
    return hashlib.sha256(content).digest() + content


def _unpacked(name: str, content: bytes) -> tuple[dict[str, Any], list[bytes]] | None:
    """The caller's header and the parts of a file's content, None if it is not that entry."""
    size = hashlib.sha256().digest_size
    if hashlib.sha256(content[size:]).digest() != content[:size]:
        return None
    (length,) = _LENGTH.unpack_from(content, size)
    start = size + _LENGTH.size + length
    described = json.loads(content[size + _LENGTH.size : start])
    if described["name"] != name:
        return None
    ends = list(itertools.accumulate(described["sizes"], initial=start))
    parts = [content[begin:end] for begin, end in itertools.pairwise(ends)]
    return described["header"], parts
