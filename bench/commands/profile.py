"""`python -m bench profile`: Nsight Compute on our kernels, and what matters of its report.

Prints the command lines; with --run it runs them on this machine's GPU. `--read FILE` summarises
the raw page that `ncu --csv` wrote, here or elsewhere. Options: Nsight Compute CLI manual, command
line options; names of metrics: Nsight Compute profiling guide. None of it has been tried on an
SM100 GPU: a metric that a report does not have is listed as such.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.measure.nsight import (
    METRICS,
    Sampling,
    call_twice,
    collect_command,
    read_command,
    read_raw_page,
    rows,
    run,
    trace_command,
)
from bench.suite import DIRECTIONS, FORWARD, Case
from bench.tables.results import emit
from bench.tables.shape_options import chosen_case
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table

COLUMNS = (
    Column("kernel"),
    *(Column(m.name, m.unit, m.format, m.name.replace("_", " ")) for m in METRICS),
    Column("stalls", title="warps waiting when one issues"),
)


def table(found: list[dict[str, Any]]) -> Table:
    """The summary; what the report lacks is named below."""
    missing = [m.name for m in METRICS if all(row[m.name] is None for row in found)]
    notes = ["Per cent of what the unit sustains at its peak; tensor: tcgen05.mma."]
    if missing:
        notes.append(f"Not in this report: {', '.join(missing)}.")
    if any(row["samples_lost"] for row in found):
        notes.append("Samples of warps were lost: raise --interval or --buffer; stalls are biased.")
    plot = Plot("kernel", tuple(m.name for m in METRICS if m.unit == "%"))
    return Table("profile", "Nsight Compute", COLUMNS, found, tuple(notes), plot)


def command_table(commands: Sequence[tuple[str, list[str]]], note: str) -> Table:
    """Command lines that were not run: below the table, where they can be copied."""
    listed = [
        {"purpose": purpose, "tool": command[0], "command": shlex.join(command),
         BASIS: "computed", MACHINE: "not run"}
        for purpose, command in commands
    ]  # fmt: skip
    lines = "\n".join(row["command"] for row in listed)
    columns = Column("purpose"), Column("tool")
    return Table("profile", "Commands", columns, listed, (f"```\n{lines}\n```", note))


def commands(case: Case, arguments: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """Return the command lines, in order, for the directions chosen."""
    directions = [arguments.direction] if arguments.direction else DIRECTIONS
    if arguments.iket:
        return [(f"trace {direction}", trace_command(case, direction)) for direction in directions]
    found = []
    for direction in directions:
        report = f"{arguments.report}-{direction}.ncu-rep"
        sampling = Sampling(arguments.interval, arguments.buffer)
        found.append((f"collect {direction}", collect_command(case, direction, report, sampling)))
        found.append((f"read {direction}", read_command(report)))
    return found


def main(arguments: argparse.Namespace) -> int:
    case = chosen_case(arguments)
    if arguments.workload:
        call_twice(case, arguments.direction or FORWARD)
        return 0
    if arguments.read:
        emit(table(rows(read_raw_page(Path(arguments.read).read_text()))), arguments)
        return 0
    wanted = commands(case, arguments)
    if not arguments.run:
        note = "Not run: --run runs them on an SM100 GPU; --read FILE summarises what they wrote."
        emit(command_table(wanted, note), arguments)
        return 0
    found = run(wanted)
    if found:
        emit(table(found), arguments)
    return 0
