"""Work of a command on several processes, and the option that says on how many."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

from fa4_hd256.environment import progress_wanted
from fa4_hd256.interrupt import end_with_parent, starting_workers

Item = TypeVar("Item")
Result = TypeVar("Result")


def add_jobs_option(parser: argparse.ArgumentParser) -> None:
    """`--jobs`, by default as many as cores, at most four: each process takes up to 1.5 GiB."""
    parser.add_argument(
        "--jobs", type=int, default=min(4, len(os.sched_getaffinity(0))),
        help="processes (of the model); by default as many as cores, at most 4",
    )


def each(
    function: Callable[[Item], Result], items: Sequence[Item], jobs: int,
    initializer: Callable[[], None] | None = None,
) -> list[Result]:
    """Results in the order of the items, on `jobs` processes; a single one is this process.

    initializer: runs first in each process that is started.
    """
    if min(jobs, len(items)) == 1:
        return list(_shown(map(function, items), len(items)))
    # The compiler's state must not be forked.
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, context, end_with_parent, (initializer,)) as pool:
        with starting_workers():
            found = pool.map(function, items)
        return list(_shown(found, len(items)))


def _shown(found: Iterable[Result], count: int) -> Iterator[Result]:
    """The results, with a bar on a terminal that says how many are left."""
    from tqdm import tqdm

    yield from tqdm(
        found, total=count, desc="replaying and simulating", unit="part", leave=False,
        disable=not progress_wanted(),
    )  # fmt: skip


def one_simulator_thread() -> None:
    """For `each` of what the simulator runs: the processes share the cores already."""
    os.environ.setdefault("SM100_SIM_THREADS", "1")
