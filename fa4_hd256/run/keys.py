"""Keys of kernels, which cover everything that is compiled in.

Which kernel it is, what it is specialised for, its configuration, the meaning of the sources that
are compiled in or build what is (`COMPILED_IN`), the versions of the compiler and the CPU, for
which the host object is made; so an entry never goes stale. Comments and docstrings have no part in
it.

NOTE [keys of prebuilt kernels].  The machine that builds is not the one that runs: neither the
version of Python nor the exact CPU is in these keys, and sources count by their bytes. The manifest
of the directory names the instruction sets that the building CPU offers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

from .. import environment
from ..architectures import ARCHITECTURES, Architecture
from ..call.functions.meaning import described_meaning
from ..gpus import family
from ..kernels.functions.user_functions import FUNCTION_KINDS
from . import toolkit
from .catalogue import KernelSpec
from .kernel_cache import disk_cache

#: The distribution that compiles.
COMPILER = "nvidia-cutlass-dsl"

#: Raised whenever the files of an entry or their meaning change.
FORMAT = 3

#: What is compiled in, or says what is compiled, by its path in the package: device code, what it
#: imports, and the types of arguments. Their other imports (`architectures`, `environment`,
#: `words`) are not compiled in, or are in the key itself: architecture and settings of the
#: compiler. For a kernel of one direction nothing counts whose path names another (`OTHER`), nor
#: for one of an architecture the folders of others: neither imports anything of the other's.
COMPILED_IN = (
    "kernels",
    "run/argument_types.py",
    "run/building.py",
    "run/catalogue.py",
    "run/tracing.py",
    "schedulers",
    "softmax_emu/by_key.py",
    "softmax_emu/exp2.py",
    "softmax_emu/online.py",
    "softmax_emu/pattern.py",
    "softmax_emu/recompute.py",
)

#: First word of a kernel's kind -> first words of folders and modules that it has nothing of.
OTHER = {
    "forward": ("backward", "append", "tail"),
    "backward": ("forward", "decode", "append", "tail"),
    "append": ("forward", "backward", "decode", "tail"),
    "tail": ("forward", "decode", "append"),
}

#: Folders of what refuses a plan that cannot work: nothing of it is compiled in.
PROOF = "proof"


def cache_key(spec: KernelSpec) -> str:
    """Hexadecimal key. No length, batch or number of KV heads is in it: those are dynamic."""
    return _digest(
        _common(spec)
        | {
            "sources": _source_digest(direction_of(spec), spec.architecture),
            "python": platform.python_version(),
            "cpu": cpu_features(),
        }
    )


def prebuilt_key(spec: KernelSpec) -> str:
    """Hexadecimal key in a prebuilt directory, NOTE [keys of prebuilt kernels]."""
    return _digest(
        _common(spec) | {"contents": content_digest(direction_of(spec), spec.architecture)}
    )


def direction_of(spec: KernelSpec) -> str:
    """Return one of `OTHER`: "forward", "backward", "append" or "tail"."""
    return spec.kind.partition("_")[0]


def lasts(spec: KernelSpec) -> bool:
    """Return False where another process could not tell what functions of a kernel mean."""
    return all(is_known for _, is_known in _meanings(spec))


def _meanings(spec: KernelSpec) -> list[tuple[str | None, bool]]:
    asked = ((kind, getattr(spec.problem_class, kind.argument, None)) for kind in FUNCTION_KINDS)
    return [described_meaning(kind, given.key) for kind, given in asked if given is not None]


def _common(spec: KernelSpec) -> dict[str, Any]:
    meanings = [meaning for meaning, _ in _meanings(spec) if meaning is not None]
    libraries = toolkit.other_libraries()
    return (
        ({"functions": meanings} if meanings else {})
        | ({"libraries": libraries} if libraries else {})
        | {
            "format": FORMAT,
            "architecture": family.target(spec.architecture),
            "kind": spec.kind,
            "problem": repr(spec.problem_class),
            "config": repr(spec.config),
            "compiler": importlib.metadata.version(COMPILER),
            "compiler_settings": environment.compiler_settings(),
            "machine": platform.machine(),
        }
    )


def _digest(parts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


@functools.cache
def cpu_features() -> list[str]:
    """Features of the CPU: CuTe DSL makes host code for the CPU that it runs on. As Linux names
    them; no two CPUs are told apart where it names none."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return sorted(value.split())
    return []


@functools.cache
def _source_digest(direction: str, architecture: Architecture) -> str:
    return disk_cache().meaning(compiled_sources(direction, architecture))


@functools.cache
def content_digest(direction: str, architecture: Architecture) -> str:
    digest = hashlib.sha256()
    for name, content in compiled_sources(direction, architecture):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def compiled_sources(
    direction: str, architecture: Architecture, package: Path = Path(__file__).parents[1]
) -> list[tuple[str, bytes]]:
    """Return (path, content) of `COMPILED_IN` for a direction and an architecture."""
    other = (*OTHER.get(direction, ()), PROOF)
    folders = tuple(f"kernels/{a.folder}/" for a in ARCHITECTURES if a is not architecture)
    paths: list[Path] = []
    for place in (package / part for part in COMPILED_IN):
        paths += sorted(place.rglob("*.py")) if place.is_dir() else [place]
    names = {path.relative_to(package).as_posix(): path for path in paths}
    return [
        (name, path.read_bytes())
        for name, path in names.items()
        if not any(part.startswith(other) for part in name.split("/"))
        and not name.startswith(folders)
    ]
