"""`python -m lab roofline`: clocks of each resource for a shape, without any waiting.

The busiest resource bounds a kernel from below, whatever its schedule; how far above it stays is
what `python -m lab timing` models. All figures are closed forms (`demand`) of the kernels'
configuration and of the machine's constants.
"""

from __future__ import annotations

import argparse

from bench.suite import BACKWARD, FORWARD, Case
from bench.tables.results import emit
from bench.tables.shape_options import chosen_case
from bench.tables.table import Column, Plot, Table
from fa4_hd256.softmax_emu.pattern import Ex2Pattern
from lab.compiled.roofline import resource_rows
from sm100_sim.timing import Machine, load

COLUMNS = (
    Column("direction"),
    Column("kernel"),
    Column("resource"),
    Column("step_amount", format=".0f", title="amount a step"),
    Column("unit"),
    Column("step_clocks", "clocks", ".0f", "a step"),
    Column("low", "clocks", ".0f"),
    Column("high", "clocks", ".0f"),
    Column("share", format=".0%", title="of the busiest"),
    Column("microseconds", "us", ".1f", "whole problem"),
    Column("tflops", "TFLOPS", ".0f", "bound"),
)


def table(
    case: Case, directions: tuple[str, ...], machine: Machine, pattern: Ex2Pattern | None = None
) -> Table:
    """All kernels of the directions on one case."""
    found = [
        row for direction in directions for row in resource_rows(case, direction, machine, pattern)
    ]
    bounds = []
    for name in dict.fromkeys((row["direction"], row["kernel"]) for row in found):
        chosen = [row for row in found if (row["direction"], row["kernel"]) == name]
        busiest = max(chosen, key=lambda row: row["clocks"])
        bounds.append(f"{name[1]}: {busiest['resource']}, {busiest['microseconds']:.1f} us")
    notes = (
        "Bounds: " + "; ".join(bounds) + ".",
        "A step is 256 queries x 128 keys of a CTA pair, its figures are of one CTA; those of "
        "preprocess, which has no steps, are of 256 rows. The whole problem includes what tiles "
        "need beside their steps. HBM: every tensor once. Formulas: lab/docs/roofline.md.",
    )
    title = f"Roofline, {case.shape}, heads {case.heads_text}, {case.mask}, head_dim 256, bf16"
    plot = Plot("resource", "microseconds", series="kernel", panel="direction")
    return Table("roofline", title, COLUMNS, found, notes, plot)


def chosen_pattern(arguments: argparse.Namespace) -> Ex2Pattern | None:
    """The mix of exp2 of the options. Raises ValueError for one option without the other."""
    if (arguments.freq is None) != (arguments.res is None):
        raise ValueError("--freq and --res belong together")
    return None if arguments.freq is None else Ex2Pattern(arguments.freq, arguments.res)


def main(arguments: argparse.Namespace) -> int:
    directions = (arguments.direction,) if arguments.direction else (FORWARD, BACKWARD)
    case, pattern = chosen_case(arguments), chosen_pattern(arguments)
    emit(table(case, directions, load(arguments.machine), pattern), arguments)
    return 0
