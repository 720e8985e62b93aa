"""`python -m bench predict`: what the timing model says of rows of an H200, and of an H100's
backwards, beside what they measured.

Whole calls of our Hopper kernels and of flash-attn-4's for SM90, from replays of their machine
code and the machine's constants; no row of this table has set any of them but where it says so.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from bench.model import hopper_rows
from bench.model.hopper_attention import LOAD_MS, REPLAYED_GHZ
from bench.tables.origin import modelled_machine
from bench.tables.results import add_output_options, emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table

COLUMNS = (
    Column("row"), Column("seen", title="measured before"),
    Column("clocks", "1000", ".0f", "clocks of the SMs"),
    Column("counted", "1000", ".0f", "counted by ncu"),
    Column("clock_error", "", "+.1%", "clocks, predicted over counted"),
    Column("busy", "", ".0%", "tensor cores"),
    Column("burst", "TFLOPS", ".0f", "first launches"), Column("late", "TFLOPS", ".0f", "for good"),
    Column("predicted", "us", ".1f"), Column("rate", "TFLOPS", ".0f", "predicted"),
    Column("measured", "us", ".1f"), Column("error", "", "+.1%", "time, predicted over measured"),
)  # fmt: skip


def predictions(chosen: str = "") -> Table:
    """Every row with `chosen` in its name."""
    known, found = hopper_rows.measured(), []
    for row in hopper_rows.rows():
        if chosen not in row.name:
            continue
        print(f"replaying {row.name}", file=sys.stderr, flush=True)
        times = row.times()
        one = known.get(row.name, {})
        seconds = row.predicted(times, one.get("launches", hopper_rows.LAUNCHES_BEFORE))
        measured, counted = one.get("us"), one.get("clocks")
        found.append({
            "row": row.name, "seen": "yes" if row.seen else "no", "clocks": times.clocks / 1e3,
            "counted": None if counted is None else counted / 1e3,
            "clock_error": None if counted is None else times.clocks / counted - 1,
            "busy": times.busy, "burst": row.flop / times.seconds / 1e12,
            "late": row.flop / times.for_good / 1e12, "predicted": seconds * 1e6,
            "rate": row.flop / seconds / 1e12, "measured": measured,
            "error": None if measured is None else seconds * 1e6 / measured - 1,
            BASIS: "modelled", MACHINE: modelled_machine(row.machine),
        })  # fmt: skip
    notes = [
        f"Replayed at {REPLAYED_GHZ} GHz; the clock of first launches follows how busy the tensor "
        f"cores are, and gives way to the power budget where a row's launches before the median "
        f"one take more than {LOAD_MS:.0f} ms. FLOP by the field's convention.",
    ]
    for seen in ("yes", "no"):
        for key, what in (("error", "times"), ("clock_error", "clocks")):
            errors = np.array([r[key] for r in found if r[key] is not None and r["seen"] == seen])
            if len(errors):
                notes.append(
                    f"Measured before the prediction: {seen}: {what} of {len(errors)} rows, within "
                    f"10 % {int((np.abs(errors) <= 0.1).sum())}, mean {errors.mean():+.1%}, rms "
                    f"{np.sqrt((errors**2).mean()):.1%}."
                )
    title = "Attention on an H200 and an H100, predicted and measured"
    return Table(
        "predict", title, COLUMNS, found, tuple(notes), Plot("row", ("predicted", "measured"))
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--row", default="", help="only rows with this in their names")
    add_output_options(parser)


def main(arguments: argparse.Namespace) -> int:
    """Run the command; the exit status."""
    emit(predictions(arguments.row), arguments)
    return 0
