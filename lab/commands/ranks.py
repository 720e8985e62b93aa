"""`python -m lab ranks`: one long sequence over several GPUs, measured.

`fa4_hd256.integrations.context_parallel` through NCCL beside one GPU that has the whole sequence,
and beside PyTorch's own context_parallel over our kernels, cuDNN's and FlashAttention-2's. How much
of the exchange the ring hides: the time in which it waits, beside that of its transfers without
kernels. On two CUDA GPUs or more.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.measure.time_limit import TimeLimit
from bench.suite import DIRECTIONS
from bench.tables.ready import results
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from lab.measure.rank_processes import ONE_GPU, Times, each_job, figures, rank_count
from lab.measure.ranks import KERNELS, RING, TRANSFERS, WAITS, WAYS, Job, RanksCase, timed

#: A sequence's case and a direction.
Row = tuple[RanksCase, str]

CASES = (
    RanksCase(131072, 16, 2, True),
    RanksCase(131072, 16, 16, True),
    RanksCase(131072, 16, 2, False),
    RanksCase(32768, 16, 2, True),
    RanksCase(32768, 16, 16, True),
)

COLUMNS = (
    Column("sequence"), Column("direction"), Column("way"), Column("status"),
    Column("ms", "ms", ".2f", "median"), Column("low", "ms", ".2f", "20 %"),
    Column("high", "ms", ".2f", "80 %"), Column("tflops", "TFLOPS", ".0f", "a GPU"),
    Column("speedup", "", ".2f", f"over {ONE_GPU}"),
    Column("efficiency", "", ".1%", "of as many GPUs"),
)  # fmt: skip
HIDDEN_COLUMNS = (
    Column("sequence"), Column("direction"), Column("ring", "ms", ".2f"),
    Column("kernels", "ms", ".2f", "kernels alone"),
    Column("transfers", "ms", ".2f", "transfers alone"),
    Column("share", "", ".1%", "transfers over ring"),
    Column("waits", "ms", ".2f", "waits for them"),
    Column("hidden", "", ".0%", "of the transfers hidden"),
)  # fmt: skip


_OF_HIDING = RING, KERNELS, TRANSFERS, WAITS


def tables(found: Mapping[tuple[Row, str], Times | str], ranks: int, machine: str) -> list[Table]:
    """found: by row and way the times, or why there are none."""
    rows, hidden = [], []
    for case, direction in dict.fromkeys(row for row, _ in found):
        of_row = {way: times for (row, way), times in found.items() if row == (case, direction)}
        origin = {BASIS: "measured", MACHINE: machine}
        place = {"sequence": str(case), "direction": direction} | origin
        rows += [_row((case, direction, way), of_row, ranks) | origin for way in of_row]
        medians = {w: float(np.median(t)) for w, t in of_row.items() if not isinstance(t, str)}
        if set(_OF_HIDING) <= set(medians):
            hidden.append(place | _hidden(*(medians[way] for way in _OF_HIDING)))
    notes = (
        "From a barrier to the end of the slowest rank, by CUDA events, what the host does "
        f'included. "{ONE_GPU}": each GPU by itself does all of it, all at once. The backward '
        "begins with what the forward left.",
    )
    hiding = (
        f"{KERNELS}: with a copy on the GPU in the place of each transfer. {WAITS}: the time in "
        "which a rank's stream waits for them; hidden is the rest of the time that transfers take "
        "alone. What they slow kernels down by is in neither.",
    )
    plot = Plot(("sequence", "way"), "tflops", panel="direction")
    return [
        Table("ranks", f"One sequence over {ranks} GPUs", COLUMNS, rows, notes, plot),
        Table("hidden", "Transfers of the ring", HIDDEN_COLUMNS, hidden, hiding),
    ]


def _row(job: Job, of_row: Mapping[str, Times | str], ranks: int) -> dict[str, Any]:
    """Columns of a job. of_row: what is found for the ways of its row."""
    case, direction, way = job
    place = {"sequence": str(case), "direction": direction, "way": way}
    return place | _figures(case, direction, way, of_row, ranks)


def _figures(
    case: RanksCase, direction: str, way: str, of_row: Mapping[str, Times | str], ranks: int
) -> dict[str, Any]:
    """Columns of one way. Those that leave something out have no rate."""
    row: dict[str, Any] = dict.fromkeys(column.name for column in COLUMNS[3:])
    times, is_whole = of_row[way], way not in (KERNELS, TRANSFERS, WAITS)
    row |= figures(times, of_row.get(ONE_GPU) if is_whole and way != ONE_GPU else None)
    if isinstance(times, str):
        return row
    row["milliseconds"] = list(times)
    if is_whole:
        row["tflops"] = case.flop(direction) / (1 if way == ONE_GPU else ranks) / row["ms"] / 1e9
    if row["speedup"] is not None:
        row["efficiency"] = row["speedup"] / ranks
    return row


def _hidden(ring: float, kernels: float, transfers: float, waits: float) -> dict[str, float]:
    return {
        "ring": ring, "kernels": kernels, "transfers": transfers, "share": transfers / ring,
        "waits": waits, "hidden": max(1 - waits / transfers, 0.0),
    }  # fmt: skip


def jobs_of(only: Sequence[str], direction: str | None, ways: Sequence[str] | None) -> list[Job]:
    """Return (case, direction, way), those of one row side by side. Raises ValueError for a text
    that is in no sequence's line."""
    for text in only:
        if not any(text in str(case) for case in CASES):
            lines = "; ".join(map(str, CASES))
            raise ValueError(f"no sequence has {text!r} in its line; there are {lines}")
    cases = [case for case in CASES if not only or any(text in str(case) for text in only)]
    directions = [direction] if direction else DIRECTIONS
    return [(case, one, way) for case in cases for one in directions for way in ways or WAYS]


def main(arguments: argparse.Namespace) -> int:
    """Exit status 1 if the ring was run and broke."""
    limit = TimeLimit(arguments.within)
    chosen = jobs_of(arguments.only or (), arguments.direction, arguments.way)
    ranks = rank_count(arguments.ranks, "ranks")
    found: dict[tuple[Row, str], Times | str] = {}

    def heard(one: tuple[Job, Times | str]) -> list[dict[str, Any]]:
        job, times = one
        case, direction, way = job
        found[(case, direction), way] = times
        of_row = {way: times for (row, way), times in found.items() if row == (case, direction)}
        return [_row(job, of_row, ranks)]

    timing = partial(timed, sampling=(arguments.warmup, arguments.runs))
    each = each_job(timing, limit.begun(chosen), ranks)
    for _ in results(each, len(chosen), COLUMNS, heard, "measuring"):
        pass
    machine = f"{ranks} x {torch.cuda.get_device_name(0)}"
    emit([limit.noted(table) for table in tables(found, ranks, machine)], arguments)
    return int(any(isinstance(times, str) for (_, way), times in found.items() if way == RING))
