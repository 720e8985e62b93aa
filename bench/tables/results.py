"""What every command of this room returns: tables of rows that say where each figure is from.

A command builds one `Table` or several and hands them to `emit`, which prints them as Markdown or
writes them as JSON, CSV or a plot. `python -m bench report` reads the JSON again.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib.metadata
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

#: Where a figure is from. measured: a clock or a counter of the machine named (for the simulator,
#: what it counted or computed). modelled: the timing model. computed: a closed form, or read from
#: what the compiler produced.
BASES = ("measured", "modelled", "computed")

#: Keys that every row has: one of `BASES`, and what the row's figures are of.
BASIS, MACHINE = "basis", "machine"

STDOUT = "-"


@dataclass(frozen=True)
class Column:
    """A column of a table.

    name: the key in rows. unit: "" for none. format: a format specification for its numbers, ".1f"
    or ".2%" for example; "" prints them as they are. title: of the text, the name by default.
    """

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
    """How a table is drawn: numbers of column y over column x, by names of columns.

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
    log_x: bool = False

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
    environment: dict[str, str] = field(default_factory=lambda: environment())

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
        """All of it as JSON values; `from_json` is the inverse."""
        plot = None if self.plot is None else {f.name: getattr(self.plot, f.name)
                                               for f in fields(Plot)}
        return {
            "command": self.command,
            "title": self.title,
            "columns": [{f.name: getattr(c, f.name) for f in fields(Column)} for c in self.columns],
            "rows": self.rows,
            "notes": list(self.notes),
            "plot": plot,
            "environment": self.environment,
        }  # fmt: skip

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Table:
        """The table that `as_json` described. Raises ValueError if it is not one."""
        try:
            plot = found["plot"]
            if plot is not None:
                several = {n: tuple(plot[n]) for n in "xy" if not isinstance(plot[n], str)}
                plot = Plot(**{**plot, **several})
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
            body = [
                [*cells, row[BASIS], row[MACHINE]] for cells, row in zip(body, self.rows)
            ]
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

    def line(row: list[str]) -> str:
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


def environment() -> dict[str, str]:
    """Versions of what results depend on, the commit of a checkout, the time in UTC."""
    from bench.peers.flash_attn_4 import PACKAGE
    from fa4_hd256.run.compile import versions

    try:
        theirs = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        theirs = "not installed"
    root = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True)
        commit = asked.stdout.strip() if asked.returncode == 0 else ""
    except OSError:
        commit = ""
    return {
        **versions(),
        PACKAGE: theirs,
        "commit": commit or "not a git checkout",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def simulator_machine() -> str:
    """For `machine`: figures that the simulator counted, or of its own speed."""
    return f"simulator on a CPU, {len(os.sched_getaffinity(0))} cores"


def compiler_machine() -> str:
    """For `machine`: figures read from compiled code."""
    from fa4_hd256.gpus.family import TARGET

    return f"{TARGET}, nvidia-cutlass-dsl {importlib.metadata.version('nvidia-cutlass-dsl')}"


def modelled_machine(machine: Any) -> str:
    """For `machine`: figures of the timing model.

    machine: a `sm100_sim.timing.machine_constants.Machine`; a hash tells which constants.
    """
    content = {
        name: (constant.value, constant.low, constant.high)
        for name, constant in sorted(machine.constants.items())
    }
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:8]
    return f"{machine.name.upper()} modelled, constants {digest}"


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """--json, --csv and --plot, as `emit` reads them."""
    group = parser.add_argument_group("output", "a Markdown table on stdout, unless chosen here")
    for name in ("json", "csv"):
        group.add_argument(
            f"--{name}", nargs="?", const=STDOUT, metavar="FILE",
            help=f"{name.upper()} to FILE, or to stdout in place of the text",
        )
    group.add_argument("--plot", metavar="FILE", help="a plot; the suffix of FILE names the format")


def emit(tables: Table | Sequence[Table], arguments: argparse.Namespace) -> None:
    """Print and write the tables as the options of `add_output_options` say.

    Raises ValueError if a plot is asked for and cannot be drawn, or JSON and CSV both on stdout.
    """
    tables = [tables] if isinstance(tables, Table) else list(tables)
    if arguments.json == arguments.csv == STDOUT:
        raise ValueError("--json and --csv cannot both go to stdout; name a file for one of them")
    forms = (
        (arguments.json, lambda: json_text(tables) + "\n"),
        (arguments.csv, lambda: csv_text(tables)),
    )
    for target, text in forms:
        if target is not None and target != STDOUT:
            Path(target).write_text(text())
    to_stdout = [text for target, text in forms if target == STDOUT]
    sys.stdout.write(to_stdout[0]() if to_stdout else markdown_text(tables) + "\n")
    # Last: what took long to find out must not be lost to a missing library.
    if arguments.plot:
        draw(tables, arguments.plot)


def markdown_text(tables: Iterable[Table]) -> str:
    return "\n\n".join(table.as_markdown() for table in tables)


def json_text(tables: Iterable[Table]) -> str:
    """One object whose `tables` are those of `Table.as_json`."""
    return json.dumps({"tables": [table.as_json() for table in tables]}, default=_plain)


def read_json(text: str) -> list[Table]:
    """The tables that `json_text` wrote. Raises ValueError if it is something else."""
    found = json.loads(text)
    if not isinstance(found, dict) or not isinstance(found.get("tables"), list):
        raise ValueError("not a result of `python -m bench`: there is no list of tables")
    return [Table.from_json(table) for table in found["tables"]]


def _plain(value: Any) -> Any:
    """numpy's and fractions' numbers as JSON has them."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "numerator"):
        return float(value)
    raise TypeError(f"{type(value).__name__} is not a value of a result: {value!r}")


def csv_text(tables: Sequence[Table]) -> str:
    """One line for each row of all tables; `table` names the table where there are several."""
    rows = []
    for table in tables:
        named = {"table": table.title} if len(tables) > 1 else {}
        rows += [{**named, **_flat(row)} for row in table.rows]
    names = dict.fromkeys(name for row in rows for name in row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for name, value in row.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def draw(tables: Sequence[Table], target: Any, form: str | None = None) -> None:
    """Draw every table that has a plot into one figure.

    target: path or binary file; form: "svg" and the like, by default the path's suffix. Raises
    ValueError if no table has a plot or matplotlib is not installed.
    """
    from .plots import draw_tables

    chosen = [table for table in tables if table.plot is not None and table.rows]
    if not chosen:
        raise ValueError("nothing to plot: no table of this command holds a plot or rows")
    draw_tables(chosen, target, form)
