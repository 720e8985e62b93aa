"""Versions of flash-attn-4 and FROST other than those installed, each with the CuTe DSL of its day.

A rate says something of a kernel that was compiled by what compiled it then, and two releases of
CuTe DSL cannot live in one process. So a release has a folder of its own with everything that
differs from what is installed here, and `call` runs a function of this project in a process that
imports from there first. `python -m lab peers` fills the folders.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers import frost
from bench.peers.flash_attn_4 import PACKAGE
from bench.suite import BACKWARD, FORWARD
from fa4_hd256.environment import cache_directory

#: Folder of the project's modules, in a checkout and in the folder of a release.
MODULES = Path("flash_attn", "cute")
_ROOT = Path(__file__).resolve().parents[3]
#: Variables by which a user tells flash-attn-4, quack and CuTe DSL to compile something else.
_SETTINGS = ("FA_", "FLASH_ATTENTION_", "QUACK_", "CUTE_DSL_")


@dataclass(frozen=True)
class Release:
    """commit: of github.com/Dao-AILab/flash-attention, 8 digits. what: it is, in words.
    cutlass_dsl, quack: versions of nvidia-cutlass-dsl and quack-kernels, the newest of its day.
    package: the version of the package whose files for these GPUs are those of the commit. tree:
    where there is none, the id that Git gives to the commit's flash_attn/cute. directions: that it
    stands for.
    """

    commit: str
    what: str
    cutlass_dsl: str
    quack: str
    package: str | None = None
    tree: str | None = None
    directions: tuple[str, ...] = (FORWARD, BACKWARD)

    #: Project that it is a version of.
    project = PACKAGE

    def __post_init__(self) -> None:
        if (self.package is None) == (self.tree is None):
            raise ValueError(f"{self.commit}: either a version of the package or a tree")

    @property
    def requirements(self) -> tuple[str, ...]:
        found = (f"nvidia-cutlass-dsl=={self.cutlass_dsl}",
                 f"nvidia-cutlass-dsl-libs-base=={self.cutlass_dsl}",
                 f"quack-kernels=={self.quack}")  # fmt: skip
        return found if self.package is None else (*found, f"{PACKAGE}=={self.package}")

    @property
    def folder(self) -> Path:
        """Return the folder that `prepare` fills."""
        key = hashlib.sha256(repr((self.requirements, self.tree)).encode()).hexdigest()[:8]
        return cache_directory() / "peers" / f"{self.project}-{self.commit}-{key}"

    @property
    def versions(self) -> tuple[str, ...]:
        """Return the versions that its compiled kernels depend on."""
        return (*self.requirements, self.tree or self.commit)


class FrostRelease(Release):
    """Release of cuDNN's frontend. commit: its name here. package: its version."""

    project = frost.NAME

    @property
    def requirements(self) -> tuple[str, ...]:
        parts = ("", "-libs-base", "-libs-core", "-libs-cu12")
        return (*(f"nvidia-cutlass-dsl{part}=={self.cutlass_dsl}" for part in parts),
                f"{frost.PACKAGE}=={self.package}")  # fmt: skip

    @property
    def versions(self) -> tuple[str, ...]:
        """Return the versions as `frost_code.versions` reports them there."""
        assert self.package is not None
        return self.package, self.cutlass_dsl


#: CuTe DSL 4.4.2 is of 2026-03-13, 4.5.0 of 2026-04-30; quack 0.3.10 of 04-14, 0.3.11 of 04-20.
RELEASES = {
    one.commit: one
    for one in (
        Release("3c015f1a", "PR 2454 before its last commit: no polynomial", "4.4.2", "0.3.10",
                tree="1976ffdfc6a6d1ef18f95dba287b3422523914c8", directions=(FORWARD,)),
        Release("e122e67c", "PR 2454: exp2 in part by polynomial", "4.4.2", "0.3.10",
                tree="3c58f27eb3e7853d06a4415f8baabedd9110d532", directions=(FORWARD,)),
        Release("27b4eb98", "PR 2412: head_dim 256 as it was merged", "4.4.2", "0.3.11",
                tree="3a5ba04e2638b12722c8bb465b7514b6a31c6067"),
        Release("6c73fb50", "PR 2488: the polynomial as it was merged", "4.4.2", "0.3.11",
                package="4.0.0b11"),
        Release("956366b9", "PR 2497: dK and dV leave by TMA", "4.4.2", "0.3.11",
                package="4.0.0b12", directions=(BACKWARD,)),
    )
}  # fmt: skip


#: Releases that NVIDIA's rates are of. CuTe DSL 4.8.0 is the newest of 2026-09-28 and 10-01, 4.7.1
#: of 09-18.
FROST_RELEASES: dict[str, FrostRelease] = {
    one.commit: one
    for one in (
        FrostRelease("frost-1.31.0", "cudnn-frontend 1.31.0", "4.8.0", "", package="1.31.0"),
        FrostRelease("frost-1.31.0-dsl-4.7.1", "cudnn-frontend 1.31.0", "4.7.1", "",
                     package="1.31.0"),
        FrostRelease("frost-1.32.0", "cudnn-frontend 1.32.0", "4.8.0", "", package="1.32.0"),
    )
}  # fmt: skip
ALL: dict[str, Release] = {**RELEASES, **FROST_RELEASES}


def release(commit: str) -> Release:
    """Return the release of that commit in `ALL`. Raises ValueError for another."""
    if commit not in ALL:
        raise ValueError(f"commit {commit!r} is not known here; known are {', '.join(ALL)}")
    return ALL[commit]


def unavailable(wanted: Release) -> str | None:
    """Return why it cannot be compiled here, None if it can."""
    if wanted.folder.is_dir():
        return None
    source = "" if wanted.tree is None else " --source CHECKOUT"
    return (
        f"{wanted.project} {wanted.commit} is not prepared: "
        f"python -m lab peers {wanted.commit}{source}"
    )


def prepare(wanted: Release, source: Path | None = None) -> Path:
    """Fill the folder of a release, if that has not been done; the folder. source: where no version
    of the package has its files, a checkout at the commit. Raises ValueError if that is missing or
    holds anything else, RuntimeError if pip fails."""
    if wanted.folder.is_dir():
        return wanted.folder
    if wanted.tree is not None:
        _check_source(wanted, source)
    wanted.folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=wanted.folder.parent))
    try:
        _install(wanted.requirements, scratch)
        if wanted.tree is not None and source is not None:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source / MODULES, scratch / MODULES, ignore=ignored)
        # Under its name only when complete; another process may have been faster.
        try:
            os.replace(scratch, wanted.folder)
        except OSError:
            if not wanted.folder.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return wanted.folder


def _check_source(wanted: Release, source: Path | None) -> None:
    if source is None:
        raise ValueError(
            f"no version of {PACKAGE} has the files of {wanted.commit}: name a checkout of "
            "github.com/Dao-AILab/flash-attention at that commit with --source"
        )
    folder = source / MODULES
    if not folder.is_dir():
        raise ValueError(f"{source} is no checkout of flash-attention: it has no {MODULES}")
    found = tree_id(folder)
    if found != wanted.tree:
        raise ValueError(
            f"{folder} is not that of {wanted.commit}: its content has Git's id {found}, that of "
            f"the commit is {wanted.tree}; check out {wanted.commit} without changes"
        )


def _install(requirements: tuple[str, ...], folder: Path) -> None:
    # Without dependencies: torch, cuda-bindings and tvm-ffi are those that are installed.
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target",
               str(folder), *requirements]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr.strip()}")


def tree_id(folder: Path) -> str:
    """The id that Git gives to the content of a folder (hexadecimal SHA-1 of a tree object, as
    `git rev-parse COMMIT:FOLDER` prints it), compiled Python left out."""
    entries = []
    for path in folder.iterdir():
        if path.name == "__pycache__":
            continue
        if path.is_dir():
            entries.append((f"{path.name}/", "40000", path.name, tree_id(path)))
        else:
            mode = "100755" if os.access(path, os.X_OK) else "100644"
            entries.append((path.name, mode, path.name, _object_id("blob", path.read_bytes())))
    # Git sorts folders as if their names ended with a slash.
    content = b"".join(
        f"{mode} {name}\0".encode() + bytes.fromhex(of) for _, mode, name, of in sorted(entries)
    )
    return _object_id("tree", content)


def _object_id(kind: str, content: bytes) -> str:
    header = f"{kind} {len(content)}\0".encode()
    return hashlib.sha1(header + content, usedforsecurity=False).hexdigest()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS)}


def call(wanted: Release, function: Callable[[], Any]) -> Any:
    """Return the result of a function in a process that imports the release, at its default
    settings.

    function: of a module, or `functools.partial` of one; it travels by its name, arguments and
    result by pickle. Raises RuntimeError if the release is not prepared, or the process fails; what
    it printed says why.
    """
    reason = unavailable(wanted)
    if reason:
        raise RuntimeError(reason)
    with tempfile.TemporaryDirectory(prefix="fa4_hd256_peer_") as scratch:
        request, result = Path(scratch, "request"), Path(scratch, "result")
        request.write_bytes(pickle.dumps(function))
        command = [sys.executable, "-m", f"{__package__}.child", str(wanted.folder),
                   str(request), str(result)]  # fmt: skip
        # Results have a file of their own; the child's output is for people.
        done = subprocess.run(command, cwd=_ROOT, env=_environment(), stdout=2, check=False)
        if done.returncode or not result.exists():
            raise RuntimeError(
                f"a call with {wanted.project} {wanted.commit} ended with exit status "
                f"{done.returncode}; its own output says why"
            )
        return pickle.loads(result.read_bytes())
