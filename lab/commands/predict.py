"""`python -m lab predict`: what the timing model says of rows of an H200 and of an H100, beside
what they measured.

Whole calls of our Hopper kernels and of flash-attn-4's for SM90, from replays of their machine
code and the machine's constants; no row of this table has set any of them but where it says so.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.tables.ready import ready
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from fa4_hd256 import progress
from lab.model.hopper import rows as hopper_rows
from lab.model.hopper.attention import REPLAYED_GHZ, Times
from lab.model.origin import modelled_machine

#: Times of a row: columns of each begin with its name.
TIMES = {"first": "first launches", "late": "for good"}
COLUMNS = (
    Column("row"), Column("seen", title="measured before"),
    Column("clocks", "1000", ".0f", "clocks of the SMs"),
    Column("counted", "1000", ".0f", "counted by ncu"),
    Column("clock_error", "", "+.1%", "clocks, predicted over counted"),
    Column("busy", "", ".0%", "tensor cores"),
    *(
        column
        for name, title in TIMES.items()
        for column in (
            Column(name, "us", ".1f", f"{title}, predicted"),
            Column(f"{name}_measured", "us", ".1f", f"{title}, measured"),
            Column(f"{name}_error", "", "+.1%", f"{title}, predicted over measured"),
            Column(f"{name}_rate", "TFLOPS", ".0f", f"{title}, measured"),
        )
    ),
    Column("ghz", "GHz", ".3f", "an SM's clock, for good"),
)  # fmt: skip
#: Least keys of rows that the model is to predict within 10 %.
LONG_KEYS = 2048
#: Errors that are summed up below the table.
ERRORS = {
    "clock_error": "clocks", "first_error": "times of first launches",
    "late_error": "times for good",
}  # fmt: skip


def predictions(chosen: str = "") -> Table:
    known = hopper_rows.measured()
    rows = [row for row in hopper_rows.rows() if chosen in row.name]
    if not rows:
        names = "; ".join(row.name for row in hopper_rows.rows())
        raise ValueError(f"no row has {chosen!r} in its name; there are: {names}")

    def predicted(row: hopper_rows.Row) -> dict[str, Any]:
        one = known.get(row.name, {})
        with progress.step(f"replaying {row.name}"):
            return _row(row, row.times(hopper_rows.clocks_of(one)), one)

    found = ready(map(predicted, rows), len(rows), COLUMNS)
    notes = (
        f"Replayed at {REPLAYED_GHZ} GHz. First launches: from rest, until 20 ms. For good: from "
        "half a second of such launches on, when the power budget has told, by the clock that a "
        "product of its own kept on the very GPU. Decoding steps need less than the budget and "
        "have one time. FLOP by the field's convention.",
        *_sums(found),
    )
    title = "Attention on an H200 and an H100, predicted and measured"
    return Table("predict", title, COLUMNS, found, notes, Plot("row", ("first", "first_measured")))


def _sums(found: list[dict[str, Any]]) -> Iterator[str]:
    """Yield statistics of all errors: of rows by whether they were known, and of long ones."""
    long = {row.name for row in hopper_rows.rows() if row.case.seqlen_k >= LONG_KEYS}
    which = {
        "Measured before the prediction: yes": lambda r: r["seen"] == "yes",
        "Measured before the prediction: no": lambda r: r["seen"] == "no",
        f"From {LONG_KEYS:,} keys on": lambda r: r["row"] in long,
    }
    for name, chosen in which.items():
        for key, what in ERRORS.items():
            errors = np.array([r[key] for r in found if r[key] is not None and chosen(r)])
            if len(errors):
                yield (
                    f"{name}: {what} of {len(errors)} rows, within 10 % "
                    f"{int((np.abs(errors) <= 0.1).sum())}, mean {errors.mean():+.1%}, rms "
                    f"{np.sqrt((errors**2).mean()):.1%}."
                )


def _row(row: hopper_rows.Row, times: Times, one: dict[str, Any]) -> dict[str, Any]:
    """One row of the table. one: what was measured of it."""
    first_us, _ = one.get("first", (one.get("us"), None))
    late_us, mhz = one.get("late", (None, None))
    counted = one.get("clocks")
    return {
        "row": row.name, "seen": "yes" if row.seen else "no", "clocks": times.clocks / 1e3,
        "counted": None if counted is None else counted / 1e3,
        "clock_error": None if counted is None else times.clocks / counted - 1,
        "busy": times.busy,
        **_time("first", times.seconds, first_us, row.flop),
        **_time("late", times.for_good, late_us, row.flop),
        "ghz": None if mhz is None else mhz / 1e3,
        BASIS: "modelled", MACHINE: modelled_machine(row.machine),
    }  # fmt: skip


def _time(name: str, seconds: float, measured: float | None, flop: float) -> dict[str, Any]:
    """The columns of one of `TIMES`. measured: us."""
    us = hopper_rows.by_events(seconds) * 1e6
    return {
        name: us, f"{name}_measured": measured,
        f"{name}_error": None if measured is None else us / measured - 1,
        f"{name}_rate": None if measured is None else flop / measured / 1e6,
    }  # fmt: skip


def main(arguments: argparse.Namespace) -> int:
    emit(predictions(arguments.row), arguments)
    return 0
