"""Predictions: run a compiled function in the simulator and replay what it executed."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from sm100_sim.host.arguments import tensor_ranges
from sm100_sim.host.program import program_of
from sm100_sim.launcher import Options, run_host_code, translated_kernel
from sm100_sim.report import Report
from sm100_sim.state.launch import LaunchConfig
from sm100_sim.trace.records import TraceEntry

from .machine_code.assembling import assembled
from .machine_code.resources import Action
from .machine_code.sass import SassFunction, disassemble
from .machine_code.warpgroups import with_products
from .machine_constants import Machine, Values, load
from .program import Compiled, build
from .replaying.critical import CriticalPath, labels_of, words
from .replaying.replay import Replay, replay

Step = Callable[[str], "contextlib.AbstractContextManager[Any]"]

#: Relative differences below this are not ranked: the model does not resolve them.
RESOLUTION = 0.05
#: Iterations below which a loop is not reported.
_FEWEST_ITERATIONS = 4


@dataclass
class Prediction:
    """One kernel launch, as far as one cluster of it goes.

    central: the replay with the central constants. clocks: int64, those of all replays, the central
    one first, then with drawn constants; values: the constants of each. report: the simulated
    run's. levels: loops, innermost first.
    """

    machine: Machine
    report: Report
    compiled: Compiled
    central: Replay
    clocks: np.ndarray
    values: list[Values]
    levels: list[Level]

    def critical_path(self) -> CriticalPath:
        """Return the critical path of the central replay."""
        return CriticalPath(self.compiled, self.central, labels_of(self.compiled))

    def as_text(self) -> str:
        """The prediction in words."""
        central, total = self.central, self.central.clocks
        path = self.critical_path()
        lines = [
            f"{self.report.kernel[:60]} on {self.machine.name} (modelled: {self.machine.basis})",
            f"one cluster of {self.compiled.program.sms}: {_range(self.clocks)} clocks; "
            f"{self.compiled.unmatched} events or sites unmatched, "
            f"{self.compiled.ambiguous} choices ambiguous; differences under {RESOLUTION:.0%} are "
            "not resolved",
        ]
        for level in self.levels:
            lines += self._level_text(level, path)
        lines += ["critical path of the whole run:", *words(path.between(0, total), total)]
        shares = central.utilisation().items()
        lines.append("utilisation: " + ", ".join(f"{name} {share:.0%}" for name, share in shares))
        return "\n".join(lines)

    def _level_text(self, level: Level, path: CriticalPath) -> list[str]:
        begin, end = level.window
        count = max((end - begin) / level.clocks[0], 1.0)
        busy = tensor_core_clocks(self.compiled, self.central, begin, end) / count
        clocks = Counter({key: n / count for key, n in path.between(begin, end).items()})
        return [
            f"loop of {len(level.events)} iterations: {_range(level.clocks)} clocks each, the "
            f"tensor core busy for {busy:.0f}; its critical path:",
            *words(clocks, round(level.clocks[0])),
        ]


def predict(
    function: Any,
    *args: Any,
    machine: str | Machine = "b200",
    draws: int = 8,
    seed: int = 0,
    **kwargs: Any,
) -> list[Prediction]:
    """Run a compiled CuTe DSL function in the simulator and predict the time of its launches.

    function, args, kwargs: as for `sm100_sim.launch`. machine: a name (`machines`) or the machine
    itself. draws: replays with constants drawn from their ranges, beside the central one; seed: of
    these draws. What is replayed is the cluster with the most machine operations, the first of
    them.

    Returns a prediction for each launch. Raises ValueError if the host code's cubin is compressed,
    if a warp's events fit no path through it, ReplayError if the replay hangs,
    and what `sm100_sim.launch` raises.
    """
    collector = Collector(machine, draws, seed)
    program = program_of(function)
    run_host_code(
        lambda on_launch: program.run(args, on_launch, kwargs),
        tensor_ranges(args, kwargs),
        Options(clusters=1, trace=True, observe=collector.observe),
    )
    return collector.predictions


def predict_launches(
    run: Callable[[Options], Any], *, machine: str | Machine = "b200", draws: int = 8, seed: int = 0
) -> list[Prediction]:
    """Predict the time of kernels in PTX, Triton or CUDA C++.

    run: launches them with the options it is called with, by `launch_ptx`, `launch_triton` or
    `launch_cuda`. machine, draws, seed: as of `predict`, which this returns and raises the like of;
    besides ValueError if a kernel came as PTX alone and there is no ptxas (the packages triton and
    nvidia-cuda-nvcc bring it).
    """
    collector = Collector(machine, draws, seed)
    run(Options(clusters=1, trace=True, observe=collector.observe))
    return collector.predictions


class Collector:
    """Makes a prediction of every traced launch it observes: `predictions`, in order. chosen:
    whether a kernel of a name is to be predicted at all. step: a context for what takes long, by
    its name."""

    def __init__(
        self,
        machine: str | Machine = "b200",
        draws: int = 8,
        seed: int = 0,
        chosen: Callable[[str], bool] = lambda name: True,
        step: Step = contextlib.nullcontext,
    ) -> None:
        self.machine = load(machine) if isinstance(machine, str) else machine
        self.predictions: list[Prediction] = []
        self._sampling, self._chosen, self._step = (draws, seed), chosen, step
        self._functions: dict[bytes, dict[str, SassFunction]] = {}

    def observe(self, config: LaunchConfig, report: Report) -> None:
        """Predict one launch. Raises ValueError and ReplayError as `predict`."""
        if not self._chosen(config.kernel_name):
            return
        cubin = config.cubin or assembled(config.ptx)
        if cubin not in self._functions:
            self._functions[cubin] = disassemble(cubin)
        function = self._functions[cubin][config.kernel_name]
        with self._step(f"replaying {config.kernel_name[:60]}"):
            self.predictions.append(
                predict_report(report, function, config.ptx, self.machine, self._sampling)
            )
        # The trace takes more memory than anything else of the run.
        if report.trace is not None:
            report.trace.clear()


@contextlib.contextmanager
def attached(
    machine: str | Machine = "b200",
    draws: int = 4,
    chosen: Callable[[str], bool] = lambda name: True,
    step: Step = contextlib.nullcontext,
) -> Iterator[Collector]:
    """`sm100_sim.attached()` with a prediction of every launch inside. chosen: whether a kernel of
    a name is to be predicted. step: as for `Collector`."""
    from sm100_sim.attach import attached as simulated

    collector = Collector(machine, draws, chosen=chosen, step=step)
    # The code is predicted as it would be compiled for a GPU, without line information.
    with simulated(clusters=1, trace=True, observe=collector.observe, lines=False):
        yield collector


def predict_report(
    report: Report, function: Any, ptx: str, machine: Machine, sampling: tuple[int, int]
) -> Prediction:
    """Predict from the report of a traced run.

    function: the kernel's SASS. sampling: number of draws and their seed.
    """
    compiled = traced_program(report, ptx, function)
    values = machine.sampled(*sampling)
    runs = [replay(compiled, drawn) for drawn in values]
    clocks = np.array([run.clocks for run in runs])
    levels = _levels(compiled, runs)
    return Prediction(machine, report, compiled, runs[0], clocks, values, levels)


def traced_program(report: Report, ptx: str, function: SassFunction) -> Compiled:
    """Return the program of a traced run, as `replay_program` takes it: of the cluster with the
    most machine operations, the first of them.

    report: of a launch with a trace. ptx: its module. function: the kernel's SASS (`disassemble`).
    Raises ValueError for a target that no machine has, and if a warp's events fit no path through
    the SASS.
    """
    kernel = translated_kernel(ptx, report.kernel, True)
    if kernel.kernel.target.startswith("sm_107"):
        raise ValueError(
            f"{report.kernel} is compiled for {kernel.kernel.target}, whose instructions have no "
            "times here; accepted are kernels for sm_90a, sm_100a, sm_100f, sm_103a and sm_103f"
        )
    entries = _longest_cluster(report)
    compiled = build(function, kernel, entries, report.cluster, report.shared_accesses)
    return with_products(compiled)


def _longest_cluster(report: Report) -> list[TraceEntry]:
    """The entries of the cluster with the most, the first of those."""
    by_cluster: dict[tuple[int, ...], list[TraceEntry]] = {}
    for entry in report.trace or ():
        cluster = tuple(i // c for i, c in zip(entry.ctaid, report.cluster, strict=True))
        by_cluster.setdefault(cluster, []).append(entry)
    return max(by_cluster.values(), key=len)


@dataclass(frozen=True)
class Level:
    """A loop of a kernel, by the MMA (else the wait) that stands in it.

    events: rows of `Program.action`, one for each iteration. clocks: float64, the median distance
    of two iterations in each replay. window: begin and end of the longest row of iterations of
    about median length in the central replay.
    """

    events: np.ndarray
    clocks: np.ndarray
    window: tuple[int, int]


def _levels(compiled: Compiled, runs: list[Replay]) -> list[Level]:
    """The loops that an MMA stands in, innermost first; those of nearly equal length are one."""
    program = compiled.program
    held = program.event >= 0
    numbers, events = program.numbers[held], program.event[held]
    chosen = np.isin(program.action[events, 0], (Action.MMA, Action.PRODUCT))
    if not chosen.any():
        chosen = program.action[events, 0] == Action.WAIT
    values, counts = np.unique(numbers[chosen], return_counts=True)
    found: list[Level] = []
    for count, value in sorted(zip(counts.tolist(), values.tolist()), reverse=True):
        rows = events[chosen & (numbers == value)]
        if count < _FEWEST_ITERATIONS:
            break
        clocks = np.array([np.median(np.diff(np.sort(run.started[rows]))) for run in runs])
        if not found or clocks[0] > 1.5 * found[-1].clocks[0]:
            found.append(Level(rows, clocks, _steady_window(runs[0].started[rows])))
    return found


def _steady_window(started: np.ndarray) -> tuple[int, int]:
    started = np.sort(started)
    lengths = np.diff(started)
    steady = lengths < 1.25 * np.median(lengths)
    best, begin = (0, 0), 0
    for place in range(len(steady) + 1):
        if place == len(steady) or not steady[place]:
            best = max(best, (place - begin, begin))
            begin = place + 1
    count, begin = best
    return int(started[begin]), int(started[begin + count])


def tensor_core_clocks(compiled: Compiled, run: Replay, begin: int, end: int) -> float:
    """Clocks of the MMAs that the tensor core of one CTA starts between two times, on average."""
    action, sms = compiled.program.action, compiled.program.sms
    return sum(
        cost.compute * int(action[event, 4]) / sms
        for event, cost in compiled.mma.items()
        if begin <= run.started[event] < end
    )


def _range(values: np.ndarray) -> str:
    if len(values) == 1:
        return f"{values[0]:.0f}"
    return f"{values.mean():.0f} +- {values.std():.0f} (central {values[0]:.0f})"
