"""Mutation score of the sanitizer on one kernel: would a missing instruction be noticed?

One at a time, each synchronisation instruction that a launch reaches is left out and the launch is
repeated under the sanitizer. A mutant is caught if there is a finding or an error that the kernel
itself does not have. A mutant that is not caught counts as redundant only if an edge can be named
that implies the one left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import multiprocessing
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sm100_sim import launcher
from sm100_sim.errors import SimulationError
from sm100_sim.interrupt import end_with_parent, starting_workers
from sm100_sim.launcher import Options, make_machine, translated_kernel
from sm100_sim.run.blas import single_threaded
from sm100_sim.run.machine import Machine
from sm100_sim.sanitizer import READINGS, Watch
from sm100_sim.sanitizer.stretches import synchronises
from sm100_sim.state.launch import LaunchConfig
from sm100_sim.state.memory import GlobalMemory

from .omission import Caught, watch_without

#: Identity of a finding in different runs: its kind and PTX lines, or the error.
Key = tuple
_NO_EDGE = "nothing was found, and no edge implies it"
_REACHED_NOWHERE = "in the runs without it, it was never reached"


@dataclass(frozen=True)
class Mutant:
    """One instruction left out, and what came of it.

    outcome: "caught", "redundant" or "survived". why: the first finding or error; the edges that
    imply the deleted one; or what is missing. runs: how many it took.
    """

    instruction: Any
    outcome: str
    why: str
    runs: int = 1

    def __str__(self) -> str:
        i = self.instruction
        source = f", {i.source[0]}:{i.source[1]}" if i.source else ""
        return f"{self.outcome:9} `{i.text}` (PTX line {i.line}{source}): {self.why}"


@dataclass
class Launch:
    """One launch that can be repeated.

    config, parameters, ranges: what `launcher.run_kernel` takes. memory: the bytes of the ranges
    before the launch.
    """

    config: LaunchConfig
    parameters: np.ndarray
    ranges: list[tuple[int, int, str]]
    memory: list[bytes]

    @classmethod
    def of(cls, config: LaunchConfig, parameters: np.ndarray, ranges: list) -> Launch:
        memory = [ctypes.string_at(low, high - low) for low, high, _ in ranges]
        return cls(config, parameters, ranges, memory)

    @property
    def compiled(self) -> Any:
        """The kernel, translated for the sanitizer."""
        return translated_kernel(self.config.ptx, self.config.kernel_name, True)

    def restore(self) -> None:
        """Put the memory back."""
        for (low, high, _), content in zip(self.ranges, self.memory, strict=True):
            ctypes.memmove(low, content, high - low)

    def run(
        self, options: Options, without: int | None = None, known: frozenset[Key] = frozenset()
    ) -> tuple[dict[Key, str], Machine, Watch]:
        """Return (findings and the error that ended the run, the machine, the sanitizer's
        observer).

        without: an instruction that is left out; the first finding that is not in `known` ends such
        a run.
        """
        self.restore()
        reading = READINGS[options.sanitize]
        watch = Watch(reading) if without is None else watch_without(without, reading, known)
        memory = GlobalMemory(self.ranges, self.parameters)
        machine = make_machine(self.compiled, self.config, memory, options, (watch,))
        found: dict[Key, str] = {}
        try:
            with single_threaded():
                machine.run()
        except Caught:
            pass
        except SimulationError as error:
            name = type(error).__name__
            found[name,] = f"{name}: {error.message}"
        findings: list[Any] = machine.all_findings()
        found.update(((f.kind, f.lines), str(f)) for f in findings)
        return found, machine, watch


@dataclass
class Score:
    """Result of the mutants of one kernel over all launches that were tried.

    kernel: its name. mutants: by PTX line index of the instruction. unreached: synchronisation
    instructions that no launch reached. known: the findings of the kernel itself. seconds: spent.
    seeds: the most that a mutant is tried with. confirm: seeds after which a mutant for which every
    run has named an edge counts as redundant.
    """

    kernel: str
    seeds: int
    confirm: int
    mutants: dict[int, Mutant] = field(default_factory=dict)
    unreached: list[Any] = field(default_factory=list)
    known: dict[Key, str] = field(default_factory=dict)
    launches: int = 0
    seconds: float = 0.0

    def count(self, outcome: str) -> int:
        """Count the mutants that are "caught", "redundant" or "survived"."""
        return Counter(m.outcome for m in self.mutants.values())[outcome]

    def __str__(self) -> str:
        caught, redundant, survived = map(self.count, ("caught", "redundant", "survived"))
        unreached = f", {len(self.unreached)} more not reached" if self.unreached else ""
        return (
            f"{len(self.mutants)} mutants: caught {caught}, redundant {redundant}, "
            f"survived {survived}{unreached}; {100 * self.caught_share:.1f} % of those that are "
            f"not redundant; up to {self.seeds} seeds, {self.seconds:.0f} s"
        )

    @property
    def caught_share(self) -> float:
        """Caught ones among the mutants that are not redundant; 1 if there are none of these."""
        needed = len(self.mutants) - self.count("redundant")
        return self.count("caught") / needed if needed else 1.0

    def add(
        self,
        launch: Launch,
        options: Options,
        jobs: int = 1,
        only: Callable[[list], list] | None = None,
        accept: bool = False,
    ) -> Iterator[Mutant]:
        """Try the mutants of a launch that no earlier launch has caught.

        Each runs in the fixed schedule and then with seeds 1 to `seeds`, until it is caught or has
        edges in all runs up to seed `confirm`. One that several launches reach is redundant only
        if it is in each of them.

        options: of the runs, their seed aside; sanitize as for `launch`, but not False. jobs:
        processes. only: chooses among the instructions, for a sample. accept: a kernel with
        findings is taken as it is, and these catch no mutant.
        Raises ValueError if the kernel itself ends in an error, or has findings that are not
        accepted.
        """
        start = time.perf_counter()
        trials = _Trials(launch, options)
        reached = trials.executed()
        every = synchronisation(launch.compiled)
        chosen = [i for i in every if i.index in reached]
        chosen = chosen if only is None else only(chosen)
        before = {i.index for i in self.unreached} if self.launches else {i.index for i in every}
        self.unreached = [i for i in every if i.index in before - reached]
        tried = [i for i in chosen if not self._caught(i)]
        first = min(self.confirm, self.seeds)
        with _pool(trials, jobs) as run:
            for seeds in ((None, *range(1, first + 1)), tuple(range(first + 1, self.seeds + 1))):
                if not seeds or not tried:
                    break
                self._know(run(trials.intact, seeds), accept)
                tasks = [(i.index, frozenset(self.known), seeds) for i in tried]
                for instruction, found in zip(tried, run(trials.mutant, tasks), strict=True):
                    new = Mutant(instruction, *found)
                    mutant = self.mutants[instruction.index] = self._merge(new)
                    # Whoever has no edge has all seeds to be caught.
                    if new.outcome != "survived" or seeds[-1] == self.seeds:
                        yield mutant
                tried = [i for i in tried if self.mutants[i.index].outcome == "survived"]
        self.launches += 1
        self.seconds += time.perf_counter() - start
        launch.restore()

    def _know(self, runs: Iterable[dict[Key, str]], accept: bool) -> None:
        """Take in what the kernel itself is found to do."""
        for found in runs:
            self.known.update(found)
        ended = [text for key, text in self.known.items() if len(key) == 1]
        if ended or self.known and not accept:
            raise ValueError(
                "the kernel itself is not clean, so a finding does not tell a mutant: "
                f"{[*ended, *self.known.values()][0]}"
            )

    def _caught(self, instruction: Any) -> bool:
        mutant = self.mutants.get(instruction.index)
        return mutant is not None and mutant.outcome == "caught"

    def _merge(self, new: Mutant) -> Mutant:
        """Merge a mutant with its result of earlier launches."""
        old = self.mutants.get(new.instruction.index)
        if old is None:
            return new
        outcome = new.outcome
        if outcome == "redundant" and old.outcome == "survived":
            return dataclasses.replace(old, runs=old.runs + new.runs)
        why = new.why
        if outcome == "redundant":
            why = "; ".join(dict.fromkeys([*old.why.split("; "), *new.why.split("; ")]))
        return Mutant(new.instruction, outcome, why, old.runs + new.runs)


@dataclass(frozen=True)
class _Trials:
    """The runs of one launch, in whichever process."""

    launch: Launch
    options: Options

    def _run(
        self, seed: int | None, without: int | None = None, known: frozenset[Key] = frozenset()
    ) -> tuple[dict[Key, str], Machine, Watch]:
        return self.launch.run(dataclasses.replace(self.options, seed=seed), without, known)

    def executed(self) -> set[int]:
        """Indices of the instructions that the fixed schedule executes."""
        return self._run(None)[1].executed_indices()

    def intact(self, seed: int | None) -> dict[Key, str]:
        """Return the findings of the kernel itself under a seed."""
        return self._run(seed)[0]

    def mutant(
        self, task: tuple[int, frozenset[Key], tuple[int | None, ...]]
    ) -> tuple[str, str, int]:
        """Return (outcome, why, runs) without an instruction; task: its index, the findings that
        are the kernel's own, the seeds."""
        index, known, seeds = task
        edges: dict[str, None] = {}
        whole = True
        for runs, seed in enumerate(seeds, 1):
            found, _, watch = self._run(seed, index, known)
            fresh = [text for key, text in found.items() if key not in known]
            if fresh:
                return "caught", fresh[0], runs
            omission: Any = watch.sanitizer
            implied = omission.implied()
            whole = whole and implied != ""
            edges.update(dict.fromkeys(implied.split("; ") if implied else ()))
        if whole and edges:
            return "redundant", "; ".join(edges), len(seeds)
        return "survived", _REACHED_NOWHERE if whole else _NO_EDGE, len(seeds)


_adopted: list[_Trials] = []


def _adopt(trials: _Trials) -> None:
    end_with_parent()
    _adopted[:] = [trials]


def _in_worker(name: str, task: Any) -> Any:
    return getattr(_adopted[0], name)(task)


@contextlib.contextmanager
def _pool(trials: _Trials, jobs: int) -> Iterator[Callable[[Callable, Iterable], Iterator]]:
    """A function that maps a method of `trials` over tasks, in `jobs` processes.

    They are forked, so each has a copy of the launch's memory at the addresses that its parameters
    hold.
    """
    if jobs == 1:
        yield map
        return
    # Forking while other threads run is safe here: the children use none of their locks.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(jobs, context, _adopt, (trials,)) as executor:

            def each(method: Callable, tasks: Iterable) -> Iterator:
                with starting_workers():
                    return executor.map(
                        _in_worker, *zip(*[(method.__name__, task) for task in tasks], strict=True)
                    )

            yield each


def synchronisation(compiled: Any) -> list[Any]:
    """The synchronisation instructions of a kernel, in the order of its PTX."""
    return [
        i
        for i, execute in zip(compiled.instructions, compiled.executors, strict=True)
        if execute is not None and synchronises(i)
    ]


class Collector:
    """Scores of the kernels whose launches it takes.

    seeds, confirm: see `Score`; confirm None: all seeds. options, jobs, accept: see `Score.add`.
    launches: how many of each kernel are tried. kernel: only kernels with this in their name.
    write: gets a line for each mutant and a summary for each launch.
    """

    def __init__(
        self,
        options: Options,
        seeds: int,
        confirm: int | None = None,
        *,
        jobs: int = 1,
        launches: int = 1,
        kernel: str = "",
        accept: bool = False,
        write: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.options, self.seeds, self.jobs = options, seeds, jobs
        self.confirm = seeds if confirm is None else confirm
        self.launches, self.kernel, self.accept, self.write = launches, kernel, accept, write
        self._scores: dict[tuple[str, str], Score] = {}

    @property
    def scores(self) -> list[Score]:
        """One for each kernel, in the order of their first launches."""
        return list(self._scores.values())

    def take(self, launch: Launch) -> None:
        """Try a launch; for `captured`."""
        config, write = launch.config, self.write
        key = config.ptx, config.kernel_name
        score = self._scores.get(key)
        if self.kernel not in config.kernel_name or score and score.launches == self.launches:
            return
        if score is None:
            score = self._scores[key] = Score(config.kernel_name, self.seeds, self.confirm)
        write(f"kernel {config.kernel_name}, grid {config.grid}")
        for mutant in score.add(launch, self.options, self.jobs, accept=self.accept):
            write("  " + str(mutant).splitlines()[0][:400])
        for text in score.known.values():
            write(f"  the kernel itself: {text.splitlines()[0][:400]}")
        for i in score.unreached:
            write(f"  unreached `{i.text}` (PTX line {i.line})")
        write(f"  {score}")


@contextlib.contextmanager
def captured(take: Callable[[Launch], None]) -> Iterator[None]:
    """Let `take` get each launch before it runs."""
    plain: Any = launcher.run_kernel
    module: Any = launcher

    def run(config: LaunchConfig, parameters: np.ndarray, ranges: list, options: Any) -> Any:
        module.run_kernel = plain
        try:
            launch = Launch.of(config, parameters, ranges)
            take(launch)
            launch.restore()
        finally:
            module.run_kernel = run
        return plain(config, parameters, ranges, options)

    module.run_kernel = run
    try:
        yield
    finally:
        module.run_kernel = plain
