"""`python -m lab steps`: clocks of a step or unit, and of a tile beside its steps, by kernel.

Ours, flash-attn-4's and FROST's, forward and backward, as fitted to their replays for whole
problems: a tile takes its boundary and, for each of its steps, the clocks of one. Modelled only.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from bench.peers import flash_attn_4, frost
from bench.suite import BACKWARD, FORWARD, Case
from bench.tables.comparison import OURS
from bench.tables.ready import ready
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from lab.model.calls import defaults_to_clc
from lab.model.origin import modelled_machine
from lab.model.peers import frost_backward
from lab.model.predictor import Predictor, predictor_of
from lab.model.stored_tiles import DV, PRODUCT
from lab.model.tiles import DKDV, DQ, STEP_WORK
from lab.whole.problem import TileCosts

_FORWARD_STEP = "256 queries x 128 keys"
#: (provider, direction) -> (kernel as its costs are called, what it makes, what a step or unit of a
#: CTA pair is, clocks of the tensor core in one).
KERNELS: dict[tuple[str, str], tuple[tuple[str, str, str, float], ...]] = {
    **{
        (name, FORWARD): ((FORWARD, "O", _FORWARD_STEP, STEP_WORK),)
        for name in (OURS, flash_attn_4.PACKAGE, frost.NAME)
    },
    (OURS, BACKWARD): (
        ("dv", "dV and dS", "256 keys x 128 queries", DV),
        ("products", "dK or dQ of dS", "256 rows x 128", PRODUCT),
        ("dkdv", "dK and dV, dS anew", "128 keys x 256 queries", DKDV),
        ("dq", "dQ, dS anew", "256 queries x 128 keys", DQ),
    ),
    (flash_attn_4.PACKAGE, BACKWARD): (
        ("dkdv", "dK and dV", "128 keys x 256 queries", DKDV),
        ("dq", "dQ", "256 queries x 128 keys", DQ),
    ),
    (frost.NAME, BACKWARD): (
        ("main", "dV and dS", "128 keys x 128 queries", frost_backward.UNIT_WORK),
        ("dk", "dK of dS", "256 rows x 64", frost_backward.STEP_WORK),
        ("dq", "dQ of dS", "256 rows x 64", frost_backward.STEP_WORK),
    ),
}
COLUMNS = (
    Column("provider"), Column("direction"), Column("makes"), Column("mask"),
    Column("unit", title="a step or unit"),
    Column("tensor_core", "clocks", ".0f", "tensor core"),
    Column("step", "clocks", ".0f", "modelled"), Column("step_low", "", ".0f", "low"),
    Column("step_high", "", ".0f", "high"),
    Column("boundary", "clocks", ".0f", "a tile beside its steps"),
    Column("boundary_low", "", ".0f", "low, tile"),
    Column("boundary_high", "", ".0f", "high, tile"),
)  # fmt: skip


def case_of(causal: bool) -> Case:
    """Return a case of a kind; costs do not follow its lengths."""
    return Case("dense", ((4096, 4096),) * 8, 8, 8, causal)


def costs_of(
    predictor: Predictor, provider: str, direction: str, causal: bool, kernel: str
) -> list[TileCosts]:
    """Return the costs of a kernel under each set of constants, the central one first, by the
    call's scheduler."""
    case = case_of(causal)
    clc = provider == OURS and defaults_to_clc(case, direction)
    if direction == FORWARD:
        return predictor.forward(provider, case, clc).costs
    return predictor.backward(provider, case, clc).costs(kernel)


def row(costs: Sequence[TileCosts], tensor_core: float) -> dict[str, float]:
    """Clocks of a step of so much work, and of a tile's boundary: central, least, most."""
    steps = np.array([one.rate * tensor_core for one in costs])
    # Fits leave a rounding error where a boundary is held at none.
    boundaries = np.array([one.each for one in costs]).round(3)
    found = {"tensor_core": tensor_core}
    for name, values in (("step", steps), ("boundary", boundaries)):
        found |= {name: float(values[0]), f"{name}_low": float(values.min()),
                  f"{name}_high": float(values.max())}  # fmt: skip
    return found


def rows(predictor: Predictor, names: Iterable[str]) -> list[dict[str, Any]]:
    origin = {BASIS: "modelled", MACHINE: modelled_machine(predictor.machine)}
    chosen = tuple(names)
    jobs = [
        (name, direction, causal, kernel)
        for (name, direction), kernels in KERNELS.items()
        if name in chosen and predictor.refuses(name, case_of(False), direction) is None
        for kernel in kernels
        for causal in (False, True)
    ]  # fmt: skip
    found = (
        {"provider": name, "direction": direction, "makes": makes,
         "mask": "causal" if causal else "full", "unit": unit,
         **row(costs_of(predictor, name, direction, causal, kernel), tensor_core), **origin}
        for name, direction, causal, (kernel, makes, unit, tensor_core) in jobs
    )  # fmt: skip
    return ready(found, len(jobs), COLUMNS)


def table(found: list[dict[str, Any]], draws: int) -> Table:
    notes = (
        "A tile takes its boundary and its steps' clocks; where tiles of a cluster overlap, what "
        "is left of the boundary. Of a kernel with one tile a cluster all but the steps counts as "
        f"boundary. Low and high: the least and the most under {draws} sets of constants that "
        "published rates do not contradict and the central one. No step is fitted below the tensor "
        "core's own clocks.",
        "256 queries x 128 keys of a backward are one of our units of dV and two steps of "
        "products, or where dS is not stored a unit of each other kernel; two units of FROST's "
        "main kernel and four steps of its products; one unit of each of "
        f"{flash_attn_4.PACKAGE}'s kernels.",
    )
    plot = Plot(("provider", "makes", "mask"), "step", low="step_low", high="step_high",
                panel="direction")  # fmt: skip
    return Table("steps", "Clocks of steps, units and tiles", COLUMNS, found, notes, plot)


def main(arguments: argparse.Namespace) -> int:
    """Run the command. Raises ValueError for a machine of Hopper."""
    predictor = predictor_of(arguments.machine, arguments.draws)
    names = arguments.provider or [name for name, _ in KERNELS]
    emit(table(rows(predictor, names), arguments.draws), arguments)
    return 0
