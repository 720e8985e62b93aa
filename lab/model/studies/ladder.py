"""The rungs of the optimisation ladder on the timing model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.processes import stream
from bench.suite import Case
from fa4_hd256 import progress
from lab.measure.ladder import Rung, Timing, simulated_error
from lab.model import ours
from lab.model.calls import Kind
from lab.model.samples import SAMPLES as ALL_SAMPLES
from lab.model.tiles import STEP_WORK
from sm100_sim.timing import load

#: Samples of the replays (`model.samples`); three costs of a tile follow from them.
SAMPLES = (ALL_SAMPLES[0], ALL_SAMPLES[2], ALL_SAMPLES[-1])


@dataclass(frozen=True)
class Prediction:
    """Prediction task: a function of the rung, for a pool of processes."""

    case: Case
    machine: str
    draws: int

    def __call__(self, rung: Rung) -> Timing:
        case = self.case
        variant = ours.Variant(Kind(case.causal), rung.use_clc, rung.config, SAMPLES)
        with progress.step(f"replaying {rung.name}"):
            kernel = ours.Ours().forward(variant, load(self.machine), self.draws)
        error = simulated_error(rung, case.causal)
        seconds, clocks = kernel.seconds(case), kernel.costs[0].rate * STEP_WORK
        return Timing(rung, seconds, error, clocks, kernel.paths)


def predict_all(chosen: Sequence[Rung], prediction: Prediction, jobs: int) -> Iterator[Timing]:
    """Yield the prediction of every rung, on `jobs` processes."""
    return stream(prediction, chosen, jobs)
