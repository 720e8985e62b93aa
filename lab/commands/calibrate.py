"""`python -m lab calibrate`: sets of constants that published rates do not contradict.

Explained in `lab.validation.calibrate`. Prints what was found: how many sets were replayed and
accepted, errors of the best, and where each constant may lie. With `--write` the accepted sets
become those that every modelled figure draws from.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from typing import Any

import numpy as np

from bench.tables.ready import ready
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Table
from lab.model.origin import modelled_machine
from lab.model.predictor import replayable
from lab.published.flash_attention import FORWARD_256
from lab.published.nvidia import INFERENCE, TRAINING
from lab.published.rows import FIT, TEST
from lab.validation.calibrate import (
    CLOCK_ERROR,
    FOLLOWED,
    LOADED_CLOCK,
    RATIO_ERROR,
    ROW_ERROR,
    Case,
    Judge,
    Population,
    cases,
    constants_at,
    effects,
    spread,
    varying,
)
from sm100_sim.timing import SETS, load

#: Machine whose constants they are; similar machines take the sets, too.
MACHINE_NAME, FILE = "b200", "blackwell.json"
COLUMNS = (
    Column("constant"),
    Column("low", format=".4g", title="believed from"),
    Column("high", format=".4g", title="to"),
    Column("best", format=".4g"),
    Column("lowest", format=".4g", title="accepted from"),
    Column("highest", format=".4g", title="to"),
    Column("told", format=".0%", title="told by the rates"),
)
#: Columns of the rows that are printed while the command runs.
ROUND_COLUMNS = (
    Column("round", title="round (0: first lot)"), Column("sets", title="sets replayed"),
    Column("best", format=".2f", title="best error"),
)  # fmt: skip


def search(chosen: list[Case], arguments: argparse.Namespace) -> tuple[Population, Judge]:
    """Replay the first lot, then the rounds; each is printed as soon as it is replayed."""
    judge = Judge(chosen)
    ranges = varying(load(MACHINE_NAME))
    followed = effects(chosen, ranges, arguments.jobs) >= FOLLOWED
    population = Population(ranges, len(chosen), followed)
    generator = np.random.default_rng(arguments.seed)

    def replayed(number: int) -> dict[str, Any]:
        if number:
            places = population.proposed(judge, arguments.lot, generator)
        else:
            places = spread(arguments.lot, population.ranges, arguments.seed)
        population.add(places, chosen, arguments.jobs)
        best = float(judge.errors(population.seconds).min())
        return {"round": number, "sets": len(population.places), "best": best}

    rounds = range(arguments.rounds + 1)
    ready(map(replayed, rounds), len(rounds), ROUND_COLUMNS)
    return population, judge


def document(population: Population, judge: Judge, most: int, limit: float) -> dict[str, Any]:
    """Return the content of the file of sets: the accepted ones, the best first, and the errors
    they were judged by. Raises ValueError if no set is accepted."""
    errors = judge.errors(population.seconds)
    order = [int(n) for n in np.argsort(errors) if errors[n] <= limit][:most]
    if not order:
        raise ValueError(
            f"the published rates contradict all {len(errors)} sets: the least error is "
            f"{errors.min():.2f}, accepted are {limit:.2f}; replay more (--rounds), or raise "
            "--limit"
        )
    found = []
    for number in order:
        verdict = judge(population.seconds[number])
        clocks = {
            gpu.lower(): round(float(np.mean([
                ghz for session, ghz in verdict.clocks.items() if session.startswith(f"{gpu},")
            ])), 4)
            for gpu in LOADED_CLOCK if any(s.startswith(f"{gpu},") for s in verdict.clocks)
        }  # fmt: skip
        found.append({
            "error": round(verdict.error, 3),
            "clock_ghz": clocks,
            "constants": constants_at(population.places[number], population.ranges),
        })  # fmt: skip
    best = judge(population.seconds[order[0]])
    content: dict[str, Any] = {
        "judged_by": {
            "errors": {"ratio": RATIO_ERROR, "row": ROW_ERROR, "clock": CLOCK_ERROR},
            "limit": limit,
            "half": f"clocks by the rows of the {FIT}, all rows judged",
            "replayed": len(errors),
            "rows": [f"{case.row.build}, {case.row.gpu}, {case.row.case}" for case in judge.cases],
        },
        "best": {"half": halves(best, judge), "clocks": best.clocks},
        "sets": found,
    }
    text = json.dumps(content["sets"], sort_keys=True)
    return {"digest": hashlib.sha256(text.encode()).hexdigest()[:8], **content}


def halves(verdict: Any, judge: Judge) -> dict[str, dict[str, float]]:
    """Root mean square and worst error of the rows of each half, and of the ratios."""
    found = {
        FIT: verdict.rows[judge.fit], TEST: verdict.rows[~judge.fit], "ratios": verdict.ratios,
    }  # fmt: skip
    return {
        name: {"rms": round(float(np.sqrt(np.mean(off**2))), 4),
               "worst": round(float(np.abs(off).max()), 4), "number": len(off)}
        for name, off in found.items() if len(off)
    }  # fmt: skip


def table(content: dict[str, Any]) -> Table:
    """Tabulate the sets' values of each constant. Told: by how much the range, on its logarithmic
    scale, has become narrower between the 5th and the 95th percentile."""
    rows, machine = [], load(MACHINE_NAME)
    for name, (low, high) in varying(machine).items():
        values = [one["constants"][name] for one in content["sets"]]
        bottom, top = map(float, np.percentile(values, [5, 95]))
        if low > 0:
            share = np.log(top / bottom) / np.log(high / low)
        else:
            share = (top - bottom) / (high - low)
        rows.append({
            "constant": name, "low": low, "high": high, "best": values[0], "lowest": bottom,
            "highest": top, "told": max(0.0, 1 - float(share) / 0.9),
            BASIS: "modelled", MACHINE: modelled_machine(machine),
        })  # fmt: skip
    rows.sort(key=lambda row: -row["told"])
    best = content["best"]["half"]
    notes = (
        f"{len(content['sets'])} sets accepted of {content['judged_by']['replayed']} replayed, "
        f"digest {content['digest']}; errors {content['sets'][0]['error']} to "
        f"{content['sets'][-1]['error']} of the stated ones.",
        "The best set: " + "; ".join(
            f"{name} {found['rms']:.1%} rms, {found['worst']:.1%} at worst in {found['number']}"
            for name, found in best.items()
        ) + ".",
        "Clocks, GHz: " + ", ".join(f"{k} {v:.3f}" for k, v in content["best"]["clocks"].items()),
    )  # fmt: skip
    return Table("calibrate", "What published rates say of the constants", COLUMNS, rows, notes)


def main(arguments: argparse.Namespace) -> int:
    """Run the command; the exit status. Raises ValueError for numbers that make no search."""
    if min(arguments.sets, arguments.lot) < 1 or arguments.rounds < 0:
        raise ValueError(
            f"--sets {arguments.sets}, --lot {arguments.lot}, --rounds {arguments.rounds}; "
            "accepted are sets and lots of 1 or more, 0 rounds or more"
        )
    if arguments.show:
        content = json.loads((SETS / FILE).read_text())
    else:
        chosen = cases((*FORWARD_256, *TRAINING, *INFERENCE), replayable)
        content = document(*search(chosen, arguments), arguments.sets, arguments.limit)
    if arguments.write:
        SETS.mkdir(exist_ok=True)
        (SETS / FILE).write_text(as_text(content))
    emit(table(content), arguments)
    return 0


def as_text(content: dict[str, Any]) -> str:
    """JSON, one line a set."""
    rest = {key: value for key, value in content.items() if key != "sets"}
    head = json.dumps(rest, indent=1)[:-2]
    sets = ",\n".join(f"  {json.dumps(one)}" for one in content["sets"])
    return f'{head},\n "sets": [\n{sets}\n ]\n}}\n'
