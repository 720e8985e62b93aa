"""`python -m lab hopper`: the timing model with Hopper's constants against a Hopper GPU.

Hopper shares with Blackwell what the model has beside the tensor core: issue slots, pipes, shared
memory, barriers, bulk copies. `--build DIR` writes the cubins of `hopper_kernels` and
`hopper_pipeline`; `python lab/micro/hopper_measure.py DIR` times them on the GPU and prints
what `lab/micro/hopper_measured.json` holds; without `--build` the command replays the same
cubins and prints both. `--missing` and `--add FILE` do the same for kernels that were not measured
before.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from bench.tables.ready import ready
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from lab.micro.hopper_cubins import add_measurements, kernels, measurements, write_cubins
from lab.model.hopper.single_kernels import GPU, program_of, round_clocks
from lab.model.origin import modelled_machine
from sm100_sim.timing import load, replay_program

COLUMNS = (
    Column("kernel"),
    Column("operations", title="in a round"),
    Column("measured", "clocks", ".1f"),
    Column("modelled", "clocks", ".1f"),
    Column("spread", "clocks", ".1f", "+-"),
    Column("error", "", "+.0%"),
    Column("sets", title="sets the constant"),
)


def compare(draws: int = 4, chosen: str = "") -> Table:
    """Clocks of a round of every kernel with `chosen` in its name, modelled beside measured."""
    machine, measured = load(GPU), measurements()
    # One CTA has L2 to itself.
    values = [drawn._replace(sms=1.0) for drawn in machine.sampled(draws)]
    wanted = [kernel for kernel in kernels() if chosen in kernel.name]
    if not wanted:
        names = "; ".join(kernel.name for kernel in kernels())
        raise ValueError(f"no kernel has {chosen!r} in its name; there are: {names}")

    def row(kernel: Any) -> dict[str, Any]:
        compiled = program_of(kernel)
        clocks = [round_clocks(compiled, replay_program(compiled, drawn)) for drawn in values]
        found = measured["rounds"].get(kernel.name)
        return {
            "kernel": kernel.name,
            "operations": f"{kernel.operations} {kernel.unit}",
            "measured": found,
            "modelled": clocks[0],
            "spread": float(np.std(clocks)),
            "error": None if found is None else clocks[0] / found - 1,
            "sets": kernel.sets or None,
            "unmatched": compiled.unmatched,
            BASIS: "modelled",
            MACHINE: modelled_machine(machine),
        }  # fmt: skip

    rows = ready(map(row, wanted), len(wanted), COLUMNS)
    errors = np.abs([r["error"] for r in rows if r["error"] is not None and not r["sets"]])
    notes = [f"Measured on {measured['device']}, one CTA; modelled: central constants, spread."]
    if len(errors):
        notes.append(
            f"Rows that set no constant: median error {np.median(errors):.0%}, within 10 % "
            f"{np.mean(errors <= 0.1):.0%} of {len(errors)}, largest {errors.max():.0%}."
        )
    title = "Clocks of a round on a Hopper GPU, measured and modelled"
    plot = Plot("kernel", ("measured", "modelled"))
    return Table("hopper", title, COLUMNS, rows, tuple(notes), plot)


def main(arguments: argparse.Namespace) -> int:
    """Run the command; the exit status."""
    if arguments.build:
        known = measurements()["rounds"] if arguments.missing else ()
        write_cubins(Path(arguments.build), known)
        return 0
    if arguments.add:
        add_measurements(Path(arguments.add))
    emit(compare(chosen=arguments.kernel), arguments)
    return 0
