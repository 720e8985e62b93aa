"""Output of tables: Markdown on stdout, or JSON, CSV and a plot.

A command builds one `Table` or several and hands them to `emit`. `python -m bench report` reads the
JSON again.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import io
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .plots import NO_MATPLOTLIB, SUFFIXES, draw_tables
from .table import Table

STDOUT = "-"


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """--json, --csv and --plot, as `emit` reads them."""
    group = parser.add_argument_group("output", "a Markdown table on stdout, unless chosen here")
    for name in ("json", "csv"):
        group.add_argument(
            f"--{name}",
            nargs="?",
            const=STDOUT,
            type=_file,
            metavar="FILE",
            help=f"{name.upper()} to FILE, or to stdout in place of the text",
        )
    group.add_argument(
        "--plot",
        type=_plot_file,
        metavar="FILE",
        help=f"a plot; the suffix of FILE is one of {', '.join(SUFFIXES)}",
    )


def _file(text: str) -> str:
    """Return the name of a file that can be written. Raises ArgumentTypeError for another one."""
    folder = Path(text).parent
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {folder}; create it first")
    if Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; accepted: the name of a file")
    return text


def _plot_file(text: str) -> str:
    """Return the name of a file that a plot can be drawn into, as `_file`."""
    if (suffix := Path(text).suffix).lower() not in SUFFIXES:
        has = f"the suffix {suffix}" if suffix else "no suffix"
        raise argparse.ArgumentTypeError(f"{text} has {has}; accepted: {', '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(NO_MATPLOTLIB)
    return _file(text)


def check_output_options(arguments: argparse.Namespace) -> None:
    """Raise ValueError if JSON and CSV are both to go to stdout."""
    if arguments.json == arguments.csv == STDOUT:
        raise ValueError("--json and --csv cannot both go to stdout; name a file for one of them")


def emit(tables: Table | Sequence[Table], arguments: argparse.Namespace) -> None:
    """Print and write the tables as the options of `add_output_options` say. Raises ValueError if a
    plot is requested and cannot be drawn, or JSON and CSV both on stdout."""
    tables = [tables] if isinstance(tables, Table) else list(tables)
    check_output_options(arguments)
    on_stdout = ""
    for target, text in ((arguments.json, json_text), (arguments.csv, csv_text)):
        if target == STDOUT:
            on_stdout = text(tables)
        elif target is not None:
            Path(target).write_text(text(tables))
    sys.stdout.write(on_stdout or "\n\n".join(table.as_markdown() for table in tables) + "\n")
    # Last: what took long to find out must not be lost to a missing library.
    if arguments.plot:
        draw(tables, arguments.plot)


def json_text(tables: Iterable[Table]) -> str:
    """Return one object whose `tables` are those of `Table.as_json`."""
    return json.dumps({"tables": [table.as_json() for table in tables]}, default=_plain) + "\n"


def read_json(text: str) -> list[Table]:
    """Return the tables that `json_text` wrote. Raises ValueError if it is something else."""
    found = json.loads(text)
    if not isinstance(found, dict) or not isinstance(found.get("tables"), list):
        raise ValueError("not a result of `python -m bench`: there is no list of tables")
    return [Table.from_json(table) for table in found["tables"]]


def _plain(value: Any) -> Any:
    """Return numpy's and fractions' numbers as JSON has them."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "numerator"):
        return float(value)
    raise TypeError(f"{type(value).__name__} is not a value of a result: {value!r}")


def csv_text(tables: Sequence[Table]) -> str:
    """Return a line for each row of all tables; `table` names the table of several."""
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
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def draw(tables: Sequence[Table], target: Any, form: str | None = None) -> None:
    """Draw every table that has a plot into one figure. target: path or binary file; form: "svg"
    and the like, by default the path's suffix. Raises ValueError if no table has a plot or
    matplotlib is not installed."""
    chosen = [table for table in tables if table.plot is not None and table.rows]
    if not chosen:
        raise ValueError("nothing to plot: no table of this command holds a plot or rows")
    draw_tables(chosen, target, form)
