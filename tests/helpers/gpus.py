"""GPUs of any size for tests of the operator's rules."""

from __future__ import annotations

from dataclasses import replace

from fa4_hd256.gpus.devices import Gpu
from fa4_hd256.gpus.simulated import simulated_gpu
from sm100_sim.devices import named


def gpu(pairs: int = 74, name: str = "b200") -> Gpu:
    """A GPU that holds so many CTA pairs, otherwise as the one of that name."""
    return replace(simulated_gpu(named(name)), pairs=pairs)
