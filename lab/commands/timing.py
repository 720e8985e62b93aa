"""`python -m lab timing`: predicted clocks of a forward step, ours and flash-attn-4's."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from bench.peers import flash_attn_4
from bench.tables.comparison import OURS
from bench.tables.ready import ready
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from fa4_hd256 import progress
from lab.model.origin import modelled_machine
from lab.model.peers import flash_attn_4_code
from lab.model.studies.step import our_forward, their_forward
from sm100_sim import timing
from sm100_sim.timing import tensor_core_clocks

COLUMNS = (
    Column("provider"),
    Column("mask"),
    Column("seqlen"),
    Column("step_clocks", "clocks", ".0f", "step"),
    Column("step_spread", "clocks", ".0f", "+-"),
    Column("total_clocks", "clocks", ".0f", "one CTA pair"),
    Column("tensor_core", format=".1%", title="tensor core busy"),
    Column("unmatched"),
    Column("ambiguous"),
)


def row(provider: str, seqlen: int, causal: bool, found: timing.Prediction) -> dict[str, Any]:
    """A prediction as a row of the table, its text included."""
    step = found.levels[0].clocks if found.levels else None
    return {
        "provider": provider,
        "mask": "causal" if causal else "full",
        "seqlen": seqlen,
        "step_clocks": None if step is None else float(step[0]),
        "step_spread": None if step is None else float(step.std()),
        "total_clocks": float(found.clocks[0]),
        "tensor_core": _tensor_core_share(found),
        "unmatched": found.compiled.unmatched,
        "ambiguous": found.compiled.ambiguous,
        "utilisation": found.central.utilisation(),
        "text": found.as_text(),
        BASIS: "modelled",
        MACHINE: modelled_machine(found.machine),
    }


def _tensor_core_share(found: timing.Prediction) -> float:
    total = found.central.clocks
    return tensor_core_clocks(found.compiled, found.central, 0, total) / total


def measure(
    seqlen: int, causal: bool, machine: str, frequencies: Sequence[int] = ()
) -> list[dict[str, Any]]:
    """Rows of both projects; flash-attn-4's only where it is installed: as it tunes itself, or with
    each of the frequencies of emulated exp2."""
    mixes: dict[str, Any] = {}
    if flash_attn_4.unavailable() is None:
        name = flash_attn_4.PACKAGE
        mixes = {f"{name}, freq {n}": flash_attn_4_code.pattern(n) for n in frequencies}
        mixes = mixes or {flash_attn_4.PACKAGE: None}

    def replayed(name: str) -> dict[str, Any]:
        with progress.step(f"replaying {name}"):
            if name == OURS:
                return row(name, seqlen, causal, our_forward(seqlen, causal, machine))
            return row(name, seqlen, causal, their_forward(seqlen, causal, machine, mixes[name]))

    names = [OURS, *mixes]
    return ready(map(replayed, names), len(names), COLUMNS)


def table(rows: list[dict[str, Any]]) -> Table:
    """The predictions, each in words below the table."""
    notes = [f"{found['provider']}:\n\n{found['text']}" for found in rows]
    missing = flash_attn_4.unavailable()
    if missing:
        notes.append(f"Without the other project to compare with: {missing}.")
    plot = Plot("provider", "step_clocks")
    return Table("timing", "A forward step on one CTA pair", COLUMNS, rows, tuple(notes), plot)


def main(arguments: argparse.Namespace) -> int:
    rows = measure(arguments.seqlen, arguments.causal, arguments.machine, arguments.freq)
    emit(table(rows), arguments)
    return 0
