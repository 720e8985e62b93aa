"""Processes that are the ranks of a group of torch.distributed, and run functions of a module."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

#: Seconds in which a function, compiling included, has to end.
LONGEST = 900


class Failed(NamedTuple):
    """Error that a rank's function raised."""

    kind: str
    text: str
    trace: str


#: Modules that a rank imports before its first task, once for all ranks.
_IMPORTED = ["torch.distributed", "context_cases", "torch_context_cases", "failing_ranks"]

#: Libraries start no threads, which a fork would lose; the machine's cores are for ranks.
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "SM100_SIM_THREADS"), "1")


def _context(device: str) -> Any:
    """Return the start method: processes on GPUs, whose libraries do not survive a fork, are
    spawned."""
    if device == "cuda":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    paths = os.pathsep.join(path for path in sys.path if path)
    with mock.patch.dict(os.environ, {**_ONE_THREAD, "PYTHONPATH": paths}):
        forkserver.ensure_running()
    return context


class Pool:
    """Ranks, started once; each runs what it is given, one function after the other.

    device: "cpu" (gloo) or "cuda" (NCCL, a GPU a rank). Use as a context manager.
    """

    def __init__(self, count: int, device: str = "cpu") -> None:
        context = _context(device)
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name) / "store"
        self._pipes, self._processes = [], []
        for rank in range(count):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=((rank, count), device, str(store), there), daemon=True,
                kwargs={"environment": {**os.environ, **_ONE_THREAD}},
            )  # fmt: skip
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """function(rank, *arguments) of every rank: what each returns, a `Failed` for what it
        raises, None of a rank that has ended."""
        for pipe in self._pipes:
            try:
                pipe.send((function, arguments))
            except BrokenPipeError:
                pass
        return [self._answer(pipe) for pipe in self._pipes]

    @staticmethod
    def _answer(pipe: Any) -> Any:
        if not pipe.poll(LONGEST):
            return Failed("TimeoutError", f"nothing in {LONGEST} s", "")
        try:
            return pipe.recv()
        except EOFError:
            return None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(
    place: tuple[int, int], device: str, store: str, pipe: Any, environment: dict[str, str]
) -> None:
    """A rank's process, until the pipe is closed."""
    # The environment is that of the test's process now, not of the first rank's start.
    os.environ.clear()
    os.environ.update(environment)
    import torch
    import torch.distributed as dist

    rank, count = place
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{store}",
        rank=rank, world_size=count, timeout=timedelta(seconds=LONGEST),
    )  # fmt: skip
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            break
        try:
            answer = function(rank, *arguments)
        except Exception as error:
            answer = Failed(type(error).__name__, str(error), traceback.format_exc())
        pipe.send(answer)
