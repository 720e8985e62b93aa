"""Forward and backward on the timing model, provider by provider."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.processes import stream
from bench.suite import FLOP_PER_CLOCK, Case
from bench.tables.comparison import AS_PUBLISHED, OURS, comparison_row, standing, standing_figures
from bench.tables.table import BASIS, MACHINE
from lab.model.calls import Kind
from lab.model.machines import gpu_of
from lab.model.origin import modelled_machine
from lab.model.predictor import Predicted, Predictor, predictor_of
from lab.paths import path_figures
from lab.published import closed_peer


def modelled_rows(
    cases: Iterable[tuple[Case, str]], names: Sequence[str], predictor: Predictor
) -> list[dict[str, Any]]:
    """Predict every (case, direction); one row for each. cuDNN's published rate of the same call on
    such a GPU is a peer, too."""
    machine = predictor.machine
    values, rows = machine.values(), []
    peak = values.sms * FLOP_PER_CLOCK[gpu_of(machine).capability] * values.clock_ghz / 1e3
    origin = {BASIS: "modelled", MACHINE: modelled_machine(machine)}
    for case, direction in cases:
        details, predicted = {}, {}
        for name in names:
            reason = predictor.refuses(name, case, direction)
            if reason is None:
                found = predictor.predict(name, case, direction)
                details[name] = _predicted(found, case.flop(direction), peak)
                details[name]["clock_mhz"] = values.clock_ghz * 1e3
                predicted[name] = found
            else:
                details[name] = {"status": reason}
        closed = closed_peer(machine.name, case, direction)
        details[AS_PUBLISHED] = (
            {"status": f"no such rate of a {machine.name.upper()} is known here"} if closed is None
            else {"status": "ok", "tflops": closed.tflops, "median_ms": closed.seconds * 1e3,
                  "source": closed.source}
        )  # fmt: skip
        errors = [
            predictor.ratio_error(case, direction, sustained=sustained)
            for sustained in (False, True)
        ]
        rows.append(_row((case, direction), details, predicted, errors) | origin)
    return rows


def _row(
    case: tuple[Case, str],
    details: dict[str, dict[str, Any]],
    predicted: dict[str, Predicted],
    errors: Sequence[float],
) -> dict[str, Any]:
    """case: with its direction. errors: see `standing`, of a burst and under load."""
    seconds = {name: found.seconds for name, found in predicted.items()}
    published = details[AS_PUBLISHED].get("median_ms")
    if published and OURS in seconds:
        seconds[AS_PUBLISHED] = np.full_like(seconds[OURS], published * 1e-3)
    row = comparison_row(*case, details, seconds, errors[0])
    peer = predicted.get(row["peer"] or "")
    row |= path_figures(
        *(None if found is None else found.paths for found in (predicted.get(OURS), peer))
    )
    lasting = {name: found.sustained for name, found in predicted.items()}
    figures = standing_figures(standing(lasting, errors[1]))
    return row | {f"sustained_{name}": value for name, value in figures.items()}


@dataclass(frozen=True)
class Predictions:
    """`modelled_rows` as a function of the cases, for a pool of processes."""

    names: tuple[str, ...]
    machine: str
    draws: int

    def __call__(self, cases: Sequence[tuple[Case, str]]) -> list[dict[str, Any]]:
        predictor = predictor_of(self.machine, self.draws)
        return modelled_rows(cases, self.names, predictor)

    def all(
        self, cases: Sequence[tuple[Case, str]], jobs: int
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (number of the case, row), on `jobs` processes; cases that share kernels go to one
        process."""
        groups: dict[tuple[str, Kind], list[int]] = defaultdict(list)
        for index, (case, direction) in enumerate(cases):
            groups[direction, Kind.of(case)].append(index)
        if min(jobs, len(groups)) <= 1:
            predictor = predictor_of(self.machine, self.draws)
            for index in (index for group in groups.values() for index in group):
                (row,) = modelled_rows([cases[index]], self.names, predictor)
                yield index, row
            return
        parts = [[cases[index] for index in group] for group in groups.values()]
        for group, found in zip(groups.values(), stream(self, parts, jobs), strict=True):
            yield from zip(group, found, strict=True)


def _predicted(found: Predicted, flop: float, peak: float) -> dict[str, Any]:
    tflops = flop / found.seconds[0] / 1e12
    return {
        "status": "ok", "median_ms": found.seconds[0] * 1e3,
        "low_ms": found.low * 1e3, "high_ms": found.high * 1e3,
        "tflops": tflops, "tflops_low": flop / found.high / 1e12,
        "tflops_high": flop / found.low / 1e12, "of_peak": tflops / peak,
        "bound": found.bound,
        "unmatched": found.paths.unmatched, "ambiguous": found.paths.ambiguous,
    }  # fmt: skip
