"""The whole-problem model on what `lab.micro.whole_gpu_measure` measures on a Hopper GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lab.micro import whole_gpu_kernels
from lab.micro.whole_gpu_kernels import BUFFER, TILES, WORK
from lab.whole.conditions import FLOP_PER_CLOCK, Call, Conditions
from lab.whole.problem import Tile, TileCosts, schedule
from sm100_sim.timing import Values, l2_share

_HERE = Path(whole_gpu_kernels.__file__)
#: TFLOPS at the nominal clock and picojoules a FLOP of operations: of products of zeros and of
#: random numbers as an H200 ran them before (894, and 788 under load); of attention cuDNN's and
#: PyTorch's rates; of others guesses.
OPERATIONS = {
    "product, random": (894.0, 0.84),
    "product, half random": (894.0, 0.62),
    "product, a tenth random": (894.0, 0.45),
    "product, zeros": (894.0, 0.45),
    "attention, cuDNN": (670.0, 0.84),
    "attention, FA2": (319.0, 0.84),
    "awake": (0.0, 0.0),
}
#: Clocks from the end of a kernel to the work of the next, before any was measured.
GAPS = {
    "small, plain": 2000,
    "small, plain, graph": 1465,
    "small, dependent": 1200,
    "small, dependent, let go early": 600,
    "200 KiB, plain": 2500,
    "200 KiB, plain, graph": 2000,
    "200 KiB, dependent": 1500,
    "200 KiB, dependent, let go early": 1200,
    "200 KiB, pairs, plain": 2800,
    "200 KiB, pairs, plain, graph": 2300,
    "200 KiB, pairs, dependent": 1700,
    "200 KiB, pairs, dependent, let go early": 1400,
}


def own_bytes(name: str, values: Values) -> float:
    """Clocks of a row of `whole_gpu_measure.own_bytes`: of a load, a store, or of a tile."""
    active = int(re.findall(r"(\d+) SMs", name)[0])
    machine = values._replace(sms=float(active))
    apart = "apart" in name
    link, memory = values.l2_bytes_per_clock_sm, values.hbm_terabytes * 1e3 / values.clock_ghz
    if name.startswith("store"):
        leaving = max(values.store_bytes_per_clock, 1.0)
        shared = 0.0 if apart else active * BUFFER / memory
        return max(BUFFER / leaving, shared) + values.store_ack
    alone = BUFFER / link
    if name.startswith("load"):
        return values.tma_load_hbm + max(alone, 0.0 if apart else active * BUFFER / memory)
    writes = float(BUFFER) if "store" in name else 0.0
    tile = Tile(1.0, own_bytes=BUFFER + writes, reads=float(BUFFER), writes=writes)
    work = float(next(iter(re.findall(r"(\d+) clocks of work", name)), WORK))
    costs = TileCosts(0.0, work + values.tma_load_hbm + BUFFER / l2_share(machine), 0.0)
    return schedule([tile] * active * TILES, costs, machine, 1, "static").clocks / TILES


def clock_and_watts(
    values: Values, tflops: float, picojoules: float, duty: float = 1.0
) -> tuple[float, float]:
    """Return (MHz, watts) under lasting load. tflops: while it runs at the machine's clock;
    picojoules: a FLOP; duty: share of the time in which it runs."""
    given = values._replace(mma_picojoules=picojoules)
    second = schedule([Tile(values.clock_ghz * 1e9)], TileCosts(0.0, 0.0, 1.0), values, 1, "static")
    flop = tflops * 1e12 * duty
    call = Call([(1, replace(second, work=flop / FLOP_PER_CLOCK, launch=0.0))])
    share = call.clock_share(given)
    return values.clock_ghz * share * 1e3, call.watts(share, given)


def ten_calls(device: float, host: float) -> float:
    """Seconds a call of ten in a row."""
    return Call.host_and_device(device, Conditions(10, host_seconds=host))


def predictions(values: Values, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Predict the rows of own bytes with these names, launches and loads."""
    loads = {}
    for name, (tflops, energy) in OPERATIONS.items():
        mhz, watts = clock_and_watts(values, tflops, energy)
        loads[name] = {"mhz": mhz, "watts": watts}
    for name in ("product, random", "product, zeros"):
        for duty in (0.2, 0.4):
            mhz, watts = clock_and_watts(values, *OPERATIONS[name], duty)
            loads[f"{name}, {duty:.0%} of the time"] = {"mhz": mhz, "watts": watts}
    return {
        "own_bytes": {name: own_bytes(name, values) for name in names},
        "launches": {name: float(clocks) for name, clocks in GAPS.items()},
        "loads": loads,
    }


def measurements() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (what was measured, what was predicted before), as the files have it."""
    measured, predicted = (
        json.loads(_HERE.with_name(f"whole_gpu_{name}.json").read_text())
        for name in ("measured", "predicted")
    )
    return measured, predicted


def quartiles(part: str, row: dict[str, Any], name: str) -> list[float]:
    """Return the quartiles of the figure that a row is about."""
    if part == "own_bytes":
        return row["store" if name.startswith("store") else "load" if name.startswith("load")
                   else "tile"]  # fmt: skip
    if part == "launches":
        return row["work"]
    if "load" not in name:
        return row["store done"]
    # Issuing the store has held up the thread that then issues the load.
    return [row["issue"][1] + clocks for clocks in row["load"]]


def first_clock(row: dict[str, Any]) -> float:
    """MHz of an SM in the first launches, but for the very first."""
    return float(np.median([clock for *_, clock in row["first"][2:8]]))


def gives_way(row: dict[str, Any]) -> float | None:
    """Milliseconds until the clock first lies 2 % below that of the first launches."""
    below = [at for at, _, clock in row["operations"] if clock < 0.98 * first_clock(row)]
    return min(below, default=None)


def late_watts(row: dict[str, Any]) -> float:
    """Return the watts that the driver reports at the end."""
    return float(row["sensors"][-2][1])


#: FLOP of an operation of random numbers by wgmma. Of other operands and instructions the energy of
#: a FLOP is another.
FLOP = {
    "product, random": 2.0 * 8192**3, "attention, cuDNN": 4.0 * 16384**2 * 256 * 16,
    **{f"attention, cuDNN, {heads} heads of 128 queries": 4.0 * 128 * 32768 * 256 * heads
       for heads in (16, 33, 66, 99, 132)},
}  # fmt: skip


def sustained_share(name: str, row: dict[str, Any], values: Values) -> float | None:
    """Return the sustained share of the clock of the first launches, by their rate and the
    machine's energy of a FLOP; None where that energy is not known."""
    if name not in FLOP:
        return None
    seconds = float(np.median([took for _, took, _ in row["first"][2:8]])) * 1e-3
    mhz, _ = clock_and_watts(values, FLOP[name] / seconds / 1e12, values.mma_picojoules)
    return mhz / (values.clock_ghz * 1e3)
