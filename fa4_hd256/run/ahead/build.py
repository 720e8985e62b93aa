"""Make a directory of prebuilt kernels: compile, write, and say in the manifest what is there."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shlex
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...gpus import family
from ...interrupt import end_with_parent, starting_workers
from ...progress import be_quiet, counted, say
from ...words import shown
from ..catalogue import KernelSpec
from ..compile import jit_entry
from ..kernel_names import kernel_named, name_of
from ..keys import cpu_features, direction_of, prebuilt_key
from ..native_cache import NativeCache
from .prebuilt import (
    MANIFEST,
    Prebuilt,
    identity,
    instruction_sets,
    path_of,
    read_manifest,
    sources_of,
    storage,
)
from .targets import TARGETS


@dataclass(frozen=True)
class Build:
    """Result of `build`. kernels: in the directory; added: of them, by this call; nbytes:
    files'."""

    directory: Path
    kernels: int
    added: int
    nbytes: int


def build(
    specs: Mapping[str, Sequence[KernelSpec]], directory: str | os.PathLike, jobs: int = 1
) -> Build:
    """Put kernels into a prebuilt directory, which is made if it is not there.

    specs: name in `TARGETS` -> kernels. What the directory has stays where it was made by the same
    versions and sources, and goes otherwise. jobs: processes that compile.

    Raises TypeError for a directory that is no path and jobs that are no int, ValueError for no
    jobs, and a directory that cannot be made or that others may write, RuntimeError where it cannot
    be written, and what the compiler raises.
    """
    if isinstance(jobs, bool) or not isinstance(jobs, int):
        raise TypeError(f"jobs is {shown(jobs)}; accepted: an int, 1 or more")
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}; accepted: 1 or more")
    place = path_of(directory)
    _make(place)
    read_manifest(place)  # refuses a directory that must not be used
    cache, described = storage(place), {}
    total = sum(map(len, specs.values()))
    for key, kernel in counted(_written(specs, cache, jobs), total, "compiling", "kernel"):
        described[key] = kernel
        say(f"{len(described)}/{total} {kernel['kind']} ({kernel['target']})")
    return _finish(place, described)


def _written(
    specs: Mapping[str, Sequence[KernelSpec]], cache: NativeCache, jobs: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    for target, wanted in specs.items():
        capability = TARGETS[target].capability
        with family.as_if_seen(capability):
            for spec, (header, parts) in zip(wanted, _entries(wanted, capability, jobs)):
                key = prebuilt_key(spec)
                cache.write(f"{key}.kernel", header, parts)
                yield (
                    key,
                    {
                        "kind": spec.kind,
                        "target": family.target(spec.architecture),
                        "sources": f"{direction_of(spec)} {spec.architecture.name}",
                        "kernel": name_of(spec),
                        "bytes": sum(map(len, parts)),
                    },
                )


def _make(place: Path) -> None:
    """Make a directory that everybody may read. One that is there stays as it is."""
    try:
        place.mkdir(parents=True)
        place.chmod(0o755)
    except OSError as error:
        if not place.is_dir():
            raise ValueError(
                f"{place} cannot be made a directory: {error.strerror}; accepted: a directory, or "
                "a path where one can be made"
            ) from error


def _finish(place: Path, described: dict[str, Any]) -> Build:
    """Write the manifest, and check that what it names can be read."""
    cache = storage(place)
    with cache.exclusive(MANIFEST):
        kernels = _still_valid(place, described) | described
        manifest = identity() | {
            "cpu": instruction_sets(cpu_features()),
            "sources": {
                name: sources_of(name)
                for name in sorted({kernel["sources"] for kernel in kernels.values()})
            },
            "kernels": kernels,
        }
        cache.write(MANIFEST, manifest, [])
        with contextlib.suppress(OSError):
            # While it is locked: whoever waits for it sees that it is gone, and takes a new one.
            (place / f"{MANIFEST}.lock").unlink()
    nbytes = 0
    for name in (MANIFEST, *(f"{key}.kernel" for key in kernels)):
        path = place / name
        try:
            if name == MANIFEST or path.stem in described:
                path.chmod(0o644)  # whoever runs the container reads them
            nbytes += path.stat().st_size
        except OSError as error:
            raise RuntimeError(f"{path} could not be written: {error.strerror}") from error
    opened = Prebuilt.open(place)
    for key in described:
        opened.read(key)
    return Build(place, len(kernels), len(described), nbytes)


def _still_valid(place: Path, described: Mapping[str, Any]) -> dict[str, Any]:
    """Return kernels of an earlier build that still fit; files of others go, but for new ones."""
    before = read_manifest(place)
    if before is None:
        return {}
    try:
        kernels = Prebuilt.open(place).kernels
        return {
            key: kernel
            for key, kernel in kernels.items()
            if key in described or _is_there(place / f"{key}.kernel", kernel)
        }
    except ValueError:
        for key in set(before.get("kernels", ())) - set(described):
            with contextlib.suppress(OSError):
                (place / f"{key}.kernel").unlink()
        return {}


def _is_there(path: Path, kernel: Mapping[str, Any]) -> bool:
    if path.exists():
        return True
    command = shlex.join(["--kernel", kernel["kernel"], "--arch", kernel["target"]])
    warnings.warn(
        f"{path}, a prebuilt {kernel['kind']}, is missing, so the manifest no longer has it; build "
        f"it again where calls take it: {command}",
        RuntimeWarning,
        stacklevel=4,
    )
    return False


def _entries(
    specs: Sequence[KernelSpec], capability: tuple[int, int], jobs: int
) -> Iterator[tuple[dict[str, Any], list[bytes]]]:
    """Each kernel's entry, in order, compiled by so many processes."""
    if jobs == 1 or len(specs) < 2:
        yield from map(jit_entry, specs)
        return
    context = multiprocessing.get_context("spawn")
    # A worker's own lines would be drawn over this process's.
    begin = end_with_parent, (be_quiet,)
    with ProcessPoolExecutor(min(jobs, len(specs)), context, *begin) as pool:
        with starting_workers():
            found = pool.map(_entry_named, map(name_of, specs), [capability] * len(specs))
        yield from found


def _entry_named(name: str, capability: tuple[int, int]) -> tuple[dict[str, Any], list[bytes]]:
    with family.as_if_seen(capability):
        return jit_entry(kernel_named(name))


def unique(specs: Iterable[KernelSpec]) -> list[KernelSpec]:
    return list(dict.fromkeys(specs))
