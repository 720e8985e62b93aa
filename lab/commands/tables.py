"""`python -m lab tables [NAME...]`: the tables of docs/tables, each by the command it names.

Some of these commands replay for an hour where no replay is kept, and some need a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.tables.ready import ready
from bench.tables.results import emit, read_json
from bench.tables.table import BASIS, MACHINE, Column, Table
from lab.tables.age import changed_since, printed_at
from lab.tables.documents import DOCUMENTS, Document, path_of

COLUMNS = (Column("name"), Column("command"), Column("page"), Column("state"))
#: With --age.
AGE = (Column("printed at"), Column("changed since"))


def made(document: Document) -> list[Table]:
    name, *given = shlex.split(" ".join(document.command))
    module = importlib.import_module(f"{document.program}.commands.{name.replace('-', '_')}")
    options = importlib.import_module(f"{document.program}.options")
    parser = argparse.ArgumentParser(prog=f"python -m {document.program} {name}")
    getattr(options, name.replace("-", "_"))(parser)
    with tempfile.TemporaryDirectory(prefix="fa4_hd256_") as directory:
        target = Path(directory, "result.json")
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            module.main(parser.parse_args([*given, "--json", str(target)]))
        return read_json(target.read_text())


def merged(files: Sequence[Path]) -> list[Table]:
    """The tables of several results of one command, whose cases were shared out: rows and notes one
    after the other, columns that any has, - where a row has none. Raises ValueError where they are
    not tables of the same titles."""
    results = [read_json(path.read_text("utf-8")) for path in files]
    titles = [[table.title for table in tables] for tables in results]
    if any(found != titles[0] for found in titles):
        raise ValueError(f"results of several commands: their tables are {titles}")
    return [_joined(tables) for tables in zip(*results, strict=True)]


def _joined(tables: Sequence[Table]) -> Table:
    columns = {column.name: column for table in tables for column in table.columns}
    absent = dict.fromkeys(columns)
    rows = [absent | row for table in tables for row in table.rows]
    notes = tuple(dict.fromkeys(note for table in tables for note in table.notes))
    return replace(tables[0], columns=tuple(columns.values()), rows=rows, notes=notes)


def _row(name: str, write: Path | bool | None, results: Sequence[Path]) -> dict[str, Any]:
    document, state = DOCUMENTS[name], "listed"
    if write is not None:
        folder = document.folder if isinstance(write, bool) else write
        tables = merged(results) if results else made(document)
        (folder / f"{name}.md").write_text(document.text(name, tables), "utf-8")
        state = "written"
    return {
        "name": name, "command": f"python -m {document.program} {' '.join(document.command)}",
        "page": document.page, "state": state, BASIS: "computed", MACHINE: "this code",
    }  # fmt: skip


def _age(name: str) -> dict[str, str | None]:
    commit = printed_at(path_of(name).read_text("utf-8"))
    since = "unknown" if commit is None else changed_since(commit)
    return {"printed at": commit, "changed since": since}


def main(arguments: argparse.Namespace) -> int:
    """Run the command. Raises ValueError where all would be run unasked."""
    if arguments.write and not arguments.names:
        raise ValueError("--write takes names: all commands together run for hours")
    if arguments.results and (len(arguments.names) != 1 or not arguments.write):
        raise ValueError("--results are of one command: name its table, and --write")
    names = arguments.names or list(DOCUMENTS)
    made_rows = (_row(name, arguments.write, arguments.results) for name in names)
    rows = ready(made_rows, len(names), COLUMNS, "writing")
    if arguments.age:
        rows = [row | _age(row["name"]) for row in rows]
    columns = COLUMNS + (AGE if arguments.age else ())
    emit(Table("tables", "Tables of docs/tables", columns, rows), arguments)
    return 0
