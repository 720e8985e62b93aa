"""Match of the SASS of replays with what was run, in tables of modelled rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from bench.tables.table import Column


class Replayed(Protocol):
    """Replay whose match is counted (`lab.model.replays.Replayed`)."""

    @property
    def unmatched(self) -> int: ...

    @property
    def ambiguous(self) -> int: ...


@dataclass(frozen=True)
class Paths:
    """Match of the SASS of some replays with what was run: events and sites without a counterpart,
    choices that nothing decides. Sums; those of several kernels are added."""

    unmatched: int = 0
    ambiguous: int = 0

    @classmethod
    def of(cls, rows: Iterable[Replayed]) -> Paths:
        return cls(sum(row.unmatched for row in rows), sum(row.ambiguous for row in rows))

    def __add__(self, other: Paths) -> Paths:
        return Paths(self.unmatched + other.unmatched, self.ambiguous + other.ambiguous)


#: `Paths` in tables of modelled rows; every such table has them, with `path_note` below it.
PATH_COLUMNS = (Column("unmatched"), Column("ambiguous"))


def path_figures(*found: Paths | None) -> dict[str, int | str | None]:
    """Return a row's figures under `PATH_COLUMNS`: of one kernel numbers, of several "1 / 0" in
    their order, with "-" for one without replays; None if there is none at all."""

    def figure(name: str) -> int | str | None:
        values = [None if paths is None else getattr(paths, name) for paths in found]
        if len(values) == 1 or values == [None] * len(values):
            return values[0]
        return " / ".join("-" if value is None else str(value) for value in values)

    return {column.name: figure(column.name) for column in PATH_COLUMNS}


def path_note(replays: str) -> str:
    """The sentence that explains `PATH_COLUMNS`. replays: which ones a row's figures are of."""
    return (
        f"unmatched, ambiguous: of {replays}: events and SASS sites without a counterpart, and "
        "choices between paths that neither events nor instruction mixes decide."
    )
