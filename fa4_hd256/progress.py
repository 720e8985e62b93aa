"""Progress of the package, for people who wait: one logger, one line on a terminal.

Every step is a record of level INFO of the logger `fa4_hd256`, to which Python's logging attaches
nothing.  A step that takes longer than `waiting.LATER` seconds is shown on stderr with its time,
where `environment.progress_wanted` says so, and so is a bar of what is left.  Rows of a command are
lines that files get, too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

from . import environment
from .waiting import waiting_line

Result = TypeVar("Result")

logger = logging.getLogger("fa4_hd256")
logger.addHandler(logging.NullHandler())

#: Steps of this thread, the innermost last.
_steps = threading.local()


def is_under_way(verb: str) -> bool:
    return any(what.startswith(verb) for what in getattr(_steps, "all", ()))


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Log and show that a step is under way: "compiling forward (sm_90a)"."""
    logger.info(what)
    _steps.all = (*getattr(_steps, "all", ()), what)
    try:
        with waiting_line(what) if environment.progress_wanted() else contextlib.nullcontext():
            yield
    finally:
        _steps.all = _steps.all[:-1]


def counted(
    found: Iterable[Result], total: int | None, doing: str, unit: str = "row"
) -> Iterator[Result]:
    """Yield the results, with a bar on a terminal that says how many are left. total: how many
    there are, None if nobody knows."""
    from tqdm import tqdm

    def left(done: int) -> str:
        return "" if total is None else f"{total - done} left"

    with tqdm(
        total=total,
        desc=doing,
        unit=unit,
        leave=False,
        disable=not environment.progress_wanted(),
        postfix=left(0),
    ) as bar:
        for number, one in enumerate(found, 1):
            bar.set_postfix_str(left(number), refresh=False)
            bar.update()
            yield one


def say(line: str) -> None:
    if environment.rows_wanted():
        from tqdm import tqdm

        tqdm.write(line, file=sys.stderr)
        sys.stderr.flush()


def be_quiet() -> None:
    """Show nothing in this process, whose parent has the lines on the terminal."""
    os.environ[environment.PROGRESS.name] = "0"
