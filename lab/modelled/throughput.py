"""Throughput of the suite by the timing model, all providers whose kernels are replayed."""

from __future__ import annotations

import argparse
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from bench import suite
from bench.commands.throughput import compared, rate_columns, standing_note
from bench.measure.providers import default_providers
from bench.suite import DIRECTIONS, Case
from bench.tables.comparison import AS_PUBLISHED, LIKELY, OURS
from bench.tables.ready import results
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from lab.model.stated_errors import stated_errors
from lab.model.throughput import Predictions
from lab.paths import PATH_COLUMNS, path_note

SAMPLES = (
    "sets of the model's constants that published rates do not contradict, the same set for all"
)


def table(rows: list[dict[str, Any]]) -> Table:
    """Tabulate modelled rows; cuDNN's published rates have a column where a row has one."""
    published = any(row.get(AS_PUBLISHED) for row in rows)
    names = [name for name in rows[0]["details"] if name != AS_PUBLISHED or published]
    notes = [
        standing_note(SAMPLES),
        "A modelled probability also counts what the model may be off under any set of "
        f"constants, by class ({stated_errors()}). TFLOPS and the first ratio: of a burst, a "
        "few launches on a GPU at rest; sustained: when the clock has given way to the power "
        "that the products need (lab/docs/timing.md).",
    ]
    if published:
        notes.append(
            f"{AS_PUBLISHED}: its highest published rate of the same call on such a GPU at a "
            "clock of its own, which the model has not replayed; a peer like the others but "
            "under lasting load. The rows behind it are printed by `lab validate`."
        )
    notes.append(path_note("the replays behind a row, ours / the best peer's"))
    return compared(rows, names, columns_of(names), tuple(notes))


def columns_of(names: Sequence[str]) -> tuple[Column, ...]:
    return (
        *rate_columns(names),
        Column("sustained_peer", title="best peer, sustained"),
        Column("sustained_ratio", format=".2f", title="ratio, sustained"),
        Column("sustained_probability", format=".0%", title="probability, sustained"),
        *PATH_COLUMNS,
    )


def summary(rows: list[dict[str, Any]]) -> Table | None:
    """Ratios by direction, group and mask, every row counted; None where no row has one."""
    groups: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["ratio"] is not None:
            mask = row["mask"] if row["mask"] in ("full", "causal") else "windows"
            groups[row["direction"], row["group"], mask, row[BASIS], row[MACHINE]].append(row)
    if not groups:
        return None
    found = []
    for (direction, group, mask, basis, machine), of_group in groups.items():
        ratios = [row["ratio"] for row in of_group]
        winners = [row["faster"] for row in of_group]
        peers = Counter(row["peer"] for row in of_group)
        found.append({
            "direction": direction, "group": group, "mask": mask, "rows": len(of_group),
            "least": min(ratios), "median": statistics.median(ratios), "most": max(ratios),
            "least_probability": min(row["probability"] for row in of_group),
            OURS: winners.count(OURS), "open": winners.count("open"),
            "theirs": len(winners) - winners.count(OURS) - winners.count("open"),
            "peers": ", ".join(f"{name} {count}" for name, count in peers.most_common()),
            BASIS: basis, MACHINE: machine,
        })  # fmt: skip
    columns = (
        Column("direction"), Column("group"), Column("mask"), Column("rows"),
        Column("least", format=".2f"), Column("median", format=".2f"),
        Column("most", format=".2f"),
        Column("least_probability", format=".0%", title="least probability"),
        Column(OURS, title="ours ahead"), Column("open"), Column("theirs", title="peer ahead"),
        Column("peers", title="best peer, in how many rows"),
    )  # fmt: skip
    note = (
        f"Ahead: with a probability of {LIKELY:.0%} or more; open: neither is. Ratios, probability "
        "and best peer are those of the table of all rows."
    )
    plot = Plot(("direction", "group", "mask"), "median", low="least", high="most")
    title = "Ours over the best peer, ratios of rates"
    return Table("throughput", title, columns, found, (note,), plot)


def rows_of(
    cases: Sequence[tuple[Case, str]], names: Sequence[str], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return the rows of (case, direction) in their order; each is printed when it is ready."""
    predictions = Predictions(tuple(names), arguments.machine, arguments.draws)
    all_rows = predictions.all(cases, arguments.jobs)
    found = results(all_rows, len(cases), columns_of(names), lambda numbered: [numbered[1]])
    return [row for _, row in sorted(found, key=lambda numbered: numbered[0])]


def main(arguments: argparse.Namespace) -> int:
    """Exit status 1 if ours was run and broke."""
    directions = [arguments.direction] if arguments.direction else list(DIRECTIONS)
    cases = [(case, direction) for direction in directions for case in suite.selected(arguments)]
    chosen = arguments.provider
    names = [one.name for one in default_providers() if not chosen or one.name in chosen]
    rows = rows_of(cases, names, arguments)
    emit([found for found in (table(rows), summary(rows)) if found], arguments)
    return 1 if any(row["details"][OURS].get("failed") for row in rows) else 0
