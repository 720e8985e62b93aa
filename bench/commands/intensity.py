"""`python -m bench intensity`: FLOP for each byte, at every level of memory, against the machine.

A kernel whose intensity at a level lies above the machine's balance there (FLOP of its tensor cores
for each byte that the level delivers) is not limited by it. Closed forms, as in `roofline`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from bench.model import demand
from bench.model.demand import Total
from bench.model.machines import gpu_of
from bench.peaks import SM100_FLOP_PER_CLOCK
from bench.suite import BACKWARD, DIRECTIONS, FORWARD, Case
from bench.tables.origin import modelled_machine
from bench.tables.results import add_output_options, emit
from bench.tables.shape_options import add_shape_options, chosen_case
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from sm100_sim.timing.machine_constants import Machine, Values, load

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


@dataclass(frozen=True)
class Level:
    """bytes: moved by a kernel on a case. bytes_per_clock: delivered to one SM; constants: those
    that this depends on."""

    name: str
    bytes: Callable[[Total], float]
    bytes_per_clock: Callable[[Values], float]
    constants: tuple[str, ...]


def _hbm_bytes_per_clock(values: Values) -> float:
    return values.hbm_terabytes * 1e12 / (values.sms * values.clock_ghz * 1e9)


def _of(name: str, bytes_of: Callable[[Total], float], resource: str) -> Level:
    found = next(r for r in demand.RESOURCES if r.name == resource)
    return Level(name, bytes_of, found.rate, found.constants)


LEVELS = (
    Level("HBM", lambda t: t.hbm_bytes, _hbm_bytes_per_clock, ("hbm_terabytes", "clock_ghz")),
    _of("L2", lambda t: t.demand.l2_bytes, "TMA and L2"),
    _of("SMEM, operands", lambda t: t.demand.operand_bytes, "SMEM port"),
    _of("SMEM, all", lambda t: t.demand.smem_bytes, "SMEM port"),
    _of("TMEM, warps", lambda t: t.demand.tmem_bytes, "TMEM"),
)


def rows(case: Case, direction: str, machine: Machine) -> list[dict[str, Any]]:
    """A row for each kernel of the direction that has products, and each level.

    flop: what the tensor cores execute, whole steps; useful: the part of it that the convention
    counts. margin: intensity over the machine's balance, low and high over the ranges of its
    constants; below 1 the level limits.
    """
    found = []
    totals = demand.totals(case, direction, gpu=gpu_of(machine))
    products = sum(total.demand.flop for total in totals)
    for total in totals:
        flop = total.demand.flop
        for level in LEVELS if flop else ():
            moved = level.bytes(total)
            intensity = flop / moved

            def margin(values: Values, level: Level = level, intensity: float = intensity) -> float:
                return intensity * level.bytes_per_clock(values) / SM100_FLOP_PER_CLOCK

            central = margin(machine.values())
            low, high = demand.extremes(margin, machine, level.constants)
            found.append({
                "case": f"{case.shape}, {case.heads_text}, {case.mask}",
                "direction": direction, "kernel": total.kernel.name, "level": level.name,
                "flop": flop, "useful": case.flop(direction) / products, "bytes": moved,
                "intensity": intensity, "balance": intensity / central, "margin": central,
                "margin_low": low, "margin_high": high,
                "limited_by": "tensor core" if central >= 1 else level.name,
                BASIS: "computed", MACHINE: modelled_machine(machine),
            })  # fmt: skip
    return found


#: (batch, seqlen, heads, KV heads): short, where HBM counts most, to long; few KV heads and many.
SHAPES = ((64, 512, 16, 2), (4, 8192, 16, 2), (4, 8192, 16, 16), (1, 32768, 16, 2))


def cases() -> list[Case]:
    """Full and causal attention of `SHAPES`."""
    return [
        Case("chosen", ((seqlen, seqlen),) * batch, heads, heads_kv, causal)
        for batch, seqlen, heads, heads_kv in SHAPES
        for causal in (False, True)
    ]


def table(chosen: Iterable[Case], directions: Iterable[str], machine: Machine) -> Table:
    """All levels of all kernels on the cases."""
    directions = tuple(directions)
    found = [row for case in chosen for way in directions for row in rows(case, way, machine)]
    notes = (
        "Margin: intensity over the machine's balance; below 1 the level limits. Useful: FLOP by "
        "the field's convention (backward 2.5 times the forward, causal half) over FLOP executed. "
        "HBM: every tensor once; L2: what TMA and the warps move. Formulas: docs/roofline.md.",
    )
    plot = Plot(("case", "kernel"), "margin", series="level", panel="direction")
    title = "Arithmetic intensity, head_dim 256, bf16"
    return Table("intensity", title, COLUMNS, found, notes, plot)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shape_options(parser)
    parser.add_argument("--direction", choices=DIRECTIONS, help="both, if not given")
    parser.add_argument("--machine", default="b200", help="b200, b300 or a file")
    add_output_options(parser)


def main(arguments: argparse.Namespace) -> int:
    chosen = cases() if arguments.seqlen is None else [chosen_case(arguments)]
    directions = (arguments.direction,) if arguments.direction else (FORWARD, BACKWARD)
    emit(table(chosen, directions, load(arguments.machine)), arguments)
    return 0
