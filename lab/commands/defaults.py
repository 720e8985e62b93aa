"""`python -m lab defaults`: what a call decides for itself, against the other ways to decide it.

Order of tiles, scheduler, when tiles are claimed, KV splits, parts of groups of heads, memory for
dS, exp2's mix, stages: each candidate is placed on the same cases under the same sets of constants,
those that published rates do not contradict. Modelled only.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.processes import stream
from bench.tables.ready import results
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from lab.model.origin import modelled_machine
from lab.model.predictor import Predictor, predictor_of
from lab.model.studies.defaults import CHOICES, Choice, Decided
from sm100_sim.timing import load

#: Candidates whose losses differ by less are not told apart.
RESOLVED = 0.0005


def summary_rows(choice: Choice, found: Sequence[Decided]) -> list[dict[str, Any]]:
    """A row for each candidate, the least loss on average first."""
    of_cases = [one.losses() for one in found]
    rows = []
    for name in of_cases[0]:
        losses = [of_case[name] for of_case in of_cases]
        means, most = [float(one.mean()) for one in losses], [float(one.max()) for one in losses]
        worst = int(np.argmax(means))
        rows.append({
            "choice": choice.name, "candidate": name, "is_default": name == choice.default,
            "cases": len(found), "mean": float(np.mean(means)), "worst_mean": means[worst],
            "worst_case": _case(found[worst]), "most": max(most),
        })  # fmt: skip
    rows.sort(key=lambda row: (row["mean"], not row["is_default"]))
    default = next(row for row in rows if row["is_default"])
    for row in rows:
        row["verdict"] = _verdict(row, default)
    return rows


def default_row(choice: Choice, found: Sequence[Decided]) -> dict[str, Any]:
    """Return the default's loss, and the other candidate with the least loss on average."""
    rows = summary_rows(choice, found)
    default = next(row for row in rows if row["is_default"])
    best = next(row for row in rows if row is not default)
    return {
        "choice": choice.name, "default": choice.default,
        **{key: default[key] for key in ("cases", "mean", "most", "worst_mean", "worst_case")},
        "best": best["candidate"], "best_mean": best["mean"], "best_most": best["most"],
        "verdict": best["verdict"],
    }  # fmt: skip


def _verdict(row: dict[str, Any], default: dict[str, Any]) -> str | None:
    """Return the verdict on another candidate beside the default."""
    if row is default:
        return None
    gains = [default[key] - row[key] for key in ("mean", "most")]
    words = ["less" if gain > RESOLVED else "more" if gain < -RESOLVED else "as much"
             for gain in gains]  # fmt: skip
    return f"{words[0]} on average, {words[1]} at worst"


def _case(found: Decided) -> str:
    case = found.case
    return f"{case.shape}, {case.heads_text}, {case.mask}"


def case_rows(choice: Choice, found: Sequence[Decided]) -> list[dict[str, Any]]:
    """A row for each case: what the default costs there."""
    rows = []
    for one in found:
        loss, case = one.losses()[choice.default], one.case
        taken = one.picks[choice.default]
        rows.append({
            "choice": choice.name, "group": case.group, "shape": case.shape,
            "heads": case.heads_text, "mask": case.mask,
            "taken": _text(taken), "best": _text(one.best(taken, RESOLVED)),
            "microseconds": float(one.seconds[taken][0]) * 1e6,
            "loss": float(loss.mean()), "most": float(loss.max()),
        })  # fmt: skip
    return rows


def _text(alternative: Any) -> str:
    if isinstance(alternative, bool):
        return "CLC" if alternative else "static"
    return str(alternative)


DEFAULT_COLUMNS = (
    Column("choice"), Column("default"), Column("cases"),
    Column("mean", format=".2%", title="loss, mean"),
    Column("most", format=".1%", title="at worst"),
    Column("worst_mean", format=".1%", title="its mean in the worst case"), Column("worst_case"),
    Column("best", title="best alternative"),
    Column("best_mean", format=".2%", title="its loss, mean"),
    Column("best_most", format=".1%", title="at worst, its"),
    Column("verdict", title="beside the default it loses"),
)  # fmt: skip
SUMMARY_COLUMNS = (
    Column("choice"), Column("candidate"), Column("is_default", title="default"), Column("cases"),
    Column("mean", format=".2%", title="loss, mean"),
    Column("worst_mean", format=".1%", title="its mean in the worst case"),
    Column("worst_case"), Column("most", format=".1%", title="at worst"),
    Column("verdict", title="beside the default it loses"),
)  # fmt: skip
CASE_COLUMNS = (
    Column("choice"), Column("group"), Column("shape"), Column("heads"), Column("mask"),
    Column("taken", title="the default takes"), Column("best", title="best on average"),
    Column("microseconds", "us", ".1f", "time"), Column("loss", format=".2%", title="loss, mean"),
    Column("most", format=".1%", title="at worst"),
)  # fmt: skip


def tables(
    found: Sequence[tuple[Choice, Sequence[Decided]]],
    origin: dict[str, str],
    draws: int,
    every: int = 1,
) -> list[Table]:
    """The defaults, all candidates, and the default case by case. every: which of the cases of
    each choice."""
    note = (
        f"Loss: time over the least that any alternative takes under the same constants, less 1; "
        f"over {draws} sets of constants that published rates do not contradict and the central "
        'one. A mean is over sets, then over cases; "at worst" is under the worst set of the '
        f"worst case. Losses that differ by less than {RESOLVED:.2%} count as equal."
    )
    if every > 1:
        note += f" Of the cases of a choice one in {every} was replayed, the first among them."
    defaults = [default_row(choice, of) | origin for choice, of in found]
    rows = [row | origin for choice, of in found for row in summary_rows(choice, of)]
    by_case = [row | origin for choice, of in found for row in case_rows(choice, of)]
    return [
        Table("defaults", "Defaults", DEFAULT_COLUMNS, defaults, (note,), Plot("choice", "mean")),
        Table("defaults", "Candidates for each default", SUMMARY_COLUMNS, rows, (note,),
              Plot("candidate", "mean", panel="choice")),
        Table("defaults", "The defaults, case by case", CASE_COLUMNS, by_case, (note,),
              Plot(("shape", "heads", "mask"), "loss", panel="choice")),
    ]  # fmt: skip


@dataclass(frozen=True)
class Deciding:
    """A choice on its cases, or one in `every`, as a function of its name, for a pool of
    processes."""

    machine: str
    draws: int
    every: int = 1

    def __call__(self, name: str) -> list[Decided]:
        choice = CHOICES[name]
        predictor: Predictor = predictor_of(self.machine, self.draws)
        chosen = list(choice.cases())[:: self.every]
        return [choice.decide(case, predictor) for case in chosen]


def main(arguments: argparse.Namespace) -> int:
    names = arguments.choice or list(CHOICES)
    if arguments.every < 1:
        raise ValueError(f"--every {arguments.every}; accepted is 1 or more")
    deciding = Deciding(arguments.machine, arguments.draws, arguments.every)
    of_names = zip((CHOICES[name] for name in names), stream(deciding, names, arguments.jobs))
    decided = list(results(of_names, len(names), DEFAULT_COLUMNS, lambda one: [default_row(*one)]))
    origin = {BASIS: "modelled", MACHINE: modelled_machine(load(arguments.machine))}
    emit(tables(decided, origin, arguments.draws, arguments.every), arguments)
    return 0
