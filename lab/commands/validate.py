"""`python -m lab validate`: the timing model against what others and we have measured.

It leads with ratios of kernels on one machine. Then absolute rates, with the clock of each lab's
GPU fitted to one half of its rows and tested on the other; errors by class of row; which
aims are met. A rate counts only where the very kernel is compiled and replayed here; the others
stand as published.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from bench.peers import flash_attn_4
from bench.suite import BACKWARD, FORWARD
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from lab.model.origin import modelled_machine
from lab.model.predictor import replayable
from lab.published import ROWS
from lab.published.rows import FROST, TEST, Published
from lab.validation import validation
from lab.validation.validation import Found, rms
from sm100_sim.timing import load, machines

RATE_COLUMNS = (
    Column("kernel"), Column("gpu", title="GPU"), Column("case"), Column("kind"), Column("role"),
    Column("published", "TFLOPS", ".0f"), Column("modelled", "TFLOPS", ".0f"),
    Column("error", "", "+.1%"), Column("error_fitted", "", "+.1%", "at the fitted clock"),
)  # fmt: skip
RATIO_COLUMNS = (
    Column("kernel"), Column("over"), Column("gpu", title="GPU"), Column("case"), Column("kind"),
    Column("published", "", ".3f"), Column("modelled", "", ".3f"),
    Column("error", "points", "+.1f"),
)  # fmt: skip
GPU_COLUMNS = (
    Column("case"), Column("method"), Column("published", "", ".3f"),
    Column("modelled", "", ".3f"), Column("error", "points", "+.1f"),
    Column("modelled_fitted", "", ".3f", "at the fitted clocks"),
)  # fmt: skip
STEP_COLUMNS = (
    Column("kernel"), Column("gpu", title="GPU"), Column("heads"), Column("queries"),
    Column("tiles"), Column("published", "us a step", ".3f"),
    Column("modelled", "us a step", ".3f"), Column("error", "", "+.1%"),
)  # fmt: skip
CLASS_COLUMNS = (
    Column("gpu", title="GPU"), Column("direction"), Column("mask"), Column("lengths"),
    Column("kind"), Column("rows"), Column("mean", "", "+.1%"), Column("rms", "", ".1%"),
    Column("worst", "", "+.1%"), Column("rms_fitted", "", ".1%", "rms at the fitted clock"),
    Column("worst_fitted", "", "+.1%", "worst"),
)  # fmt: skip
AIM_COLUMNS = (
    Column("aim"), Column("rows"), Column("found"), Column("holds"), Column("worst"),
)  # fmt: skip
CLOCK_COLUMNS = (
    Column("session", title="GPU, lab"), Column("nominal", "GHz", ".3f"),
    Column("clock", "GHz", ".3f", "fitted clock"), Column("fit_rows", title="rows of the fit"),
    Column("fit_rms", "", ".1%", "rms"), Column("test_rows", title="rows of the test"),
    Column("test_mean", "", "+.1%", "mean"), Column("test_rms", "", ".1%", "rms"),
)  # fmt: skip
PUBLISHED_COLUMNS = (
    Column("kernel"), Column("gpu", title="GPU"), Column("direction"), Column("case"),
    Column("kind"), Column("clock", "GHz", ".3f"), Column("evidence", title="who says so"),
    Column("published", "TFLOPS", ".0f"), Column("us", "us", ".0f"), Column("source"),
)  # fmt: skip


def _origin(machine: str) -> dict[str, str]:
    return {BASIS: "modelled", MACHINE: modelled_machine(load(machine))}


def _by_others(row: Published) -> dict[str, str]:
    return {BASIS: "measured", MACHINE: f"{row.gpu}, by {row.lab}"}


def ratios(found: Sequence[Found]) -> Table:
    """Builds on one GPU in one session, the same shape and protocol."""
    rows: list[dict[str, Any]] = [
        {
            "kernel": str(one.row.build), "over": str(base), "gpu": one.row.gpu,
            "case": f"{one.row.direction}, {one.row.case}", "kind": one.row.kind,
            "published": published, "modelled": modelled, "error": 100 * (modelled - published),
            "counts": one.counts, "source": one.row.source, **_origin(one.row.machine),
        }
        for one, base, published, modelled in validation.ratios(found)
    ]  # fmt: skip
    counted = [row["error"] for row in rows if row["counts"]]
    note = (
        f"Unthrottled, device-bound rows up to 32k: {len(counted)}, {rms(counted):.1f} points rms. "
        "Modelled at the machine's own clock, which both have."
    )
    return Table("validate", "Kernels compared on one machine", RATIO_COLUMNS, rows, (note,))


def of_gpus(found: Sequence[Found]) -> Table:
    """Compare the same kernel, shape and protocol on a GB300 with a GB200."""
    rows: list[dict[str, Any]] = []
    for newer, older in validation.on_two_gpus(found, "GB300", "GB200"):
        published = newer.row.tflops / older.row.tflops
        modelled = float(older.seconds[0] / newer.seconds[0])
        rows.append({
            "case": f"{newer.row.direction}, {newer.row.case}",
            "method": newer.row.protocol.method, "published": published, "modelled": modelled,
            "error": 100 * (modelled - published),
            "modelled_fitted": older.fitted / newer.fitted, **_origin("gb300"),
        })  # fmt: skip
    note = f"Error: {rms(row['error'] for row in rows):.1f} points rms in {len(rows)} rows."
    return Table(
        "validate", "cuDNN's CuTe DSL kernels, GB300 over GB200", GPU_COLUMNS, rows, (note,)
    )


def steps(found: Sequence[Found]) -> Table:
    """Tabulate the cost of 512 more steps of every tile, from chunks of a prompt that differ in
    their keys."""
    modelled = {one.row: one for one in found}
    rows = []
    for less, more, count in validation.chunks(ROWS):
        us = (more.seconds - less.seconds) / count * 1e6
        few, many, ours_us = modelled.get(less), modelled.get(more), None
        if few and many:
            ours_us = float(many.seconds[0] - few.seconds[0]) / count * 1e6
        rows.append({
            "kernel": str(less.build), "gpu": less.gpu, "queries": less.seqlen,
            "heads": "/".join(map(str, less.heads)), "tiles": validation.tiles_of(less),
            "published": us, "modelled": ours_us,
            "error": ours_us and ours_us / us - 1,
            **(_origin(less.machine) if ours_us else _by_others(less)),
        })  # fmt: skip
    note = (
        "One tile of 256 queries a CTA pair, 65536 and 131072 keys or, where keys are divided, its "
        "part of them: the difference is steps of 128 keys alone. A B200 has 74 pairs, the others "
        "76. Error: of the time."
    )
    return Table("validate", "A step of 128 keys, by difference", STEP_COLUMNS, rows, (note,))


def rates(found: Sequence[Found], direction: str) -> Table:
    rows = [
        {
            "kernel": str(one.row.build), "gpu": one.row.gpu, "case": one.row.case,
            "kind": one.row.kind, "role": one.row.role, "published": one.row.tflops,
            "modelled": one.tflops, "low": one.row.tflops_of(float(one.seconds.max())),
            "high": one.row.tflops_of(float(one.seconds.min())), "error": one.error,
            "error_fitted": one.error_fitted, "session": one.row.session,
            "clock": one.clock_ghz, "source": one.row.source, "counts": one.counts,
            "direction": direction, **_origin(one.row.machine),
        }
        for one in found
        if one.row.direction == direction
    ]  # fmt: skip
    note = (
        "Error: of the rate, above 0 the model is too fast; at the machine's own clock, or the one "
        "that a GPU was held at, then at that of the lab's GPU."
    )
    plot = Plot(("kernel", "gpu", "case"), ("published", "modelled"))
    title = f"{direction.capitalize()}, the very kernel replayed"
    return Table("validate", title, RATE_COLUMNS, rows, (note,), plot)


def clocks(found: Sequence[Found]) -> Table:
    """The clock of each lab's GPU, fitted to one half of its unthrottled rows."""
    rows = []
    for session in dict.fromkeys(one.row.session for one in found):
        mine = [one for one in found if one.row.session == session and one.counts]
        if not mine:
            continue
        fit = [one.error_fitted for one in mine if one.row.role != TEST]
        test = [one.error_fitted for one in mine if one.row.role == TEST]
        machine = mine[0].row.machine
        rows.append({
            "session": session, "nominal": load(machine).values().clock_ghz,
            "clock": mine[0].clock_ghz, "fit_rows": len(fit), "fit_rms": rms(fit),
            "test_rows": len(test), "test_mean": float(np.mean(test)) if test else None,
            "test_rms": rms(test) if test else None, **_origin(machine),
        })  # fmt: skip
    note = "2k, 8k and 32k tokens are the half of the fit, 1k, 4k and 16k that of the test."
    return Table("validate", "Clocks fitted and tested", CLOCK_COLUMNS, rows, (note,))


def classes(found: Sequence[Found]) -> Table:
    """Errors by class of row: GPU, direction, mask, length, protocol."""
    groups: dict[tuple, list[Found]] = {}
    for one in found:
        groups.setdefault(validation.class_of(one.row), []).append(one)
    rows = []
    for key, members in sorted(groups.items()):
        own, at_fit = ([m.error for m in members], [m.error_fitted for m in members])
        rows.append({
            **dict(zip(("gpu", "direction", "mask", "lengths", "kind"), key, strict=True)),
            "rows": len(members), "mean": float(np.mean(own)), "rms": rms(own),
            "worst": max(own, key=abs), "rms_fitted": rms(at_fit),
            "worst_fitted": max(at_fit, key=abs), **_origin(members[0].row.machine),
        })  # fmt: skip
    return Table("validate", "Errors by class of row", CLASS_COLUMNS, rows)


def _within(
    errors: Iterable[tuple[str, float]], limit: float | None, quadratic: float | None = None
) -> tuple[int, str, bool, str]:
    """Return (rows, what was found, whether all are within the limit and their rms too, the
    worst)."""
    found = list(errors)
    if not found:
        return 0, "no row can be replayed", False, "-"
    name, worst = max(found, key=lambda pair: abs(pair[1]))
    spread = rms(error for _, error in found)
    holds, text = quadratic is None or spread <= quadratic, f"rms {spread:.1%}"
    if limit is not None:
        inside = sum(abs(error) <= limit for _, error in found)
        holds, text = holds and inside == len(found), f"{inside} within {limit:.0%}, {text}"
    return len(found), text, holds, f"{worst:+.1%}: {name}"


def _named(one: Found) -> str:
    return f"{one.row.build}, {one.row.gpu}, {one.row.case}"


def aims(found: Sequence[Found]) -> Table:
    """Tabulate the model's aims, and by how much they are missed."""
    counted = [one for one in found if one.counts]
    fitted_errors = [(_named(one), one.error_fitted) for one in counted]
    own = [(_named(one), one.error) for one in counted]
    test = [(_named(one), one.error_fitted) for one in counted if one.row.role == TEST]
    frost = [one for one in counted if one.row.build.project == FROST]
    forward = [(_named(o), o.error_fitted) for o in frost if o.row.direction == FORWARD]
    forward_own = [(_named(o), o.error) for o in frost if o.row.direction == FORWARD]
    backward = [(_named(o), o.error) for o in found
                if o.row.build.project == FROST and o.row.direction == BACKWARD]  # fmt: skip
    pairs = [(_named(one), modelled - published) for one, _, published, modelled
             in validation.ratios(found) if one.counts]  # fmt: skip
    gpus = [(_named(a), float(b.seconds[0] / a.seconds[0]) - a.row.tflops / b.row.tflops)
            for a, b in validation.on_two_gpus(found, "GB300", "GB200")]  # fmt: skip
    verdicts = (
        ("ratios of kernels on one machine within 2 points rms", _within(pairs, None, 0.02)),
        ("GB300 over GB200 within 4 points", _within(gpus, 0.04)),
        ("rows at 1k to 32k within 10 %, rms 5 %, at the machine's clock", _within(own, 0.1, 0.05)),
        ("the same at fitted clocks", _within(fitted_errors, 0.1, 0.05)),
        ("the same, the half of the test alone", _within(test, 0.1, 0.05)),
        ("cuDNN's CuTe DSL forward within 8 %, at the machine's clock", _within(forward_own, 0.08)),
        ("that forward at fitted clocks", _within(forward, 0.08)),
        ("its backward within 10 %, at the clock of that GPU", _within(backward, 0.1)),
    )
    names = ("rows", "found", "holds", "worst")
    rows = [{"aim": aim, **dict(zip(names, verdict, strict=True)), **_origin("b200")}
            for aim, verdict in verdicts]  # fmt: skip
    return Table("validate", "Aims", AIM_COLUMNS, rows)


def as_published() -> Table:
    """Rows that are never counted: the kernel is closed, or nobody said which it was, or it cannot
    be replayed here."""
    rows = [
        {
            "kernel": str(row.build), "gpu": row.gpu, "direction": row.direction, "case": row.case,
            "kind": row.kind, "clock": row.clock.ghz, "evidence": row.clock.evidence,
            "published": row.tflops, "us": row.seconds * 1e6, "source": row.source,
            **_by_others(row),
        }
        for row in ROWS
        if replayable(row) is None
    ]  # fmt: skip
    return Table("validate", "As published, not compared", PUBLISHED_COLUMNS, rows)


def main(arguments: argparse.Namespace) -> int:
    """Run the command; the exit status. Raises RuntimeError if flash-attn-4 is not installed."""
    reason = flash_attn_4.unavailable()
    if reason:
        raise RuntimeError(reason)
    found = validation.judged(ROWS, machines())
    tables = [
        aims(found), ratios(found), of_gpus(found), steps(found), clocks(found), classes(found),
        rates(found, FORWARD), rates(found, BACKWARD), as_published(),
    ]  # fmt: skip
    emit(tables, arguments)
    return 0
