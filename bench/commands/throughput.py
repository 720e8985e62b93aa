"""`python -m bench throughput`: forward and backward over the suite, implementations side by side.

On a CUDA GPU every provider's result is checked against the one reference, then all of them are
timed by turns. Without one, ours and flash-attn-4's times are those of the timing model.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from typing import Any

import torch

from bench import suite
from bench.measure.providers import default_providers
from bench.measure.throughput import measured_rows
from bench.measure.timer import (
    CudaTimer,
    Sampling,
    add_sampling_options,
)
from bench.model.predictor import add_model_options
from bench.model.throughput import Predictions
from bench.peers import flash_attn_4
from bench.processes import add_jobs_option
from bench.suite import DIRECTIONS
from bench.tables.comparison import OURS, RESOLUTION
from bench.tables.paths import PATH_COLUMNS, path_note
from bench.tables.results import add_output_options, emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def table(rows: list[dict[str, Any]]) -> Table:
    """Providers side by side; what did not run is listed below with its reason."""
    names = list(rows[0]["details"])
    columns = (
        Column("direction"), Column("shape"), Column("heads"), Column("mask"),
        *(Column(name, "TFLOPS", ".0f", name) for name in names),
        Column("range", title="ours, range"),
        Column("their_range", title=f"{flash_attn_4.PACKAGE}, range"),
        Column("of_peak", format=".1%", title="ours, of peak"),
        Column("clock_mhz", "MHz", ".0f", "clock"),
        Column("ratio", format=".2f", title=f"ours / {flash_attn_4.PACKAGE}"),
        Column("ratio_low", format=".2f", title="low"),
        Column("ratio_high", format=".2f", title="high"),
        Column("faster"),
    )  # fmt: skip
    if rows[0][BASIS] == "modelled":
        columns += (Column("sustained", title="ratio under load"), *PATH_COLUMNS)
    plot = Plot(("shape", "heads"), tuple(names), panel="panel")
    return Table("throughput", "Throughput at head_dim 256", columns, rows, _notes(rows), plot)


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
        ahead = [row["ratio"] > 1 + RESOLUTION and row["ratio_low"] > 1 for row in of_group]
        found.append({
            "direction": direction, "group": group, "mask": mask, "rows": len(of_group),
            "least": min(ratios), "median": statistics.median(ratios), "most": max(ratios),
            "ahead": sum(ahead), OURS: winners.count(OURS), "theirs": winners.count(
                flash_attn_4.PACKAGE), BASIS: basis, MACHINE: machine,
        })  # fmt: skip
    columns = (
        Column("direction"), Column("group"), Column("mask"), Column("rows"),
        Column("least", format=".2f"), Column("median", format=".2f"),
        Column("most", format=".2f"),
        Column(OURS, title="ours faster"),
        Column("ahead", title="ours ahead under every condition"),
        Column("theirs", title=f"{flash_attn_4.PACKAGE} faster"),
    )  # fmt: skip
    note = (
        "faster: as in the table of all rows. Ahead under every condition: by more than "
        f"{RESOLUTION:.0%}, and in every draw of the constants, the same for both; where times are "
        "measured, in the slow runs of ours against the fast ones of the other."
    )
    title = f"Ours / {flash_attn_4.PACKAGE}, ratios of rates"
    plot = Plot(("direction", "group", "mask"), "median", low="least", high="most")
    return Table("throughput", title, columns, found, (note,), plot)


def _notes(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    measured = rows[0][BASIS] == "measured"
    ranges = "p80 to p20 of the timed runs" if measured else (
        "over draws of the uncertain constants, of ratios with the same draw for both"
    )
    notes = [
        f"Ranges: {ranges}. \"faster\" names a provider only where the ranges do not overlap and "
        f"the difference is {RESOLUTION:.0%} or more. FLOP: 4 Sq Sk D a head, half if causal, "
        "visible pairs with a window; backward 2.5 times that. Peak: dense bf16 at the clock "
        "recorded."
    ]
    if not measured:
        notes.append(
            "TFLOPS and ratio: of a burst, a few launches on a GPU at rest. Ratio under load, with "
            "its range: for as long as it takes until the clock has given way to the power that "
            "the products need (docs/timing.md); \"faster\" does not use it."
        )
        notes.append(path_note(f"the replays behind a row, ours / {flash_attn_4.PACKAGE}'s"))
    reasons: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows:
        for name, found in row["details"].items():
            if found["status"] != "ok":
                reasons[name, found["status"]] += 1
    for (name, reason), count in reasons.items():
        notes.append(f"{name}: {count} of {len(rows)} not run: {reason}.")
    return tuple(notes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--direction", choices=DIRECTIONS, help="both unless chosen")
    add_model_options(parser)
    add_jobs_option(parser)
    add_sampling_options(parser)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of a measurement")
    suite.add_selection(parser)
    add_output_options(parser)


def main(arguments: argparse.Namespace) -> int:
    """Exit status 1 if ours was run and broke, or was wrong."""
    directions = [arguments.direction] if arguments.direction else list(DIRECTIONS)
    cases = [
        (case, direction) for direction in directions for case in suite.selected(arguments)
    ]
    providers = default_providers()
    if torch.cuda.is_available() and not arguments.modelled:
        sampling = Sampling(arguments.warmup, arguments.runs)
        timer, dtype = CudaTimer(), DTYPES[arguments.dtype]
        rows = measured_rows(cases, providers, timer, sampling, dtype)
    else:
        names = tuple(provider.name for provider in providers)
        rows = Predictions(names, arguments.machine, arguments.draws).all(cases, arguments.jobs)
    emit([found for found in (table(rows), summary(rows)) if found], arguments)
    return 1 if any(row["details"][OURS].get("failed") for row in rows) else 0
