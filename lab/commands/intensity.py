"""`python -m lab intensity`: FLOP for each byte, at every level of memory, against the machine.

A kernel whose intensity at a level lies above the machine's balance there (FLOP of its tensor cores
for each byte that the level delivers) is not limited by it. Closed forms, as in `roofline`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from bench.suite import BACKWARD, FORWARD, Case
from bench.tables.results import emit
from bench.tables.shape_options import chosen_case
from bench.tables.table import Column, Plot, Table
from lab.compiled.roofline import cases, level_rows
from sm100_sim.timing import Machine, load

COLUMNS = (
    Column("case"),
    Column("direction"),
    Column("kernel"),
    Column("level"),
    Column("flop", format=".3e", title="FLOP executed"),
    Column("useful", format=".0%"),
    Column("bytes", "B", ".3e"),
    Column("intensity", "FLOP/B", ".0f"),
    Column("balance", "FLOP/B", ".0f", "machine"),
    Column("margin", format=".2f"),
    Column("limited_by", title="limited by"),
)


def table(chosen: Iterable[Case], directions: Iterable[str], machine: Machine) -> Table:
    """All levels of all kernels on the cases."""
    directions = tuple(directions)
    found = [row for case in chosen for way in directions for row in level_rows(case, way, machine)]
    notes = (
        "Margin: intensity over the machine's balance; below 1 the level limits. Useful: FLOP by "
        "the field's convention (backward 2.5 times the forward, causal half) over FLOP executed. "
        "HBM: every tensor once; L2: what TMA and the warps move. Formulas: lab/docs/roofline.md.",
    )
    plot = Plot(("case", "kernel"), "margin", series="level", panel="direction")
    title = "Arithmetic intensity, head_dim 256, bf16"
    return Table("intensity", title, COLUMNS, found, notes, plot)


def main(arguments: argparse.Namespace) -> int:
    chosen = cases() if arguments.seqlen is None else [chosen_case(arguments)]
    directions = (arguments.direction,) if arguments.direction else (FORWARD, BACKWARD)
    emit(table(chosen, directions, load(arguments.machine)), arguments)
    return 0
