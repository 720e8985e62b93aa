"""Rows of a table on stderr as each is ready; the whole table follows on stdout."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from fa4_hd256.progress import counted, say

from .table import Column, plain_line

Result = TypeVar("Result")

#: Seconds that a command takes before its rows are printed one by one.
LATER = 1.0


def ready(
    rows: Iterable[dict[str, Any]],
    total: int | None,
    columns: Sequence[Column],
    doing: str = "replaying",
) -> list[dict[str, Any]]:
    """Return the rows, each printed as soon as it is there; a bar counts those that are left.
    total: rows that there will be at most, None if nobody knows. columns: those of a printed row.
    doing: a verb for what a row takes its time for."""
    return list(results(rows, total, columns, lambda row: [row], doing))


def results(
    found: Iterable[Result],
    total: int | None,
    columns: Sequence[Column],
    rows_of: Callable[[Result], Iterable[dict[str, Any]]],
    doing: str = "replaying",
) -> Iterator[Result]:
    """Yield what is found; see `ready`. rows_of: the rows that a result makes."""
    lines = _Lines(columns)
    for one in counted(found, total, doing):
        for row in rows_of(one):
            lines.add(row)
        yield one


class _Lines:
    """Lines on stderr below their heading, none as long as nobody waits."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns, self._begin = columns, time.monotonic()
        self._held = [[column.heading for column in columns]]

    def add(self, row: dict[str, Any]) -> None:
        """Print a row, or hold it where the command has only begun."""
        self._held.append([column.cell(row.get(column.name)) for column in self._columns])
        if time.monotonic() - self._begin < LATER:
            return
        widths = [len(column.heading) for column in self._columns]
        for cells in self._held:
            say(plain_line(cells, widths))
        self._held.clear()
