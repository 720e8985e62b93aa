"""Tables that the commands make: rows that say where each figure is from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from .origin import environment

#: Origin of a figure. measured: a clock or a counter of the machine named (for the simulator, what
#: it counted or computed). modelled: the timing model. computed: a closed form, or read from what
#: the compiler produced.
BASES = ("measured", "modelled", "computed")

#: Keys that every row has: one of `BASES`, and what the row's figures are of.
BASIS, MACHINE = "basis", "machine"


@dataclass(frozen=True)
class Column:
    """A column of a table. name: the key in rows. unit: "" for none. format: a format specification
    for its numbers, ".1f" or ".2%" for example; "" prints them as they are. title: of the text, the
    name by default."""

    name: str
    unit: str = ""
    format: str = ""
    title: str = ""

    @property
    def heading(self) -> str:
        title = self.title or self.name.replace("_", " ")
        return f"{title} ({self.unit})" if self.unit else title

    def cell(self, value: Any) -> str:
        """The value as text; "-" where there is none."""
        if value is None:
            return "-"
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, (int, float)) and self.format:
            return format(value, self.format)
        return str(value)


@dataclass(frozen=True)
class Plot:
    """Drawing of a table: numbers of column y over column x, by names of columns.

    kind: "bar" or "line". series: column whose values are the bars of a group or the lines; or y
    names several columns, which are these. panel: column whose values get axes of their own. low,
    high: columns of the ends of error bars of one y. x may be several columns, joined to one label.
    Rows without y are left out.
    """

    x: str | tuple[str, ...]
    y: str | tuple[str, ...]
    kind: str = "bar"
    series: str | None = None
    panel: str | None = None
    low: str | None = None
    high: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("bar", "line"):
            raise ValueError(f"kind of plot {self.kind!r}; accepted are 'bar' and 'line'")
        if (self.low is None) != (self.high is None):
            raise ValueError("error bars need both low and high")
        if not isinstance(self.y, str) and (self.series is not None or self.low is not None):
            raise ValueError("several columns of y are the series, and have no error bars")

    def columns(self) -> list[str]:
        """Names of all columns that it reads."""
        x, y = ((n,) if isinstance(n, str) else n for n in (self.x, self.y))
        others = (self.series, self.panel, self.low, self.high)
        return [*x, *y, *(name for name in others if name is not None)]


@dataclass(frozen=True)
class Table:
    """One result of a command.

    columns: what text shows, in order; a row may hold more, which JSON and CSV have, too (nested
    dictionaries as `outer.inner` in CSV). rows: dictionaries with a value (None: there is none) for
    every column and with `basis` and `machine`. notes: sentences below the table. environment:
    versions and the rest that a result depends on.

    Raises ValueError for a row that lacks a column or whose basis is not one of `BASES`, and for a
    plot of a column that is not there.
    """

    command: str
    title: str
    columns: tuple[Column, ...]
    rows: list[dict[str, Any]]
    notes: tuple[str, ...] = ()
    plot: Plot | None = None
    environment: dict[str, str] = field(default_factory=environment)

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if len(set(names)) != len(names):
            raise ValueError(f"{self.command}: a column occurs twice in {names}")
        for row in self.rows:
            missing = [name for name in (*names, BASIS, MACHINE) if name not in row]
            if missing:
                raise ValueError(f"{self.command}: a row has no {', '.join(missing)}: {row}")
            if row[BASIS] not in BASES:
                raise ValueError(
                    f"{self.command}: basis {row[BASIS]!r}; accepted are {', '.join(BASES)}"
                )
        if self.plot is not None and self.rows:
            absent = [name for name in self.plot.columns() if name not in self.rows[0]]
            if absent:
                raise ValueError(f"{self.command}: the plot's columns {absent} are not in the rows")

    def as_json(self) -> dict[str, Any]:
        """Return all of it as JSON values; `from_json` is the inverse."""
        columns, plot = [asdict(column) for column in self.columns], self.plot and asdict(self.plot)
        rest = {name: getattr(self, name) for name in ("command", "title", "rows", "environment")}
        return {**rest, "columns": columns, "notes": list(self.notes), "plot": plot}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Table:
        """Return the table that `as_json` described. Raises ValueError if it is not one."""
        try:
            plot = None
            if (drawn := found["plot"]) is not None:
                # A file may have fields that `Plot` does not know.
                given: dict[str, Any] = {f.name: drawn[f.name] for f in fields(Plot)}
                given |= {
                    name: tuple(given[name]) for name in "xy" if isinstance(given[name], list)
                }
                plot = Plot(**given)
            return cls(
                found["command"], found["title"], tuple(Column(**c) for c in found["columns"]),
                found["rows"], tuple(found["notes"]), plot, found["environment"],
            )  # fmt: skip
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a table of `python -m bench`: {error!r}") from error

    def as_markdown(self) -> str:
        """Title, aligned table, where its figures are from, notes."""
        header = [column.heading for column in self.columns]
        body = [[column.cell(row[column.name]) for column in self.columns] for row in self.rows]
        origins = dict.fromkeys((row[BASIS], row[MACHINE]) for row in self.rows)
        if len(origins) > 1:
            header += [BASIS, "on"]
            body = [[*cells, row[BASIS], row[MACHINE]] for cells, row in zip(body, self.rows)]
        origin = "".join(f" {basis.capitalize()}: {on}." for basis, on in list(origins)[:1])
        title = f"{self.title}.{origin if len(origins) == 1 else ''}"
        return "\n\n".join([title, markdown([header, *body]), *self.notes])


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns, numbers to the right; the first row is the header."""
    rows = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(3, *(len(row[i]) for row in rows)) for i in range(len(rows[0]))]
    right = [
        any(map(_is_number, cells)) and all(_is_number(cell) or cell == "-" for cell in cells)
        for cells in zip(*rows[1:])
    ] or [False] * len(widths)

    def line(row: Sequence[str]) -> str:
        cells = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right)
        )
        return "| " + " | ".join(cells) + " |"

    rule = "|".join(
        "-" * (width + 1) + (":" if to_right else "-") for width, to_right in zip(widths, right)
    )
    return "\n".join([line(rows[0]), f"|{rule}|", *(line(row) for row in rows[1:])])


def _is_number(cell: str) -> bool:
    try:
        float(cell.rstrip("%x "))
    except ValueError:
        return False
    return True
