"""Kernels built ahead of time, in a directory that only is read (`python -m fa4_hd256 build`).

A prebuilt directory has one entry a kernel, as `native_cache` keeps them, and a manifest, an entry
without parts: what the kernels were made of and for, and the name of each. It is checked as a whole
when it is opened, and each file when it is read. Whatever does not fit is an error, never a reason
to compile in silence: who ships a directory wants its kernels to be used.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import environment
from ...architectures import named
from ...package_name import package_version
from ...words import shown
from ..keys import COMPILER, content_digest, cpu_features
from ..native_cache import NativeCache, writable_by_others

#: Raised whenever the manifest or an entry changes its meaning.
FORMAT = 1

#: Name of the manifest's entry.
MANIFEST = "manifest"

_PACKAGE = "fa4-hd256"

#: What of a CPU's features, as Linux names them, a compiler may use in host code; the others tell
#: of the kernel, of power and of virtual machines.
_INSTRUCTION_SETS = re.compile(
    r"(s?sse\d?(_\d)?|avx.*|fma4?|f16c|bmi[12]|abm|popcnt|movbe|adx|aes|vaes|pclmulqdq|vpclmulqdq|"
    r"gfni|sha_ni|cx16|asimd.*|sve.*|atomics|fphp|fp|crc32)"
)


@dataclass(frozen=True)
class Prebuilt:
    """A directory of prebuilt kernels that fits this process. kernels: key -> what is told of it:
    its kind, target and so on; manifest: all of what was written beside them; stamp: of its file,
    another one where somebody has built since."""

    directory: Path
    manifest: Mapping[str, Any]
    stamp: tuple[int, int] | None = None

    @classmethod
    def open(cls, directory: str | os.PathLike) -> Prebuilt:
        """Raises ValueError, with what to do, for a directory that cannot be used."""
        place = path_of(directory)
        stamp = _stamp(place)
        found = read_manifest(place)
        if found is None:
            raise ValueError(
                f"{place} holds no prebuilt kernels: it has no manifest; accepted: a directory "
                f"that `{build_into(place)}` made"
            )
        _check_identity(place, found)
        return cls(place, found, stamp)

    @property
    def kernels(self) -> Mapping[str, Mapping[str, Any]]:
        return self.manifest["kernels"]

    @property
    def targets(self) -> list[str]:
        return sorted({kernel["target"] for kernel in self.kernels.values()})

    def read(self, key: str) -> tuple[dict[str, Any], list[bytes]] | None:
        """The entry of a kernel; None for one that was not built. Raises RuntimeError for a file
        that is missing or damaged, or that others may write."""
        if key not in self.kernels:
            return None
        found = storage(self.directory).read(f"{key}.kernel")
        if found is None:
            path = self.directory / f"{key}.kernel"
            raise RuntimeError(
                f"{path}, a prebuilt {self.kernels[key]['kind']}, {_why_unreadable(path)}. Build "
                "the directory again (`python -m fa4_hd256 build`), or copy it again"
            )
        return found

    def describe(self) -> str:
        return f"{len(self.kernels)} prebuilt kernels for {', '.join(self.targets)}"


def storage(directory: Path) -> NativeCache:
    """The entries of a directory."""
    return NativeCache(directory, "prebuilt kernels", environment.PREBUILT.name)


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """The manifest of a directory, None where it has none. Raises ValueError for a directory that
    is not there, may be written by others, or has a damaged one."""
    try:
        status = os.stat(directory)
    except OSError as error:
        raise ValueError(
            f"{directory} holds no prebuilt kernels: {error.strerror}; accepted: a directory that "
            f"`{build_into(directory)}` made"
        ) from error
    reason = writable_by_others(status)
    if reason is not None:
        raise ValueError(
            f"{directory} is not used: {reason}, and native code would be loaded from it. Let root "
            "or this user own it, and nobody else write it (chmod go-w)"
        )
    path = directory / MANIFEST
    if not path.exists():
        return None
    found = storage(directory).read(MANIFEST)
    if found is None:
        raise ValueError(
            f"{path} {_why_unreadable(path)}. Delete {directory} and build it again "
            f"(`{build_into(directory)}`), or copy it again"
        )
    return found[0]


def _stamp(directory: Path) -> tuple[int, int] | None:
    try:
        status = (directory / MANIFEST).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino


def _why_unreadable(path: Path) -> str:
    """Return why a file that is no entry cannot be read."""
    try:
        reason = writable_by_others(path.stat())
        with path.open("rb"):
            return f"is not used: {reason}" if reason else "is damaged"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def identity() -> dict[str, Any]:
    return {
        "format": FORMAT,
        _PACKAGE: package_version(),
        COMPILER: importlib.metadata.version(COMPILER),
        "machine": platform.machine(),
    }


def build_into(place: Path, *options: str) -> str:
    """The command that makes a directory."""
    words = ["python", "-m", "fa4_hd256", "build", "--model", "NAME", *options]
    return shlex.join([*words, "--out", str(place)])


def path_of(directory: str | os.PathLike) -> Path:
    given = os.fspath(directory) if isinstance(directory, os.PathLike) else directory
    if not isinstance(given, str):
        raise TypeError(f"directory is {shown(directory)}; accepted: a path as a str or a Path")
    if not given:
        raise ValueError("directory is ''; accepted: the path of a directory")
    return Path(given).expanduser().absolute()


def _check_identity(place: Path, manifest: Mapping[str, Any]) -> None:
    for name, here in identity().items():
        built = manifest.get(name)
        if built != here:
            raise ValueError(
                f"the kernels in {place} were built with {name} {built}, but {name} is {here} "
                f"here; build them again: {build_into(place)}"
            )
    for name, built in manifest["sources"].items():
        if built != sources_of(name):
            raise ValueError(
                f"the kernels in {place} were built from other sources of {_PACKAGE} ({name}) than "
                f"are installed here; build them again: {build_into(place)}"
            )
    lacking = sorted(set(manifest["cpu"]) - set(cpu_features()))
    if lacking:
        raise ValueError(
            f"the kernels in {place} were built on a CPU that has {', '.join(lacking)}, which this "
            "one lacks; build them on a machine like this one"
        )


def sources_of(name: str) -> str | None:
    """Digest of the sources "forward sm_100a", say; None for what this package does not have."""
    direction, _, architecture = name.partition(" ")
    try:
        return content_digest(direction, named(architecture))
    except ValueError:
        return None


def instruction_sets(features: Iterable[str]) -> list[str]:
    return [name for name in features if _INSTRUCTION_SETS.fullmatch(name)]


# ---------------------------------------------------------------- the one in use


class _Chosen:
    """Arguments of `use_prebuilt`, which override the environment."""

    directory: str | None = None
    jit: bool | None = None


_lock = threading.Lock()
_opened: dict[str, Prebuilt] = {}


def use_prebuilt(directory: str | os.PathLike | None, jit: bool | None = None) -> None:
    """Take kernels from a directory that `python -m fa4_hd256 build` made, from now on.

    directory: read-only is enough; None for the one of the environment (FA4_HD256_PREBUILT), if it
    names one. jit: whether a kernel that is neither there nor in the cache may be compiled; None:
    what FA4_HD256_JIT says. Kernels that this process has loaded stay.

    Raises ValueError for a directory that does not fit this process; what does not fit says the
    message. Raises TypeError for a directory that is no path, and a jit that is no bool.
    """
    if jit is not None and not isinstance(jit, bool):
        raise TypeError(f"jit is {shown(jit)}; accepted: True, False or None")
    place = None if directory is None else str(path_of(directory))
    if place is not None:
        _open(place, again=True)
    _Chosen.directory, _Chosen.jit = place, jit


def active(again: bool = False) -> Prebuilt | None:
    """The directory in use, checked once; again: also later builds. Raises as `Prebuilt.open`."""
    directory = _Chosen.directory or environment.prebuilt_directory()
    return None if directory is None else _open(directory, again)


def jit_allowed() -> bool:
    return environment.jit_allowed() if _Chosen.jit is None else _Chosen.jit


def _open(directory: str, again: bool = False) -> Prebuilt:
    """Open a directory; a relative path stays where it was when it was first opened."""
    with _lock:
        found = _opened.get(directory)
        if found is None or again and found.stamp != _stamp(found.directory):
            place = directory if found is None else found.directory
            found = _opened[directory] = Prebuilt.open(place)
        return found


def forget() -> None:
    with _lock:
        _opened.clear()
