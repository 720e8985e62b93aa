"""Rows of a table on stderr as each is ready; the whole table follows on stdout."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from fa4_hd256.progress import counted, say

from .table import Column

Result = TypeVar("Result")

#: Seconds that a command takes before its rows are printed one by one.
LATER = 1.0


def ready(
    rows: Iterable[dict[str, Any]], total: int | None, columns: Sequence[Column],
    doing: str = "replaying",
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the rows, each printed as soon as it is there; a bar counts those that are left.
    total: rows that there will be at most, None if nobody knows. columns: those of a printed row.
    doing: a verb for what a row takes its time for."""
    return list(results(rows, total, columns, lambda row: [row], doing))


def results(
    found: Iterable[Result], total: int | None, columns: Sequence[Column],
    rows_of: Callable[[Result], Iterable[dict[str, Any]]], doing: str = "replaying",
) -> Iterator[Result]:  # fmt: skip
    """Yield what is found; see `ready`. rows_of: the rows that a result makes."""
    begin, heading = time.monotonic(), [column.heading for column in columns]
    lines = [heading]
    for one in counted(found, total, doing):
        lines += [[c.cell(row.get(c.name)) for c in columns] for row in rows_of(one)]
        if len(lines) > (heading in lines) and time.monotonic() - begin >= LATER:
            for cells in lines:
                texts = (cell.replace("|", "\\|") for cell in cells)
                say("| " + " | ".join(map(str.ljust, texts, map(len, heading))) + " |")
            lines.clear()
        yield one
