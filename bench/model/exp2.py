"""Times of exp2 mixes on the timing model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bench.measure.exp2 import (
    SEQLENS,
    Times,
    case_of,
)
from bench.processes import each
from bench.tables.paths import Paths
from fa4_hd256.kernels.blackwell.forward.config import ForwardConfig
from sm100_sim.timing import load
from softmax_emu.pattern import HARDWARE_ONLY, Ex2Pattern

from . import ours
from .calls import Kind
from .replays import Replayed
from .samples import SAMPLES
from .tiles import STEP_WORK

#: What a mix is replayed on, beside the hardware's mix on `SAMPLES`: one long tile.
SAMPLE = SAMPLES[-1]


def _replayed(job: tuple[Ex2Pattern, bool, str, int]) -> Replayed:
    """The sample under one mix."""
    pattern, causal, machine, draws = job
    config = ForwardConfig(ex2_pattern=pattern)
    variant = ours.Variant(Kind(causal), config=config, samples=(SAMPLE,))
    return ours.replays(variant, load(machine), draws)[0]


def modelled_times(
    patterns: Sequence[Ex2Pattern], causal: bool, machine: str, draws: int, jobs: int
) -> dict[tuple[Ex2Pattern, str], Times]:
    """Every mix and class.

    Costs of tiles are fitted for hardware exp2; what a mix changes on one more replay is put down
    to the steps.
    """
    todo = [(pattern, causal, machine, draws) for pattern in patterns]
    replays = each(_replayed, todo, jobs)
    base = ours.Ours().forward(ours.Variant(Kind(causal)), load(machine), draws)
    hardware = replays[patterns.index(HARDWARE_ONLY)]
    found = {}
    for pattern, run in zip(patterns, replays, strict=True):
        costs = [
            replace(c, rate=c.rate + (clocks - without) / run.work)
            for c, clocks, without in zip(base.costs, run.clocks, hardware.clocks, strict=True)
        ]
        kernel, clocks = replace(base, costs=costs), STEP_WORK * costs[0].rate
        paths = base.paths + Paths.of([run])
        for name, seqlen in SEQLENS.items():
            schedules = kernel.run(case_of(seqlen, causal))
            seconds = np.array([schedule.seconds for schedule in schedules])
            found[pattern, name] = Times(seconds, schedules[0].bound, clocks, paths)
    return found
