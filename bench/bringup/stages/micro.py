"""Microbenchmarks: figures that set constants of the timing model (`bench.bringup.micro`).

On a GPU each kernel is launched many times; a figure is the median over the launches, with the
quartiles as its spread. In the simulator the kernels run once, for their errors, without a figure.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bench.bringup.micro import microbenchmarks
from bench.bringup.micro.on_gpu import Loaded
from bench.bringup.micro.table import Micro
from bench.bringup.outcome import Outcome, Target
from bench.bringup.report import like
from bench.bringup.stages.gpu import gpu

#: The simulator runs kernels up to these: CTAs, and bytes of global memory.
_CTAS, _BUFFER = 128, 1 << 28


def items(target: Target) -> list[str]:
    """Names of the benchmarks that this GPU's instructions allow."""
    return list(microbenchmarks(target.sms, target.has_tcgen05))


def run(item: str, target: Target, note: Callable[[str], None]) -> Outcome:
    micro = microbenchmarks(target.sms, target.has_tcgen05)[item]
    if not target.is_gpu:
        return _simulated(micro, note)
    series = []
    for kernel in micro.kernels:
        note(f"kernel '{kernel.name}', grid {kernel.grid}, {kernel.warps} warps")
        loaded = Loaded(gpu(), kernel, target.capability)
        if micro.unit == "GHz":
            series.append(loaded.gigahertz())
        else:
            series.append(loaded.seconds() if micro.seconds else loaded.clocks())
        loaded.free()
    wake = _wake(like(target)) if micro.wakes else 0.0
    return _figure(micro, np.array([micro.figure(*values, wake=wake) for values in zip(*series)]))


def _wake(machine: str) -> float:
    """Clocks from a barrier's phase to the warp that waits, of a machine of the timing model."""
    from sm100_sim import timing

    return timing.load(machine).values().barrier_wake


def _figure(micro: Micro, values: np.ndarray) -> Outcome:
    low, middle, high = (float(f"{x:.5g}") for x in np.percentile(values, (25, 50, 75)))
    sets = f"; sets {micro.constant}" if micro.constant else ""
    spread = f" ({low:g} to {high:g})" if low != high else ""
    text = f"{middle:g} {micro.unit}{spread}: {micro.what}{sets}"
    about = {name: getattr(micro, name) for name in ("unit", "constant", "what")}
    return Outcome("measured", text, {"value": middle, "low": low, "high": high, **about})


def _simulated(micro: Micro, note: Callable[[str], None]) -> Outcome:
    """Run the kernels of a benchmark; what they do wrong is an error of the simulator."""
    from bench.bringup.micro.simulated import simulate

    if micro.seconds:
        return Outcome("not measured", "times of the whole GPU: the simulator runs no such kernel")
    for kernel in micro.kernels:
        if kernel.grid > _CTAS or kernel.buffer > _BUFFER:
            return Outcome("not measured", f"'{kernel.name}' is too large for the simulator")
        note(f"kernel '{kernel.name}' in the simulator")
        simulate(kernel)
    return Outcome("not measured", "ran without an error; only a GPU has a figure")
