"""Our kernels replayed as they are compiled, and as if fences took no longer than their issue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bench.suite import FORWARD
from bench.tables.table import BASIS, MACHINE
from lab.model import ours
from lab.model.calls import Kind
from lab.model.origin import modelled_machine
from sm100_sim import timing
from sm100_sim.timing import Machine, replay_program


def calls(seqlen: int, machine: Machine) -> dict[str, Callable[[], tuple[Any, tuple]]]:
    """Name -> what makes the compiled kernel and its arguments: one head on one CTA pair of the
    machine."""

    def kernel(which: str, causal: bool) -> Callable[[], tuple[Any, tuple]]:
        variant = ours.Variant(Kind(causal), use_clc=causal, kernel=which)
        return lambda: ours.call_on(machine, variant, (seqlen, 1))

    return {
        "dV and dS, full": kernel("dv", False),
        "dV and dS, causal, CLC": kernel("dv", True),
        "dK and dQ from dS, full": kernel("products", False),
        "dK and dQ from dS, causal, CLC": kernel("products", True),
        "forward, full": kernel(FORWARD, False),
        "forward, causal, CLC": kernel(FORWARD, True),
    }


def row(name: str, found: timing.Prediction) -> dict[str, Any]:
    """A prediction beside a replay of it without fences."""
    compiled, program = found.compiled, found.compiled.program
    fences = compiled.fences
    waits = (found.central.done - found.central.started)[program.event[fences]]
    waits = waits if len(waits) else np.zeros(1)
    by_warp = [int(fences[a:b].sum()) for a, b in zip(program.first, program.last)]
    without = replay_program(compiled.without_fences(), found.values[0]).clocks
    return {
        "kernel": name, "fences": max(by_warp), "wait": float(np.median(waits)),
        "longest": int(waits.max()), "clocks": int(found.clocks[0]), "without": without,
        "cost": float(found.clocks[0] / without - 1),
        "unmatched": compiled.unmatched, "ambiguous": compiled.ambiguous,
        BASIS: "modelled", MACHINE: modelled_machine(found.machine),
    }  # fmt: skip
