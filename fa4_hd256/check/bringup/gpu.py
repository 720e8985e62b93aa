"""Runs small PTX kernels on what a step runs on: the driver's GPU, or the simulator."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from sm100_sim.tools.golden import Case
from sm100_sim.tools.golden.record import Gpu

from .outcome import Target


def head(capability: tuple[int, int]) -> str:
    """Version, target and address size of a module for a GPU. Architecture-specific features
    (tcgen05, TMA of pairs, setmaxnreg) exist for one compute capability alone, hence the `a`, which
    there is from 9.0 on. The oldest version that has the target: drivers refuse newer ones than
    they know, and the first for a B200 know 8.7."""
    major, minor = capability
    version = "8.6" if capability <= (10, 0) else "8.8"
    target = f"sm_{major}{minor}{'a' if major >= 9 else ''}"
    return f".version {version}\n.target {target}\n.address_size 64\n"


def retargeted(ptx: str, capability: tuple[int, int]) -> str:
    """A module for another GPU: its head is replaced, the rest stays."""
    lines = ptx.splitlines(keepends=True)
    last = next(i for i, line in enumerate(lines) if line.startswith(".address_size"))
    return head(capability) + "".join(lines[last + 1 :])


@lru_cache(maxsize=1)
def gpu() -> Gpu:
    """Return this process's context on device 0."""
    return Gpu()


def run_case(target: Target, case: Case) -> list[np.ndarray]:
    """Outputs of a case on the target.

    Raises DriverError on a GPU and SimulationError in the simulator for what the kernel does wrong.
    """
    if target.is_gpu:
        return gpu().run(replace(case, ptx=retargeted(case.ptx, target.capability)))
    return predicted(case)


def predicted(case: Case) -> list[np.ndarray]:
    """Return the outputs that the simulator computes; ImportError without llvmlite."""
    from sm100_sim.tools.golden.replay import replay

    return replay(case)
