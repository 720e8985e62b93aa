"""`python -m lab whole-gpu`: the whole-problem model against an H200, measured and modelled.

`python -m lab.micro.whole_gpu_measure` on the GPU prints what
`lab/micro/whole_gpu_measured.json` holds; `whole_gpu_predicted.json` is what the model said
before it was measured.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from lab.model.hopper import whole_gpu as model
from lab.model.origin import modelled_machine
from sm100_sim.timing import Machine, load

GPU = "h200"
ROW_COLUMNS = (
    Column("part"), Column("row"), Column("unit"),
    Column("measured", format=".0f"), Column("low", format=".0f", title="quartiles: low"),
    Column("high", format=".0f", title="high"),
    Column("before", format=".0f", title="predicted before"),
    Column("modelled", format=".0f", title="modelled now"),
    Column("error", "", "+.0%"),
)  # fmt: skip
LOAD_COLUMNS = (
    Column("load"), Column("burst", "MHz", ".0f", "first launches"),
    Column("late", "MHz", ".0f", "for good"),
    Column("share", format=".2f", title="for good / first"),
    Column("modelled", format=".2f"), Column("after", "ms", ".0f", "gives way after"),
    Column("reported", "MHz", ".0f", "NVML for good"), Column("watts", "W", ".0f", "for good"),
    Column("before", "W", ".0f", "predicted before"),
)  # fmt: skip


def rows(machine: Machine) -> Table:
    """Own bytes of tiles, loads behind stores, launches, hosts."""
    measured, predicted = model.measurements()
    values, found = machine.values(), []
    for part, unit, names in (
        ("own_bytes", "clocks", measured["own_bytes"]), ("queues", "clocks", measured["queues"]),
        ("launches", "clocks", measured["launches"]),
    ):  # fmt: skip
        for name in names:
            low, median, high = model.quartiles(part, names[name], name)
            now = model.own_bytes(name, values) if part == "own_bytes" else None
            found.append({
                "part": part.replace("_", " "), "row": name, "unit": unit, "measured": median,
                "low": low, "high": high, "before": predicted[part].get(name), "modelled": now,
            })  # fmt: skip
    for length, one in measured["hosts"].items():
        name = f"ten calls of {length} tokens, host {one['host'] * 1e6:.0f}, GPU " \
               f"{one['device'] * 1e6:.0f}"  # fmt: skip
        found.append({
            "part": "hosts", "row": name, "unit": "microseconds a call",
            "measured": one["ten"] * 1e6, "low": None, "high": None, "before": None,
            "modelled": model.ten_calls(one["device"], one["host"]) * 1e6,
        })  # fmt: skip
    for row in found:
        said = row["modelled"] if row["modelled"] is not None else row["before"]
        row["error"] = None if said is None else said / row["measured"] - 1
        row |= {BASIS: "measured", MACHINE: f"{measured['device']}, {modelled_machine(machine)}"}
    notes = (
        'Own bytes: clocks of a load or a store of 64 KiB by each SM, all at once; "free": of a '
        "tile of 64 KiB, 16000 clocks of work (or as said) and a store that nobody waits for. "
        "Queues: a load's arrival after the first issue, of the store before it or its own. "
        "Launches: from the last clock of a kernel to the first of the next one's work.",
    )
    plot = Plot("row", ("measured", "modelled"), panel="part")
    title = "A whole H200, measured and modelled"
    return Table("whole_gpu", title, ROW_COLUMNS, found, notes, plot)


def loads(machine: Machine) -> Table:
    """Clock and power under load."""
    measured, predicted = model.measurements()
    found, values = [], machine.values()
    for name, one in measured["loads"].items():
        first, late = model.first_clock(one), one["late"][1]
        found.append({
            "load": name, "burst": first, "late": late, "share": late / first,
            "modelled": model.sustained_share(name, one, values), "after": model.gives_way(one),
            "reported": one["sensors"][-2][3], "watts": model.late_watts(one),
            "before": predicted["loads"].get(name, {}).get("watts"),
            BASIS: "measured", MACHINE: f"{measured['device']}, {modelled_machine(machine)}",
        })  # fmt: skip
    both = [(r["modelled"], r["share"]) for r in found if r["modelled"] is not None]
    errors = np.array([modelled / share - 1 for modelled, share in both])
    error = np.sqrt(np.mean(errors**2))
    notes = (
        "MHz: clocks of an SM over the GPU's timer, with pauses where there are such. Modelled: "
        "what the power budget leaves of the first launches' clock, by their rate and one energy "
        "of a FLOP of random numbers, which the product sets: rms error "
        f"{error:.1%} of {len(errors)}.",
    )
    title = "Clock and power of an H200 under load"
    return Table("whole_gpu", title, LOAD_COLUMNS, found, notes, Plot("load", ("burst", "late")))


def main(arguments: argparse.Namespace) -> int:
    machine: Any = load(arguments.machine)
    emit([rows(machine), loads(machine)], arguments)
    return 0
