"""Runs small PTX kernels on what a step runs on: the driver's GPU, or the simulator."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from bench.bringup.outcome import Target
from sm100_sim.tools.golden import Case
from sm100_sim.tools.golden.cases import retargeted
from sm100_sim.tools.golden.record import Gpu


@lru_cache(maxsize=1)
def gpu() -> Gpu:
    """Return this process's context on device 0."""
    return Gpu()


def run_case(target: Target, case: Case) -> list[np.ndarray]:
    """Outputs of a case on the target. Raises DriverError on a GPU and SimulationError in the
    simulator for what the kernel does wrong."""
    if target.is_gpu:
        return gpu().run(replace(case, ptx=retargeted(case.ptx, target.capability)))
    return predicted(case)


def predicted(case: Case) -> list[np.ndarray]:
    """Return the outputs that the simulator computes; ImportError without llvmlite."""
    from sm100_sim.tools.golden.replay import replay

    return replay(case)
