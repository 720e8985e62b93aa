"""Predictions: run a compiled function in the simulator and replay what it executed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from sm100_sim.host import HostProgram, tensor_ranges
from sm100_sim.launcher import Options, run_host_code, translated_kernel
from sm100_sim.report import Report

from .critical import CriticalPath, labels_of, words
from .machine_constants import Machine, load
from .program import Compiled, build
from .replay import Replay, replay
from .resources import Action
from .sass import disassemble

#: Relative differences below this are not ranked: the model does not resolve them.
RESOLUTION = 0.05


@dataclass
class Prediction:
    """One kernel launch, as far as one cluster of it goes.

    central: the replay with the central constants. clocks: float64, those of replays with drawn
    constants, the central one first. report: the simulated run's.
    """

    machine: Machine
    report: Report
    compiled: Compiled
    central: Replay
    clocks: np.ndarray
    steps: np.ndarray

    @property
    def step(self) -> float:
        """Clocks of a step: median distance of the most frequent MMA instruction's executions."""
        return float(self.steps[0])

    def critical_path(self) -> CriticalPath:
        """Of the central replay."""
        return CriticalPath(self.compiled, self.central, labels_of(self.compiled))

    def as_text(self) -> str:
        """The prediction in words."""
        central, total = self.central, self.central.clocks
        begin, end = steady_window(self.compiled, central)
        path = self.critical_path()
        steps = max(1.0, (end - begin) / self.step)
        clocks = Counter({k: v / steps for k, v in path.between(begin, end).items()})
        lines = [
            f"{self.report.kernel[:60]} on {self.machine.name} (modelled: {self.machine.basis})",
            f"one cluster of {self.compiled.program.sms}: {_range(self.clocks)} clocks; "
            f"{self.compiled.unmatched} events or sites unmatched, "
            f"{self.compiled.ambiguous} choices ambiguous",
            f"steady state: {_range(self.steps)} clocks a step, the tensor core busy "
            f"{tensor_core_clocks(self.compiled, central, begin, end) / steps:.0f} of them; "
            f"differences under {RESOLUTION:.0%} are not resolved",
            "critical path of a step:",
            *words(clocks, int(self.step)),
            "critical path of the whole run:",
            *words(path.between(0, total), total),
            "utilisation: "
            + ", ".join(f"{name} {share:.0%}" for name, share in central.utilisation().items()),
        ]
        return "\n".join(lines)


def predict(
    function: Any, *args: Any, machine: str | Machine = "b200", draws: int = 8, seed: int = 0,
    **kwargs: Any,
) -> list[Prediction]:
    """Run a compiled CuTe DSL function in the simulator and predict the time of its launches.

    function, args, kwargs: as for `sm100_sim.launch`; the cubin must have been kept, too
    (`cute.compile` with KeepCUBIN). machine: a name (`machine_constants.machines`) or the machine
    itself. draws: replays with constants drawn from their ranges, beside the central one; seed: of
    these draws. What is replayed is the first cluster of the grid.

    Returns a prediction for each launch. Raises ValueError if there is no cubin or a warp's events
    fit no path through it, ReplayError if the replay hangs.
    """
    model = load(machine) if isinstance(machine, str) else machine
    cubin = getattr(getattr(function, "artifacts", None), "CUBIN", None)
    if not cubin:
        raise ValueError(
            "the compiled function carries no cubin; compile it with cutlass's KeepCUBIN option or "
            "with CUTE_DSL_KEEP=ptx,cubin in the environment"
        )
    program = HostProgram.of(function)
    reports = run_host_code(
        lambda on_launch: program.run(args, on_launch, kwargs),
        tensor_ranges(args, kwargs),
        Options(clusters=1, trace=True),
    )
    functions = disassemble(cubin)
    return [
        predict_report(report, functions[report.kernel], program.ptx, model, (draws, seed))
        for report in reports
    ]


def predict_report(
    report: Report, function: Any, ptx: str, machine: Machine, sampling: tuple[int, int]
) -> Prediction:
    """Predict from the report of a traced run.

    function: the kernel's SASS. sampling: number of draws and their seed.
    """
    kernel = translated_kernel(ptx, report.kernel).kernel
    first = report.trace[0].ctaid
    cluster = tuple(i // c for i, c in zip(first, report.cluster, strict=True))
    entries = [
        entry for entry in report.trace
        if tuple(i // c for i, c in zip(entry.ctaid, report.cluster, strict=True)) == cluster
    ]
    compiled = build(function, kernel, entries, report.cluster)
    central = replay(compiled, machine.values())
    clocks, steps = [central.clocks], [step_of(compiled, central)]
    generator = np.random.default_rng(sampling[1])
    for _ in range(sampling[0]):
        drawn = replay(compiled, machine.drawn(generator))
        clocks.append(drawn.clocks)
        steps.append(step_of(compiled, drawn))
    return Prediction(machine, report, compiled, central, np.array(clocks), np.array(steps))


def _frequent_site(compiled: Compiled) -> np.ndarray:
    """Events of the instruction that marks the steps: the MMA, else the wait, executed most."""
    program = compiled.program
    held = program.event >= 0
    numbers, events = program.numbers[held], program.event[held]
    for wanted in (Action.MMA, Action.WAIT):
        chosen = program.action[events, 0] == wanted
        if chosen.any():
            values, counts = np.unique(numbers[chosen], return_counts=True)
            return events[chosen & (numbers == values[counts.argmax()])]
    return events[:0]


def step_of(compiled: Compiled, run: Replay) -> float:
    """Median clocks between two executions of the instruction that marks the steps."""
    started = np.sort(run.started[_frequent_site(compiled)])
    return float(np.median(np.diff(started))) if len(started) > 1 else float(run.clocks)


def steady_window(compiled: Compiled, run: Replay) -> tuple[int, int]:
    """Begin and end of the longest row of steps of nearly median length."""
    started = np.sort(run.started[_frequent_site(compiled)])
    if len(started) < 3:
        return 0, run.clocks
    lengths = np.diff(started)
    steady = lengths < 1.25 * np.median(lengths)
    best, begin = (0, 0), 0
    for place in range(len(steady) + 1):
        if place == len(steady) or not steady[place]:
            best = max(best, (place - begin, begin))
            begin = place + 1
    count, begin = best
    return int(started[begin]), int(started[begin + count])


def tensor_core_clocks(compiled: Compiled, run: Replay, begin: int, end: int) -> int:
    """Clocks of the MMAs that one tensor core starts between two times."""
    rows = [e for e, _ in compiled.mma.items() if begin <= run.started[e] < end]
    ctas = {1: compiled.program.sms, 2: max(compiled.program.sms // 2, 1)}
    return sum(
        compiled.mma[e].compute / ctas[int(compiled.program.action[e, 4])] for e in rows
    )


def _range(values: np.ndarray) -> str:
    if len(values) == 1:
        return f"{values[0]:.0f}"
    return f"{values.mean():.0f} +- {values.std():.0f} (central {values[0]:.0f})"
