"""`python -m bench fences`: what fences of GPU and system scope cost our kernels, modelled.

Arrivals that release at cluster scope hold such fences (docs/timing.md). Each kernel is replayed as
it is compiled, and as if these fences took no longer than their issue.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.model import ours
from bench.model.calls import Kind
from bench.suite import FORWARD
from bench.tables.origin import modelled_machine
from bench.tables.results import add_output_options, emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from sm100_sim import timing
from sm100_sim.timing.machine_constants import Machine, load
from sm100_sim.timing.replay import replay


def calls(seqlen: int) -> dict[str, Callable[[], tuple[Any, tuple]]]:
    """Name -> what makes the compiled kernel and its arguments: one head on one CTA pair."""

    def kernel(which: str, causal: bool) -> Callable[[], tuple[Any, tuple]]:
        variant = ours.Variant(Kind(causal), use_clc=causal, kernel=which)
        return lambda: ours.call(variant, (seqlen, 1))

    return {
        "dK/dV, dS stored, full": kernel("kept dkdv", False),
        "dK/dV, dS stored, causal, CLC": kernel("kept dkdv", True),
        "dQ from stored dS, full": kernel("kept dq", False),
        "dQ from stored dS, causal, CLC": kernel("kept dq", True),
        "forward, full": kernel(FORWARD, False),
        "forward, causal, CLC": kernel(FORWARD, True),
    }


def row(name: str, found: timing.Prediction) -> dict[str, Any]:
    """A prediction beside a replay of it without fences."""
    compiled, program = found.compiled, found.compiled.program
    fences = compiled.fences
    waits = (found.central.done - found.central.started)[program.event[fences]]
    waits = waits if len(waits) else np.zeros(1)
    by_warp = [int(fences[a:b].sum()) for a, b in zip(program.first, program.last)]
    without = replay(compiled.without_fences(), found.values[0]).clocks
    return {
        "kernel": name, "fences": max(by_warp), "wait": float(np.median(waits)),
        "longest": int(waits.max()), "clocks": int(found.clocks[0]), "without": without,
        "cost": float(found.clocks[0] / without - 1),
        "unmatched": compiled.unmatched, "ambiguous": compiled.ambiguous,
        BASIS: "modelled", MACHINE: modelled_machine(found.machine),
    }  # fmt: skip


COLUMNS = (
    Column("kernel"), Column("fences", title="of a warp, at most"),
    Column("wait", "clocks", ".0f", "median wait"), Column("longest", "clocks", title="longest"),
    Column("clocks", "clocks", title="as compiled"),
    Column("without", "clocks", title="without fences"),
    Column("cost", format="+.1%"), Column("unmatched"), Column("ambiguous"),
)  # fmt: skip


def measure(seqlen: int, machine: Machine, only: str = "") -> Table:
    """The kernels with `only` in their names on sequences of that length."""
    rows = []
    for name, call in calls(seqlen).items():
        if only in name:
            compiled, arguments = call()
            prediction = timing.predict(compiled, *arguments, machine=machine, draws=0)[-1]
            rows.append(row(name, prediction))
    if not rows:
        names = ", ".join(calls(seqlen))
        raise ValueError(f"no kernel has {only!r} in its name; there are {names}")
    title = f"Fences of GPU and system scope, one head of {seqlen} tokens on one CTA pair"
    return Table("fences", title, COLUMNS, rows, (), Plot("kernel", ("clocks", "without")))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seqlen", type=int, default=1024)
    parser.add_argument("--kernel", default="", help="only those with this in their names")
    parser.add_argument("--machine", default="b200", help="b200, b300 or a file")
    add_output_options(parser)


def main(arguments: argparse.Namespace) -> int:
    emit(measure(arguments.seqlen, load(arguments.machine), arguments.kernel), arguments)
    return 0
