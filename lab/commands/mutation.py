"""`python -m lab mutation`: the mutation score of this project's kernels and of flash-attn-4's.

Each target calls a public function with small shapes that together reach every synchronisation
instruction of its kernels, which `sm100_sim.tools.mutants` then leaves out one by one.
"""

from __future__ import annotations

import argparse
from typing import Any

from bench.tables.origin import simulator_machine
from bench.tables.ready import results, say
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from lab.measure.mutation_targets import Target, measure, targets
from sm100_sim.tools import mutants

COLUMNS = (
    Column("kernel"),
    Column("shapes", title="shapes (queries x keys)"),
    Column("reading"),
    Column("mutants"),
    Column("caught"),
    Column("redundant"),
    Column("survived"),
    Column("unreached", title="not reached"),
    Column("score", "caught of those not redundant", ".1%"),
    Column("seconds", "s", ".0f"),
)
PLOT = Plot("kernel", ("caught", "redundant", "survived", "unreached"))


def rows(target: Target, scores: list[mutants.Score]) -> list[dict[str, Any]]:
    """The rows of one target, one for each of its kernels that has anything to leave out."""
    scores = [score for score in scores if score.mutants]
    return [
        {
            "target": target.name,
            "kernel": target.name + (f" ({number} of {len(scores)})" if len(scores) > 1 else ""),
            "name": score.kernel,
            "shapes": "; ".join(map(str, target.shapes)),
            "reading": target.reading if isinstance(target.reading, str) else "default",
            "mutants": len(score.mutants),
            "caught": score.count("caught"),
            "redundant": score.count("redundant"),
            "survived": score.count("survived"),
            "unreached": len(score.unreached),
            "score": score.caught_share,
            "seeds": score.seeds,
            "seconds": score.seconds,
            BASIS: "measured",
            MACHINE: simulator_machine(),
        }
        for number, score in enumerate(scores, 1)
    ]


def main(arguments: argparse.Namespace) -> int:
    """Exit status 1 if a mutant survived."""
    known = targets()
    names = arguments.target or list(known)

    def scored(name: str) -> list[dict[str, Any]]:
        scores = measure(known[name], arguments.seeds, arguments.confirm, arguments.jobs, say)
        return rows(known[name], scores)

    of_names = results(map(scored, names), len(names), COLUMNS, lambda of: of, "leaving out")
    found = [row for of_name in of_names for row in of_name]
    title = f"Synchronisation left out, one instruction at a time, up to {arguments.seeds} seeds"
    emit(Table("mutation", title, COLUMNS, found, plot=PLOT), arguments)
    return 1 if any(row["survived"] for row in found) else 0
