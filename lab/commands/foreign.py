"""`python -m lab foreign`: whole launches of kernels that are not ours, predicted and measured.

Kernels in Triton, CUDA C++ and CuTe DSL of several projects (lab/validation/foreign). `--predict`
simulates and replays them again and writes `foreign_predicted.json`; `--measure` measures them on
the GPU that is there and writes the file of `--json`, whose place is `foreign_measured.json`
beside; without either both files are compared.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from lab.validation.foreign.case import Case
from lab.validation.foreign.cases import CASES

_HOME = Path(__file__).parents[1] / "validation" / "foreign"
PREDICTED, MEASURED = _HOME / "foreign_predicted.json", _HOME / "foreign_measured.json"
COLUMNS = (
    Column("kernel"), Column("language"), Column("predicted", "us", ".1f"),
    Column("low", "us", ".1f", "over constants: low"), Column("high", "us", ".1f"),
    Column("bound"), Column("measured", "us", ".1f"), Column("error", "", "+.1%"),
)  # fmt: skip


def _chosen(names: str) -> list[Case]:
    parts = [part for part in names.split(";") if part]
    found = [case for case in CASES if not parts or any(part in case.name for part in parts)]
    if not found:
        raise ValueError(f"no kernel has {names!r} in its name; there are: "
                         + "; ".join(case.name for case in CASES))  # fmt: skip
    return found


def table() -> Table:
    predicted = json.loads(PREDICTED.read_text())
    measured = json.loads(MEASURED.read_text()) if MEASURED.exists() else {"rows": {}}
    rows: list[dict[str, Any]] = []
    for case in CASES:
        one = predicted["rows"].get(case.name, {})
        time = measured["rows"].get(case.name, {}).get("microseconds")
        both = time is not None and "microseconds" in one
        rows.append({
            "kernel": case.name, "language": case.language, "predicted": one.get("microseconds"),
            "low": one.get("low"), "high": one.get("high"), "bound": one.get("bound"),
            "measured": time, "error": one["microseconds"] / time - 1 if both else None,
            BASIS: "modelled", MACHINE: measured.get("device", predicted["machine"]),
        })  # fmt: skip
    errors = [abs(row["error"]) for row in rows if row["error"] is not None]
    notes = ["Predicted: central constants of an H200; low and high over sets of constants."]
    if errors:
        notes.append(f"Mean error {sum(errors) / len(errors):.1%} of {len(errors)} kernels.")
    title = "Whole launches of kernels of others on an H200, predicted and measured"
    return Table(
        "foreign", title, COLUMNS, rows, tuple(notes), Plot("kernel", ("predicted", "measured"))
    )


def _predict(arguments: argparse.Namespace) -> None:
    from lab.validation.foreign import predicting

    content = json.loads(PREDICTED.read_text()) if PREDICTED.exists() else {"rows": {}}
    content["machine"] = predicting.GPU
    for case in _chosen(arguments.kernels):
        content["rows"][case.name] = predicting.predict(case)
        print(case.name, json.dumps(content["rows"][case.name]), flush=True)
        PREDICTED.write_text(json.dumps(content, indent=1) + "\n")


def main(arguments: argparse.Namespace) -> int:
    if arguments.predict:
        _predict(arguments)
        return 0
    if arguments.measure:
        from lab.validation.foreign.measuring import measure_all

        found = measure_all(_chosen(arguments.kernels), arguments.seconds)
        Path(arguments.json or MEASURED).write_text(json.dumps(found, indent=1) + "\n")
        return 0
    emit([table()], arguments)
    return 0
