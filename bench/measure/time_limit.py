"""Rows as far as the time of a lent GPU goes: what is measured is written, the rest is named."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from bench.tables.table import Table

Job = TypeVar("Job")


class TimeLimit:
    """Time limit of a command's rows.

    seconds: after which no row begins but the first, counted from when this object is made; None
    for no limit.  left_out: what did not begin.
    """

    def __init__(
        self, seconds: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises ValueError for seconds below 0."""
        if seconds is not None and seconds < 0:
            raise ValueError(f"--within {seconds}; accepted: a number of seconds, 0 or more")
        self.seconds, self.left_out = seconds, list[Any]()
        self._clock, self._begin = clock, clock()

    def begun(self, jobs: Iterable[Job]) -> Iterator[Job]:
        """Yield the jobs that begin in time, in their order."""
        for number, job in enumerate(jobs):
            if number and self.seconds is not None and self._clock() - self._begin > self.seconds:
                self.left_out.append(job)
            else:
                yield job

    @property
    def reason(self) -> str:
        """Return why the others did not begin."""
        return f"not begun within {self.seconds} s"

    def noted(self, table: Table) -> Table:
        """The table of those that did begin, with a note that names the others."""
        if not self.left_out:
            return table
        named = (job if isinstance(job, tuple) else (job,) for job in self.left_out)
        rows = "; ".join(", ".join(map(str, parts)) for parts in named)
        return replace(table, notes=(*table.notes, f"{len(self.left_out)} {self.reason}: {rows}."))
