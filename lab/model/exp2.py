"""Times of exp2 mixes on the timing model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bench.measure.exp2 import SEQLENS, Times, case_of, config_of
from bench.processes import stream
from fa4_hd256.softmax_emu.pattern import HARDWARE_ONLY, Ex2Pattern
from lab.model import ours
from lab.model.calls import Kind
from lab.model.forward import Kernel
from lab.model.replays import Replayed
from lab.model.samples import SAMPLES
from lab.model.tiles import STEP_WORK
from lab.paths import Paths, path_figures
from sm100_sim.timing import Machine, load

#: Sample on which a mix is replayed, beside the hardware's mix on `SAMPLES`: one long tile.
SAMPLE = SAMPLES[-1]


def replayed(
    pattern: Ex2Pattern, kind: Kind, machine: Machine, draws: int, is_e4m3: bool = False
) -> Replayed:
    config = config_of(pattern, is_e4m3)
    variant = ours.Variant(kind, config=config, samples=(SAMPLE,))
    return ours.replays(variant, machine, draws)[0]


def with_mix(kernel: Kernel, run: Replayed, hardware: Replayed) -> Kernel:
    """A kernel with costs of hardware exp2 under another mix: what that changes on one replay is
    put down to the steps. run, hardware: the sample under the mix and without one."""
    costs = [
        replace(c, rate=c.rate + (clocks - without) / run.work)
        for c, clocks, without in zip(kernel.costs, run.clocks, hardware.clocks, strict=True)
    ]
    return replace(kernel, costs=costs, paths=kernel.paths + Paths.of([run]))


def _replayed(job: tuple[Ex2Pattern, bool, str, int, bool]) -> Replayed:
    pattern, causal, machine, draws, is_e4m3 = job
    return replayed(pattern, Kind(causal), load(machine), draws, is_e4m3)


def modelled_times(
    patterns: Sequence[Ex2Pattern],
    causal: bool,
    machine: str,
    draws: int,
    jobs: int,
    is_e4m3: bool = False,
) -> Iterator[tuple[tuple[Ex2Pattern, str], Times]]:
    """Yield every mix and class, as `with_mix` says. The first of the patterns is hardware only.
    is_e4m3: of the kernel for q, k and v in e4m3."""
    todo = [(pattern, causal, machine, draws, is_e4m3) for pattern in patterns]
    config = config_of(HARDWARE_ONLY, True) if is_e4m3 else None
    variant = ours.Variant(Kind(causal), config=config)
    base = ours.Ours(config).forward(variant, load(machine), draws)
    hardware: Any = None
    for pattern, run in zip(patterns, stream(_replayed, todo, jobs), strict=True):
        hardware = hardware or run
        kernel = with_mix(base, run, hardware)
        figures = path_figures(kernel.paths)
        clocks = STEP_WORK * kernel.tiling.operand_bytes / 2 * kernel.costs[0].rate
        for name, seqlen in SEQLENS.items():
            schedules = kernel.run(case_of(seqlen, causal))
            seconds = np.array([schedule.seconds for schedule in schedules])
            yield (pattern, name), Times(seconds, schedules[0].bound, clocks, figures)
