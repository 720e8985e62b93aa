"""`python -m lab contention`: the tile schedulers while another kernel holds SMs.

NCCL's kernels, which overlap with computing in training, hold SMs for as long as they run, and a
CTA of ours needs all shared memory of one. A static grid of as many CTA pairs as the GPU has then
does not fit: those without a place start when others have done all their tiles. Modelled only: the
tiles of a training shape on what is left, with costs from replays of the compiled kernels.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from bench import suite
from bench.suite import BACKWARD, DIRECTIONS, Case
from bench.tables.comparison import OURS
from bench.tables.ready import ready
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Table
from lab.model.origin import modelled_machine
from lab.model.predictor import Predictor, predictor_of
from lab.paths import PATH_COLUMNS, Paths, path_figures, path_note
from lab.whole.problem import ALONE, Room

#: CTA pairs that are held: 8 to 32 CTAs of NCCL hold half as many, or as many where no two share a
#: pair of SMs.
HELD = (4, 8, 16, 32)
FULL, FITTED, CLC = "full grid", "fitted grid", "CLC"


def default_cases() -> list[Case]:
    """Training, 16k tokens, dense and causal."""
    lengths = ((4096, 4096),) * 4
    return [Case(name, lengths, 16, 2, name == "causal") for name in ("dense", "causal")]


def _seconds(
    predictor: Predictor, case: Case, direction: str, use_clc: bool, room: Room
) -> tuple[float, Paths]:
    if direction == BACKWARD:
        backward = predictor.backward(OURS, case, use_clc)
        return float(backward.seconds(case, room)[0]), backward.paths_of(case)
    kernel = predictor.forward(OURS, case, use_clc)
    return kernel.run(case, room)[0].seconds, kernel.paths


def modelled_rows(
    case: Case, predictor: Predictor, direction: str, held: Sequence[int] = HELD
) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of pairs that are held all the time; times over that of the
    static scheduler on the whole machine."""
    pairs = int(predictor.machine.values().sms) // 2
    alone, static_paths = _seconds(predictor, case, direction, False, ALONE)
    for number in held:
        left = Room(number, grid=pairs - number)
        times = {
            FULL: _seconds(predictor, case, direction, False, Room(number))[0],
            FITTED: _seconds(predictor, case, direction, False, left)[0],
        }
        times[CLC], clc_paths = _seconds(predictor, case, direction, True, Room(number))
        yield {
            "direction": direction, "shape": case.shape, "heads": case.heads_text,
            "mask": case.mask, "held": number, "alone": alone * 1e3,
            **{name: seconds / alone for name, seconds in times.items()},
            **path_figures(static_paths, clc_paths), BASIS: "modelled",
            MACHINE: modelled_machine(predictor.machine),
        }  # fmt: skip


COLUMNS = (
    Column("direction"), Column("shape"), Column("heads"), Column("mask"),
    Column("held", title="CTA pairs held"), Column("alone", "ms", ".3f", title="none held, static"),
    *(Column(name, format=".2f", title=f"{name}, times that") for name in (FULL, FITTED, CLC)),
    *PATH_COLUMNS,
)  # fmt: skip


def table(rows: list[dict[str, Any]]) -> Table:
    notes = (
        "full, fitted grid: the static scheduler with as many CTA pairs as the GPU has, and as are "
        "left.",
        path_note("the replays behind a row, static / CLC"),
    )
    title = "Tile schedulers while another kernel holds SMs, bf16"
    return Table("contention", title, COLUMNS, rows, notes)


def main(arguments: argparse.Namespace) -> int:
    cases = suite.selected(arguments, default_cases)
    predictor = predictor_of(arguments.machine, arguments.draws)
    directions = [arguments.direction] if arguments.direction else DIRECTIONS
    rows = (
        row
        for direction in directions
        for case in cases
        for row in modelled_rows(case, predictor, direction)
    )
    total = len(directions) * len(cases) * len(HELD)
    emit(table(ready(rows, total, COLUMNS)), arguments)
    return 0
