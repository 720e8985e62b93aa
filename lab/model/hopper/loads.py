"""Latency of the loads of Hopper's kernel of dV and dS, as measured inside it.

Beside the stores of dS, and with what L2 lacks of what was prefetched, a load takes 1.4 to 1.8
times as long as alone (lab/micro/dv_loads_measured.json). Q has one buffer there, so a step's
length follows it.
"""

from __future__ import annotations

import json
from pathlib import Path

from fa4_hd256.kernels.hopper.backward.config import DvPlan
from fa4_hd256.kernels.limits import ELEMENT_BYTES, HEAD_DIM
from lab.model.machines import L2_TIME, with_load
from sm100_sim.timing import Machine

MEASURED = Path(__file__).parents[2] / "micro" / "dv_loads_measured.json"
#: Bytes of Q or dO of a step, which arrive in each CTA of a cluster.
LOAD_BYTES = DvPlan.step_columns * HEAD_DIM * ELEMENT_BYTES


def lacking(keys: int) -> float:
    """The share of a head's Q and dO that L2 has not when a tile of keys reads them: the first of
    all that do."""
    return 1 / -(-keys // DvPlan.tile_rows)


def load_clocks(share: float, ghz: float) -> float:
    """Clocks of a load of Q at that clock of an SM where L2 lacks a share, on the line through the
    means of the two shapes that were measured; L2's part of them keeps its time (`L2_TIME`)."""
    known = json.loads(MEASURED.read_text())
    (few, few_clocks), (many, many_clocks) = sorted(
        (lacking(int(name.split(" x ")[1])), row["Q"]["mean"])
        for name, row in known.items()
        if isinstance(row, dict)
    )
    clocks = few_clocks + (share - few) * (many_clocks - few_clocks) / (many - few)
    return clocks * (1 - L2_TIME + L2_TIME * ghz / known["clock_ghz"])


def under_traffic(machine: Machine, keys: int) -> Machine:
    """The GPU on which loads take as long as they do in this kernel, in calls with so many keys."""
    return with_load(machine, LOAD_BYTES, load_clocks(lacking(keys), machine.values().clock_ghz))
