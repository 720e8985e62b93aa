"""`python -m lab ladder`: what each optimisation of the forward brings, one switch at a time.

Every rung is a configuration of the kernel that is shipped (`ForwardConfig`): compiled, run in the
simulator against the float64 reference, and timed, on a GPU or by the timing model.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure.providers import Ours, PyTorchSdpa
from bench.measure.timer import CudaTimer, Sampling
from bench.suite import FORWARD, Case
from bench.tables.comparison import RESOLUTION
from bench.tables.ready import results
from bench.tables.results import emit, markdown_text
from bench.tables.shape_options import chosen_case
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from fa4_hd256.softmax_emu.pattern import Ex2Pattern
from lab.measure.ladder import Rung, Timing, measure_all, rungs
from lab.model.origin import modelled_machine
from lab.model.studies.ladder import Prediction, predict_all
from lab.paths import PATH_COLUMNS, path_figures, path_note
from sm100_sim.timing import Machine, load

NOT_RUNNABLE = "not runnable here"


def rows(
    timings: Sequence[Timing], case: Case, pytorch: float | None, origin: dict[str, str]
) -> list[dict[str, Any]]:
    """A row for each rung.

    pytorch: seconds of PyTorch's fastest implementation, None where it did not run. origin: basis
    and machine.
    """
    flop, found = case.flop(FORWARD), []
    before: Any = None
    for timing in timings:
        seconds = timing.seconds
        tflops = flop / seconds / 1e12
        gain = None if before is None else before.seconds / _opposed(seconds, origin[BASIS])
        found.append({
            "step": timing.rung.name,
            "milliseconds": seconds[0] * 1e3, "tflops": tflops[0],
            "tflops_low": tflops.min(), "tflops_high": tflops.max(),
            "range": f"{tflops.min():.0f}..{tflops.max():.0f}",
            "step_clocks": timing.step_clocks,
            "gain": None if gain is None else gain[0],
            "gain_low": None if gain is None else gain.min(),
            "gain_high": None if gain is None else gain.max(),
            "effect": _effect(gain),
            "over_pytorch": NOT_RUNNABLE if pytorch is None else pytorch / seconds[0],
            "correct": timing.error.correct, "max_error": timing.error.error,
            "tolerance": timing.error.tolerance, "lse_max_error": timing.error.lse_error,
            "config": asdict(timing.rung.config), "use_clc": timing.rung.use_clc,
            **path_figures(timing.paths), **origin,
        })  # fmt: skip
        before = timing
    return found


def _opposed(seconds: np.ndarray, basis: str) -> np.ndarray:
    """Return the seconds to compare another configuration with, element by element: predictions
    under the same constants; of a measurement the slow runs with the fast ones."""
    return seconds[[0, 2, 1]] if basis == "measured" else seconds


def _effect(gain: np.ndarray | None) -> str | None:
    """ "faster" or "slower" where all conditions agree, and by 5 % or more."""
    if gain is None:
        return None
    if gain.min() > 1 and gain[0] >= 1 + RESOLUTION:
        return "faster"
    if gain.max() < 1 and gain[0] <= 1 / (1 + RESOLUTION):
        return "slower"
    return "not ranked"


COLUMNS = (
    Column("step"),
    Column("milliseconds", "ms", ".3f", "time"),
    Column("tflops", "TFLOPS", ".0f", "rate"),
    Column("range", "TFLOPS"),
    Column("step_clocks", "clocks", ".0f", "a step of a CTA pair"),
    Column("gain", format=".3f", title="over the step before"),
    Column("effect"),
    Column("over_pytorch", format=".2f", title="over PyTorch"),
    Column("correct"),
    Column("max_error", format=".2e", title="max error"),
    Column("tolerance", format=".2e", title="accepted"),
)

_NOTES = (
    "Each step keeps the switches before it; the default configuration is compared with the step "
    "above it. conditional rescale: before it O is rescaled whenever a row maximum of a warp grew, "
    "after it only by more than the threshold; the kernel has no form that rescales in every step. "
    "tile order: before it query blocks upwards, one head after the other.",
    "correct: the compiled kernel against the float64 reference, tolerance as in the tests.",
)


def table(found: list[dict[str, Any]], case: Case, others: dict[str, float | str]) -> Table:
    """others: PyTorch's implementations, median seconds or why they did not run."""
    replayed = found[0][BASIS] == "modelled"
    if replayed:
        ranges = f"Ranges: over draws of the uncertain constants; gains below {RESOLUTION:.0%}, or "
        ranges += "whose sign is not the same in every draw, are not ranked. Inputs of the replays "
        ranges += "are standard normal, which decides how often O is rescaled."
    else:
        ranges = f"Ranges: p20 to p80. Gains below {RESOLUTION:.0%}, or where the slow runs of one "
        ranges += "step overlap with the fast ones of the other, are not ranked."
    listed = "; ".join(
        f"{name}: {value}" if isinstance(value, str) else f"{name}: {value * 1e3:.3f} ms"
        for name, value in others.items()
    )
    title = f"Optimisation ladder, forward, {case.shape}, heads {case.heads_text}, {case.mask}"
    columns: tuple[Column, ...] = COLUMNS
    notes: tuple[str, ...] = (*_NOTES, ranges, f"PyTorch: {listed}.")
    if replayed:
        columns, notes = columns + PATH_COLUMNS, (*notes, path_note("the replays of a step"))
    plot = Plot("step", "tflops", low="tflops_low", high="tflops_high")
    return Table("ladder", title, columns, found, notes, plot)


def main(arguments: argparse.Namespace) -> int:
    case = chosen_case(arguments)
    if case.seqlen_q != case.seqlen_k or case.window != (None, None):
        raise ValueError("the ladder takes one --seqlen and no --window")
    chosen = rungs(Ex2Pattern(arguments.freq, arguments.res))
    missing = "modelled, as asked" if arguments.modelled else Ours().missing()
    if missing is None:
        found, others = _measured(chosen, case, Sampling(arguments.warmup, arguments.runs))
    else:
        machine: Machine = load(arguments.machine)
        prediction = Prediction(case, machine.name, arguments.draws)
        origin = {BASIS: "modelled", MACHINE: modelled_machine(machine)}
        timings: list[Timing] = []

        def last(timing: Timing) -> list[dict[str, Any]]:
            return rows([*timings[-1:], timing], case, None, origin)[-1:]

        predicted = predict_all(chosen, prediction, arguments.jobs)
        for timing in results(predicted, len(chosen), COLUMNS, last):
            timings.append(timing)
        found, others = rows(timings, case, None, origin), {NOT_RUNNABLE: missing}
    result = table(found, case, others)
    if arguments.markdown:
        Path(arguments.markdown).write_text(markdown_text([result]) + "\n")
    emit(result, arguments)
    return 0 if all(row["correct"] for row in found) else 1


def _measured(
    chosen: Sequence[Rung], case: Case, sampling: Sampling
) -> tuple[list[dict[str, Any]], dict[str, float | str]]:
    """Return (rows, PyTorch's implementations) on this machine's GPU."""
    timer = CudaTimer()
    pytorch = (PyTorchSdpa("cuDNN", "CUDNN_ATTENTION"), PyTorchSdpa("math", "MATH"))
    timings, others = measure_all(chosen, case, timer, sampling, pytorch)
    known = [value for value in others.values() if not isinstance(value, str)]
    origin = {BASIS: "measured", MACHINE: timer.gpu.name}
    return rows(timings, case, min(known, default=None), origin), others
