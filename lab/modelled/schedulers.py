"""Both tile schedulers by the timing model.

The tiles of every problem are placed on the clusters of the machine by either rule, with costs from
replays of the compiled kernel.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from bench import suite
from bench.commands.schedulers import (
    CLC,
    COLUMNS,
    STATIC,
    better,
    compared,
    default_cases,
    identity,
)
from bench.suite import BACKWARD, FORWARD, Case
from bench.tables.comparison import OURS
from bench.tables.ready import ready
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Table
from lab.model.origin import modelled_machine
from lab.model.predictor import Predictor, predictor_of
from lab.paths import PATH_COLUMNS, path_figures, path_note


def modelled_row(case: Case, predictor: Predictor, direction: str = FORWARD) -> dict[str, Any]:
    """Both schedulers on one case, for each of the drawn machines."""
    choices = {STATIC: False, CLC: True}
    details: dict[str, dict[str, Any]]
    if direction == BACKWARD:
        both = {name: predictor.backward(OURS, case, clc) for name, clc in choices.items()}
        seconds = {name: kernel.seconds(case) for name, kernel in both.items()}
        paths = [kernel.paths_of(case) for kernel in both.values()]
        details = {name: {"ms": float(found[0]) * 1e3} for name, found in seconds.items()}
        of_launch: dict[str, Any]
        of_launch = dict.fromkeys(("tiles", "static_balance", "clc_balance", "bound"))
    else:
        kernels = {name: predictor.forward(OURS, case, clc) for name, clc in choices.items()}
        runs = {name: kernel.run(case) for name, kernel in kernels.items()}
        seconds = {name: np.array([run.seconds for run in found]) for name, found in runs.items()}
        paths = [kernel.paths for kernel in kernels.values()]
        details = {
            name: {
                "ms": float(seconds[name][0]) * 1e3, "balance": central.balance,
                "bound": central.bound, "clocks": central.clocks,
            }
            for name, (central, *_) in runs.items()
        }  # fmt: skip
        of_launch = {
            "tiles": len(runs[STATIC][0].starts), "static_balance": details[STATIC]["balance"],
            "clc_balance": details[CLC]["balance"], "bound": details[STATIC]["bound"],
        }  # fmt: skip
    gains = seconds[STATIC] / seconds[CLC] - 1
    flop = case.flop(direction)
    return {
        **identity(case, direction), **of_launch,
        **{name: flop / found[0] / 1e12 for name, found in seconds.items()},
        "gain": float(gains[0]), "gain_low": float(gains.min()), "gain_high": float(gains.max()),
        "better": better(gains), **path_figures(*paths), "details": details,
        BASIS: "modelled", MACHINE: modelled_machine(predictor.machine),
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> Table:
    notes = (
        "Tiles past the end of a short sequence cost the CLC scheduler a query each.",
        path_note(f"the replays behind a row, {STATIC} / {CLC}"),
    )
    return compared(rows, COLUMNS + PATH_COLUMNS, notes)


def main(arguments: argparse.Namespace) -> int:
    cases = suite.selected(arguments, default_cases)
    predictor = predictor_of(arguments.machine, arguments.draws)
    rows = (modelled_row(case, predictor, arguments.direction) for case in cases)
    emit(table(ready(rows, len(cases), COLUMNS + PATH_COLUMNS)), arguments)
    return 0
