"""Processes of a command: workers that share its work, and children that answer in lines of
JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TextIO, TypeVar

from fa4_hd256.interrupt import end_with_parent, starting_workers
from fa4_hd256.progress import be_quiet, counted

Item = TypeVar("Item")
Result = TypeVar("Result")


def add_jobs_option(parser: argparse.ArgumentParser) -> None:
    """`--jobs`, by default as many as cores, at most four: each process takes up to 1.5 GiB."""
    parser.add_argument(
        "--jobs",
        type=int,
        default=min(4, len(os.sched_getaffinity(0))),
        help="processes (of the model); by default as many as cores, at most 4",
    )


def each(function: Callable[[Item], Result], items: Sequence[Item], jobs: int) -> list[Result]:
    """Return results in the order of the items, on `jobs` processes; a single one is this
    process."""
    found = stream(function, items, jobs)
    return list(counted(found, len(items), "replaying and simulating", "part"))


def stream(
    function: Callable[[Item], Result], items: Sequence[Item], jobs: int
) -> Iterator[Result]:
    """Yield the results of `each`, every one as soon as it and those before it are ready."""
    if min(jobs, len(items)) <= 1:
        yield from map(function, items)
        return
    # The compiler's state must not be forked.
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, context, end_with_parent, (_begin,)) as pool:
        with starting_workers():
            found = pool.map(function, items)
        yield from found


def _begin() -> None:
    """Begin a process whose parent has the one line on the terminal. The simulator gets one thread,
    since the processes share the cores already."""
    be_quiet()
    os.environ.setdefault("SM100_SIM_THREADS", "1")


class Child:
    """A process that says lines of JSON on stdout, and may be told some on stdin. It has a session
    of its own: what it starts ends with it. log: the file that gets what it writes to stderr."""

    #: Seconds that a killed process may take to go; the driver first ends what it has on the GPU.
    KILL_LIMIT = 60.0

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.log, self._heard = log, b""
        with open(log, "ab") as sink:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink,
                start_new_session=True,
            )  # fmt: skip

    @property
    def status(self) -> int | None:
        return self._process.poll()

    def tell(self, **order: Any) -> None:
        assert self._process.stdin is not None
        # Whether it still listens shows when it is heard.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def hear(self, limit: float | None = None) -> dict[str, Any] | None:
        """Return the next line; None for a process that has ended without one. Raises TimeoutError
        where it has done neither after so many seconds."""
        assert self._process.stdout is not None
        end = None if limit is None else time.monotonic() + limit
        place = self._process.stdout.fileno()
        while b"\n" not in self._heard:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([place], [], [], left)[0]:
                raise TimeoutError
            if not (more := os.read(place, 1 << 16)):
                try:
                    self._process.wait(left)
                except subprocess.TimeoutExpired:
                    raise TimeoutError from None
                return None
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> str:
        """End the process and all that it started; what to say if it does not go, or nothing."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        try:
            self._process.wait(self.KILL_LIMIT)
        except subprocess.TimeoutExpired:
            return (
                f"process {self._process.pid} was killed and is still there after "
                f"{self.KILL_LIMIT:.0f} s: the driver does not let go of it"
            )
        return ""

    def last_words(self, count: int = 2000) -> str:
        """Return the end of what it wrote to stderr."""
        return self.log.read_text(errors="replace").strip()[-count:]


def answers() -> TextIO:
    """Return, in a `Child`, the stream of its lines. What else writes to stdout, from C too, goes
    to stderr."""
    found = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return found
