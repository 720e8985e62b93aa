"""Sets of constants that published rates do not contradict.

A set is drawn from the ranges of the machine's constants, log-uniformly, and judged by every rate
of a forward that is replayed exactly, on a GPU at rest (`calibrates`). Criteria (`Verdict`):

- ratios within `RATIO_ERROR`, of two builds in one case and session, and of one build on two GPUs;
  rates within `ROW_ERROR`.
- a clock that the GPU may have had. Nobody logged one, so each session has an effective one, fitted
  on the rows of the fit half alone: at most `HIGHEST_CLOCK`, and `LOADED_CLOCK` within
  `CLOCK_ERROR`.

Ratios, rates and clocks count alike, so one ratio weighs more than one rate. Few sets of so many
constants pass. So replays of a first lot, spread over the ranges, give an emulator of each row
(`Emulator`); the sets that it finds plausible are replayed, and so on. Sets are accepted by their
replays alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench import suite
from bench.processes import each
from bench.suite import FORWARD
from lab.published.rows import BURST, FIT, TEST, Published
from lab.whole.conditions import Call
from sm100_sim.timing import Machine, load

#: Errors of logarithms: of the model in one row, in a ratio, and of a clock.
ROW_ERROR, RATIO_ERROR, CLOCK_ERROR = 0.04, 0.02, 0.04
#: GHz, the highest that anybody saw.
HIGHEST_CLOCK = {"B200": 1.965, "GB200": 2.062, "GB300": 2.070}
#: GHz while nearly all SMs are at work: by how much cuDNN's step is slower with 64 tiles than with
#: 32, in calls of a millisecond (`lab.validation.validation.chunks`).
LOADED_CLOCK = {"B200": 1.675, "GB200": 1.883, "GB300": 2.045}
#: Varies by session, not by set.
_CLOCK = "clock_ghz"
#: Tiles for each cluster from which on the machine is the bound, not the longest tile alone.
TILES_A_CLUSTER = 3


@dataclass(frozen=True)
class Case:
    """A published rate and how its kernel is predicted. predict: calls under each set of a machine,
    the central one first."""

    row: Published
    predict: Callable[[Machine], list[Call]]


def calibrates(row: Published) -> bool:
    """Return True if a rate counts: a forward of 1k to 32k on a GPU at rest, not bound by the
    host."""
    counted = row.role in (FIT, TEST) and row.kind == BURST and row.direction == FORWARD
    whole = row.keys is None and row.parts == 1 and row.head_dim == 256
    return counted and whole and 1024 <= row.seqlen <= 32768


def cases(published: Sequence[Published], find: Callable[[Published], Any]) -> list[Case]:
    """The rows that count and whose very kernel is replayed. find: the provider of a row, None if
    there is none (`predictor.replayable`). Raises ValueError naming the builds that cannot be
    replayed here."""
    found = []
    counted = [(row, find(row)) for row in published if calibrates(row)]
    missing = sorted({str(row.build) for row, provider in counted if provider is None})
    if missing:
        raise ValueError(
            f"rates of {', '.join(missing)} count, but these kernels are not here to be replayed: "
            "`python -m lab peers` prepares them"
        )
    for row, provider in counted:
        variant, problem = provider.variant(row.problem, FORWARD), row.problem
        clusters = load(row.machine).values().sms / 2
        if problem.batch * problem.heads * problem.seqlen_q / 256 >= TILES_A_CLUSTER * clusters:
            predict = functools.partial(_calls, provider, variant, problem)
            found.append(Case(row, predict))
    return found


def _calls(provider: Any, variant: Hashable, problem: suite.Case, machine: Machine) -> list[Call]:
    return provider.forward(variant, machine, len(machine.sets or ())).calls(problem)


def varying(machine: Machine) -> dict[str, tuple[float, float]]:
    """Constant -> (low, high), of those that a set names."""
    return {
        name: (one.low, one.high)
        for name, one in machine.constants.items()
        if one.low < one.high and name != _CLOCK
    }


def spread(count: int, ranges: dict[str, tuple[float, float]], seed: int) -> np.ndarray:
    """float64 (count, constants): places between 0 and 1, each constant's spread evenly."""
    generator = np.random.default_rng(seed)
    strata = np.stack([generator.permutation(count) for _ in ranges], axis=1)
    return (strata + generator.random(strata.shape)) / count


def constants_at(places: np.ndarray, ranges: dict[str, tuple[float, float]]) -> dict[str, float]:
    """The set at places between 0 and 1: log-uniform over a range that does not touch 0."""
    found = {}
    for place, (name, (low, high)) in zip(places, ranges.items(), strict=True):
        value = low + place * (high - low) if low <= 0 else low * (high / low) ** place
        found[name] = float(f"{value:.5g}")
    return found


def log_seconds(
    chosen: Sequence[Case], sets: Sequence[dict[str, float]], jobs: int = 1
) -> np.ndarray:
    """float64 (sets, cases): logarithms of seconds at the GPUs' highest clocks, by replays, on so
    many processes."""
    jobs = min(jobs, len(sets))
    lots = [(chosen, list(sets[n::jobs])) for n in range(jobs)]
    found = np.empty((len(sets), len(chosen)))
    for number, lot in enumerate(each(_replayed, lots, jobs)):
        found[number::jobs] = lot
    return found


def _replayed(lot: tuple[Sequence[Case], Sequence[dict[str, float]]]) -> np.ndarray:
    chosen, sets = lot
    found = np.empty((len(sets), len(chosen)))
    calls: dict[int, list[Call]] = {}
    for number, case in enumerate(chosen):
        machine = load(case.row.machine)
        own = {"sms", "mufu_interval"}
        trial = replace(
            machine,
            sets=tuple(
                {key: value for key, value in one.items() if key not in own} for one in sets
            ),
        )
        calls[number] = case.predict(trial)[1:]
        share = HIGHEST_CLOCK[case.row.gpu] / machine.values().clock_ghz
        found[:, number] = [math.log(call.at(share)) for call in calls[number]]
    return found


@dataclass(frozen=True)
class Verdict:
    """Verdict on one set. rows: logarithms of modelled over published seconds by case, at the
    sessions' clocks. ratios: the same of pairs. clocks: session -> GHz; off: logarithms of these
    over what load leaves a GPU. error: root of the mean squares over the stated errors, of ratios,
    rows and clocks alike."""

    rows: np.ndarray
    ratios: np.ndarray
    clocks: dict[str, float]
    off: np.ndarray

    @property
    def error(self) -> float:
        parts = self.rows / ROW_ERROR, self.ratios / RATIO_ERROR, self.off / CLOCK_ERROR
        return math.sqrt(np.mean([np.mean(part**2) for part in parts if len(part)]))


class Judge:
    def __init__(self, chosen: Sequence[Case]) -> None:
        self.cases = chosen
        self.published = np.array([math.log(case.row.seconds) for case in chosen])
        self.sessions = {
            one: np.array([case.row.session == one for case in chosen])
            for one in dict.fromkeys(case.row.session for case in chosen)
        }
        self.fit = np.array([case.row.role == FIT for case in chosen])
        self.pairs = pairs(chosen)

    def __call__(self, seconds: np.ndarray) -> Verdict:
        """seconds: logarithms by case, at the cases' highest clocks."""
        found, clocks, off = seconds - self.published, {}, []
        for session, members in self.sessions.items():
            fitted = members & self.fit if (members & self.fit).any() else members
            gpu = next(case.row.gpu for case in self.cases if case.row.session == session)
            share = math.exp(min(found[fitted].mean(), 0.0))
            clocks[session] = share * HIGHEST_CLOCK[gpu]
            off.append(math.log(clocks[session] / LOADED_CLOCK[gpu]))
            found = np.where(members, found - math.log(share), found)
        ratios = np.array([found[a] - found[b] for a, b in self.pairs])
        return Verdict(found, ratios, clocks, np.array(off))

    def errors(self, seconds: np.ndarray) -> np.ndarray:
        """float64, `Verdict.error` of many sets. seconds: (sets, cases)."""
        return np.array([self(one).error for one in seconds])


def pairs(chosen: Sequence[Case]) -> list[tuple[int, int]]:
    """Cases of one problem and protocol that differ in the build alone, within a session, or in the
    GPU alone."""
    found = []
    for a, first in enumerate(case.row for case in chosen):
        for b in range(a + 1, len(chosen)):
            second = chosen[b].row
            alike = first.problem == second.problem and first.protocol == second.protocol
            builds = first.session == second.session and first.build != second.build
            gpus = first.gpu != second.gpu and first.build == second.build
            if alike and (builds or gpus):
                found.append((a, b))
    return found


#: Constants whose effects on a row are taken together; the others' each for itself.
_TOGETHER = 8
_RIDGE = 0.1
#: A constant that changes no row by this much, as a logarithm, is not told by the rows.
FOLLOWED = 0.01
#: Share of its range by which a point is moved from a good one, and how much more error than the
#: least that an emulator finds is worth a replay.
_STEP, _PLAUSIBLE = 0.2, 1.25
#: Places that an emulator judges for each set that is then replayed.
_TRIED = 4000


def effects(
    chosen: Sequence[Case], ranges: dict[str, tuple[float, float]], jobs: int = 1
) -> np.ndarray:
    """float64 (constants,): by how much the row that follows a constant most changes between it and
    the ends of its range, as a logarithm; the others are central."""
    sets: list[dict[str, float]] = [{}]
    sets += [{name: end} for name, ends in ranges.items() for end in ends]
    found = log_seconds(chosen, sets, jobs)
    return np.abs(found[1:] - found[0]).max(axis=1).reshape(-1, 2).max(axis=1)


class Emulator:
    """Rows of sets that were not replayed: a form of the constants that they follow, quadratic in
    those that matter most. places: of these constants alone."""

    def __init__(self, places: np.ndarray, seconds: np.ndarray) -> None:
        centred = 2 * places - 1
        self._mean = seconds.mean(axis=0)
        linear = _ridge(centred, seconds - self._mean)
        self._chosen = np.argsort(-np.abs(linear).sum(axis=1))[:_TOGETHER]
        self._weights = _ridge(self._terms(centred), seconds - self._mean)

    def _terms(self, centred: np.ndarray) -> np.ndarray:
        most = centred[:, self._chosen]
        first, second = np.triu_indices(most.shape[1])
        ones = np.ones((len(centred), 1))
        return np.hstack([ones, centred, most[:, first] * most[:, second]])

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """float64 (sets, cases): logarithms of seconds."""
        return self._mean + self._terms(2 * places - 1) @ self._weights


def _ridge(matrix: np.ndarray, values: np.ndarray) -> np.ndarray:
    size = matrix.shape[1]
    below = np.vstack([matrix, math.sqrt(_RIDGE) * np.eye(size)])
    return np.linalg.lstsq(below, np.vstack([values, np.zeros((size, values.shape[1]))]))[0]


class Population:
    """Sets that were replayed. places: float64 (sets, constants); seconds: (sets, cases). followed:
    bool (constants,), those that some row follows."""

    def __init__(
        self, ranges: dict[str, tuple[float, float]], cases: int, followed: np.ndarray
    ) -> None:
        self.ranges, self.followed = ranges, followed
        self.places, self.seconds = np.zeros((0, len(ranges))), np.zeros((0, cases))

    def add(self, places: np.ndarray, chosen: Sequence[Case], jobs: int = 1) -> None:
        sets = [constants_at(one, self.ranges) for one in places]
        self.places = np.vstack([self.places, places])
        self.seconds = np.vstack([self.seconds, log_seconds(chosen, sets, jobs)])

    def proposed(self, judge: Judge, count: int, generator: np.random.Generator) -> np.ndarray:
        """Places that the emulator finds nearly as plausible as any, drawn again from the whole
        range or near those that are best so far. What no row follows is always drawn again: it
        keeps its range."""
        errors = judge.errors(self.seconds)
        emulator = Emulator(self.places[:, self.followed], self.seconds)
        best = self.places[np.argsort(errors)[: max(10, len(errors) // 4)]]
        wide = generator.random((_TRIED, self.places.shape[1]))
        near = best[generator.integers(len(best), size=_TRIED)]
        # Off an end of its range a step goes back as far.
        near = np.abs(near + generator.normal(0, _STEP, near.shape))
        near = np.clip(1 - np.abs(1 - near), 0, 1)
        both = np.vstack([wide, np.where(self.followed, near, wide)])
        found = judge.errors(emulator(both[:, self.followed]))
        plausible = np.flatnonzero(found <= max(_PLAUSIBLE * found.min(), np.sort(found)[count]))
        return both[generator.choice(plausible, count, replace=False)]
