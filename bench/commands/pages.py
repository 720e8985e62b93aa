"""`python -m bench pages`: keys and values in pages, beside the same call without.

Decoding steps and a few queries at once on long sequences, in pages of 16 and of 128 rows. Boxes of
TMA are no larger than a page, so that small pages take more instructions for the same bytes. On a
GPU all sizes are timed, interleaved, with flash-attn-4 beside them; without one times are the
model's.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench import suite
from bench.measure.pages import measured_row
from bench.measure.providers import Ours
from bench.measure.time_limit import TimeLimit
from bench.measure.timer import CudaTimer, Sampling
from bench.peers.flash_attn_4 import PACKAGE
from bench.suite import FORWARD, Case
from bench.tables.comparison import OURS
from bench.tables.origin import modelled_machine
from bench.tables.ready import ready
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from fa4_hd256.kernels.limits import ELEMENT_BYTES
from lab.model.calls import forward_problem
from lab.model.predictor import Predictor, predictor_of

#: Rows of a page; None: keys and values in no pages.
SIZES = (None, 128, 16)


def default_cases() -> list[Case]:
    """Return (batch, queries, keys), heads of Qwen3.5."""
    return [
        Case("pages", ((queries, keys),) * batch, 32, 2, True)
        for batch in (1, 128)
        for keys in (8192, 131072)
        for queries in (1, 2, 4)
    ]


def measured(case: Case, timer: CudaTimer, sampling: Sampling) -> dict[str, Any]:
    """`row` of a GPU, flash-attn-4 in pages of each of the sizes beside it."""
    found = measured_row(case, SIZES, timer, sampling)
    times, reasons = found.pop("times"), found.pop("reasons")
    for size in SIZES:
        ours, theirs = (times.get((name, size)) for name in (OURS, PACKAGE))
        name = _name(size)
        found[name] = ours and ours[1] * 1e6
        found[f"range_{name}"] = ours and f"{ours[0] * 1e6:.1f}..{ours[2] * 1e6:.1f}"
        found[f"theirs_{name}"] = theirs and theirs[1] * 1e6
        if size is not None:
            found[f"behind_{size}"] = ours and ours[1] / times[OURS, None][1] - 1
    whole = times[OURS, None][1]
    return {
        "group": case.group, "shape": case.shape, "heads": case.heads_text,
        "rate": case.kv_elements * ELEMENT_BYTES / whole / 1e12,
        "refused": "; ".join(sorted({f"{name}: {why}" for (name, _), why in reasons.items()})),
        **found,
    }  # fmt: skip


def row(case: Case, predictor: Predictor) -> dict[str, Any]:
    """A case with keys in pages of each of the sizes."""
    found = {
        size: predictor.predict(OURS, replace(case, page_size=size), FORWARD).seconds
        for size in SIZES
    }
    whole = found[None]
    times = {_name(size): float(seconds[0]) * 1e6 for size, seconds in found.items()}
    behind = {
        f"behind_{size}": float((found[size] / whole)[0]) - 1 for size in SIZES if size is not None
    }
    worst = max(float((found[size] / whole).max()) for size in SIZES) - 1
    return {
        "group": case.group, "shape": case.shape, "heads": case.heads_text,
        "rows": forward_problem(case).tiles.rows, **times, **behind, "worst": worst,
        BASIS: "modelled", MACHINE: modelled_machine(predictor.machine),
    }  # fmt: skip


def _name(size: int | None) -> str:
    return "none" if size is None else f"pages_{size}"


def _title(size: int | None) -> str:
    return "no pages" if size is None else f"pages of {size}"


BEHIND_COLUMNS = tuple(
    Column(f"behind_{size}", format="+.1%", title=f"{_title(size)} over none")
    for size in SIZES if size is not None
)  # fmt: skip
COLUMNS = (
    Column("shape"), Column("heads"), Column("rows", title="rows of a tile"),
    *(Column(_name(size), "us", ".1f", _title(size)) for size in SIZES),
    *BEHIND_COLUMNS,
    Column("worst", format="+.1%", title="at most, of all sets"),
)  # fmt: skip
MEASURED_COLUMNS = (
    Column("shape"), Column("heads"),
    *(column for size in SIZES for column in (
        Column(_name(size), "us", ".1f", _title(size)),
        Column(f"range_{_name(size)}", title="p20..p80"),
    )),
    *BEHIND_COLUMNS,
    *(Column(f"theirs_{_name(size)}", "us", ".1f", f"{PACKAGE}, {_title(size)}")
      for size in SIZES),
    Column("rate", "TB/s", ".2f", "K and V once, no pages"),
    Column("clock_mhz", "MHz", ".0f", "clock"), Column("power_watts", "W", ".0f", "power"),
)  # fmt: skip


def measured_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Tabulate rows of `measured`."""
    reasons = sorted({row["refused"] for row in rows} - {""})
    notes = (
        "Medians; all of a row interleaved, results checked, L2 overwritten before each "
        "launch. Page numbers are in an order by chance.",
        *(f"Not run: {reason}." for reason in reasons),
    )
    return _table(MEASURED_COLUMNS, rows, notes)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Tabulate rows of `row`."""
    note = (
        "The call's default kernel and parts, its second kernel included. Page numbers are in an "
        "order by chance. At most, of all sets: the larger ratio under any of the sets of "
        "constants that were drawn."
    )
    return _table(COLUMNS, rows, (note,))


def _table(
    columns: tuple[Column, ...], rows: Sequence[dict[str, Any]], notes: tuple[str, ...]
) -> Table:
    plot = Plot(("shape", "heads"), tuple(map(_name, SIZES)))
    title = "Keys and values in pages, forward, bf16"
    return Table("pages", title, columns, list(rows), notes, plot)


def main(arguments: argparse.Namespace) -> int:
    limit, cases = TimeLimit(arguments.within), suite.selected(arguments, default_cases)
    if not arguments.modelled and Ours().missing() is None:
        timer, sampling = CudaTimer(), Sampling(arguments.warmup, arguments.runs)
        begun = (measured(case, timer, sampling) for case in limit.begun(cases))
        rows = ready(begun, len(cases), MEASURED_COLUMNS, "measuring")
        found = limit.noted(measured_table(rows))
    else:
        predictor = predictor_of(arguments.machine, arguments.draws)
        rows = ready((row(case, predictor) for case in cases), len(cases), COLUMNS)
        found = table(rows)
    emit(found, arguments)
    return 0
