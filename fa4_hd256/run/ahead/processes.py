"""Compile kernels in several processes, into the cache on disk: `compiling_beside`.

The processes are started as commands, not by multiprocessing: that would run the user's script
again, which need not expect it. Each has all kernels, from a place of its own in their list. A
kernel that another process compiles is waited for by the lock of its entry.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from typing import IO

import torch

from ... import environment
from ...gpus import family
from ...interrupt import end_with_parent, starting_workers
from ...progress import be_quiet
from ..catalogue import KernelSpec
from ..compile import is_ready, jit_entry
from ..kernel_names import kernel_named, name_of
from ..keys import lasts
from .prebuilt import jit_allowed

#: Kernels that a process must have to do, for it to be worth its start: it imports PyTorch.
LEAST = 3

_START = "import sys; sys.path[:] = {path!r}; from {module} import main; main()"


def in_own_order(specs: Sequence[KernelSpec], number: int = 0, count: int = 1) -> list[KernelSpec]:
    """Return kernels in the order of one of so many processes of this rank. Processes begin at
    places of their own, those of other ranks of torch.distributed among them, so that they share
    the work."""
    rank, world = _rank()
    begin = (rank * count + number) * len(specs) // (world * count)
    return [*specs[begin:], *specs[:begin]]


def _rank() -> tuple[int, int]:
    group = torch.distributed
    if not (group.is_available() and group.is_initialized()):
        return 0, 1
    return group.get_rank(), group.get_world_size()


@contextlib.contextmanager
def compiling_beside(specs: Sequence[KernelSpec]) -> Iterator[int]:
    """Let other processes compile those of the kernels that no cache has, and yield how many there
    are of these. At the end of the block the processes are waited for. One that fails is a warning:
    its kernels are compiled by whoever asks for them."""
    missing = [spec for spec in specs if not is_ready(spec)]
    # Another process could not name others, and nobody would find them.
    named = [spec for spec in missing if lasts(spec)]
    _, world = _rank()
    can_start = jit_allowed() and _is_importable()
    most = environment.jobs() // world - 1 if can_start else 0
    count = max(0, min(most, len(named) // LEAST))
    with contextlib.ExitStack() as files:
        errors = [files.enter_context(tempfile.TemporaryFile()) for _ in range(count)]
        started = [
            _start(in_own_order(named, number, count + 1), file)
            for number, file in enumerate(errors, 1)
        ]
        try:
            yield len(missing)
        except BaseException:
            for process in started:
                process.kill()
            raise
        finally:
            status = [process.wait() for process in started]
        _warn([file for file, failed in zip(errors, status) if failed], count)


def _is_importable() -> bool:
    """Return True if another process can import this package by its name."""
    root = __name__.partition(".")[0]
    found = PathFinder.find_spec(root, sys.path)
    return found is not None and found.origin == sys.modules[root].__file__


def _start(specs: Sequence[KernelSpec], errors: IO[bytes]) -> subprocess.Popen:
    order = {"capabilities": _capabilities(), "kernels": [name_of(spec) for spec in specs]}
    code = _START.format(path=sys.path, module=__name__)
    # No GPU: a context of its own would take memory of the one that this process is to use.
    own = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with starting_workers():
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=own,
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as orders:
        orders.write(json.dumps(order).encode())
    return process


def _capabilities() -> list[tuple[int, int]]:
    seen = family.as_seen()
    if seen is not None:
        return sorted(seen)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return sorted({torch.cuda.get_device_capability(i) for i in range(count)})


def _warn(failed: Sequence[IO[bytes]], count: int) -> None:
    """Warn of processes that failed, with the last line of the first one's errors."""
    if not failed:
        return
    failed[0].seek(0)
    lines = failed[0].read().decode(errors="replace").strip().splitlines()
    warnings.warn(
        f"{len(failed)} of {count} processes that compile kernels failed: "
        f"{lines[-1] if lines else 'no error said'}. {environment.JOBS.name}=1 starts none",
        RuntimeWarning,
        stacklevel=4,
    )


def main() -> None:
    end_with_parent(be_quiet)
    order = json.load(sys.stdin)
    with family.as_if_seen(*map(tuple, order["capabilities"])):
        for name in order["kernels"]:
            jit_entry(kernel_named(name))
