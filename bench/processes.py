"""Work of a command on several processes, and the option that says on how many."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import TypeVar

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
    function: Callable[[Item], Result],
    items: Sequence[Item],
    jobs: int,
    initializer: Callable[[], None] | None = None,
) -> Iterator[Result]:
    """Yield the results of `each`, every one as soon as it and those before it are ready.
    initializer: runs first in each process that is started."""
    if min(jobs, len(items)) <= 1:
        yield from map(function, items)
        return
    # The compiler's state must not be forked.
    context = get_context("spawn")
    begin = partial(_quiet, initializer)
    with ProcessPoolExecutor(jobs, context, end_with_parent, (begin,)) as pool:
        with starting_workers():
            found = pool.map(function, items)
        yield from found


def _quiet(initializer: Callable[[], None] | None) -> None:
    """Begin a process whose parent has the one line on the terminal."""
    be_quiet()
    if initializer is not None:
        initializer()


def one_simulator_thread() -> None:
    """Give `each` of what the simulator runs one thread: the processes share the cores already."""
    os.environ.setdefault("SM100_SIM_THREADS", "1")
