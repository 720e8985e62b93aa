"""Progress of the package, for people who wait: one logger, one line on a terminal.

Every step is a record of level INFO of the logger `fa4_hd256`, to which Python's logging attaches
nothing.  A step that takes longer than `waiting.LATER` seconds is shown on stderr with its time,
where `environment.progress_wanted` says so.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from . import environment
from .waiting import waiting_line

__all__ = ["is_under_way", "logger", "step"]

logger = logging.getLogger("fa4_hd256")
logger.addHandler(logging.NullHandler())

#: Steps of this thread, the innermost last.
_steps = threading.local()


def is_under_way(verb: str) -> bool:
    """Return True inside a step of this thread that begins with `verb`."""
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
