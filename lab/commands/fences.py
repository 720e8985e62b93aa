"""`python -m lab fences`: what fences of GPU and system scope cost our kernels, modelled.

Arrivals that release at cluster scope hold such fences (lab/docs/timing.md). Each kernel is
replayed as it is compiled, and as if these fences took no longer than their issue.
"""

from __future__ import annotations

import argparse
from typing import Any

from bench.tables.ready import ready
from bench.tables.results import emit
from bench.tables.table import Column, Plot, Table
from fa4_hd256 import progress
from lab.model.studies.fences import calls, row
from sm100_sim import timing
from sm100_sim.timing import Machine, load

COLUMNS = (
    Column("kernel"), Column("fences", title="of a warp, at most"),
    Column("wait", "clocks", ".0f", "median wait"), Column("longest", "clocks", title="longest"),
    Column("clocks", "clocks", title="as compiled"),
    Column("without", "clocks", title="without fences"),
    Column("cost", format="+.1%"), Column("unmatched"), Column("ambiguous"),
)  # fmt: skip


def measure(seqlen: int, machine: Machine, only: str = "") -> Table:
    """The kernels with `only` in their names on sequences of that length."""
    known = calls(seqlen, machine)
    chosen = [name for name in known if only in name]

    def replayed(name: str) -> dict[str, Any]:
        compiled, arguments = known[name]()
        with progress.step(f"replaying {name}"):
            return row(name, timing.predict(compiled, *arguments, machine=machine, draws=0)[-1])

    rows = ready(map(replayed, chosen), len(chosen), COLUMNS)
    title = f"Fences of GPU and system scope, one head of {seqlen} tokens on one CTA pair"
    return Table("fences", title, COLUMNS, rows, (), Plot("kernel", ("clocks", "without")))


def main(arguments: argparse.Namespace) -> int:
    emit(measure(arguments.seqlen, load(arguments.machine), arguments.kernel), arguments)
    return 0
