"""`python -m bench tables [NAME...]`: the tables of docs/tables, each by the command it names.

Some of these commands replay for an hour where no replay is kept, and some need a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shlex
import tempfile
from pathlib import Path
from typing import Any

from bench.tables.documents import DOCUMENTS, FOLDER, Document
from bench.tables.results import add_output_options, emit, read_json
from bench.tables.table import BASIS, MACHINE, Column, Table

COLUMNS = (Column("name"), Column("command"), Column("page"), Column("state"))


def made(document: Document) -> list[Table]:
    """The tables that its command makes now."""
    name, *options = shlex.split(" ".join(document.command))
    module = importlib.import_module(f"{__package__}.{name.replace('-', '_')}")
    parser = argparse.ArgumentParser(prog=f"python -m bench {name}")
    module.add_arguments(parser)
    with tempfile.TemporaryDirectory(prefix="fa4_hd256_") as directory:
        target = Path(directory, "result.json")
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            module.main(parser.parse_args([*options, "--json", str(target)]))
        return read_json(target.read_text())


def _row(name: str, write: Path | None) -> dict[str, Any]:
    document, state = DOCUMENTS[name], "listed"
    if write is not None:
        (write / f"{name}.md").write_text(document.text(name, made(document)), "utf-8")
        state = "written"
    return {
        "name": name, "command": "python -m bench " + " ".join(document.command),
        "page": document.page, "state": state, BASIS: "computed", MACHINE: "this code",
    }  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="of tables; all unless chosen")
    parser.add_argument(
        "--write", type=Path, nargs="?", const=FOLDER, metavar="DIR",
        help="run their commands and write the files, by default into docs/tables",
    )
    add_output_options(parser)


def main(arguments: argparse.Namespace) -> int:
    """Raises ValueError for a name that is none, or to be written but kept from before, and where
    all would be run unasked."""
    for name in arguments.names:
        if name not in DOCUMENTS:
            raise ValueError(f"table {name!r}; accepted are {', '.join(DOCUMENTS)}")
        if arguments.write and DOCUMENTS[name].of_before:
            raise ValueError(
                f"table {name!r} is kept from before, and its command would print another one: "
                "name one that can be made anew"
            )
    if arguments.write and not arguments.names:
        raise ValueError("--write takes names: all commands together run for hours")
    rows = [_row(name, arguments.write) for name in arguments.names or DOCUMENTS]
    emit(Table("tables", "Tables of docs/tables", COLUMNS, rows), arguments)
    return 0
