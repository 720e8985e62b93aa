"""`python -m bench pages`: keys and values in pages, beside the same call without, by the model.

Decoding steps and a few queries at once on long sequences, in pages of 16 and of 128 rows. Boxes of
TMA are no larger than a page, so that small pages take more instructions for the same bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench import suite
from bench.model.calls import forward_problem
from bench.model.predictor import Predictor, add_model_options, printing_predictor
from bench.suite import FORWARD, Case
from bench.tables.comparison import OURS
from bench.tables.origin import modelled_machine
from bench.tables.results import add_output_options, emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table

#: Rows of a page; None: keys and values in no pages.
SIZES = (None, 128, 16)


def default_cases() -> list[Case]:
    """(batch, queries, keys), heads of Qwen3.5."""
    return [
        Case("pages", ((queries, keys),) * batch, 32, 2, True)
        for batch in (1, 128)
        for keys in (8192, 131072)
        for queries in (1, 2, 4)
    ]


def row(case: Case, predictor: Predictor) -> dict[str, Any]:
    """A case with keys in pages of each of the sizes."""
    found = {
        size: predictor.predict(OURS, replace(case, page_size=size), FORWARD).seconds
        for size in SIZES
    }
    whole = found[None]
    times = {_name(size): float(seconds[0]) * 1e6 for size, seconds in found.items()}
    behind = {
        f"behind_{size}": float((found[size] / whole)[0]) - 1 for size in SIZES if size is not None
    }
    worst = max(float((found[size] / whole).max()) for size in SIZES) - 1
    return {
        "group": case.group, "shape": case.shape, "heads": case.heads_text,
        "rows": forward_problem(case).tiles.rows, **times, **behind, "worst": worst,
        BASIS: "modelled", MACHINE: modelled_machine(predictor.machine),
    }  # fmt: skip


def _name(size: int | None) -> str:
    return "none" if size is None else f"pages_{size}"


COLUMNS = (
    Column("shape"), Column("heads"), Column("rows", title="rows of a tile"),
    Column("none", "us", ".1f", "no pages"),
    *(Column(_name(n), "us", ".1f", f"pages of {n}") for n in SIZES if n is not None),
    *(Column(f"behind_{n}", format="+.1%", title=f"pages of {n} over none")
      for n in SIZES if n is not None),
    Column("worst", format="+.1%", title="at most, of all sets"),
)  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> Table:
    note = (
        "The call's default kernel and parts, its second kernel included. Page numbers are in an "
        "order by chance. At most, of all sets: the larger ratio under any of the sets of "
        "constants that were drawn."
    )
    plot = Plot(("shape", "heads"), tuple(map(_name, SIZES)))
    title = "Keys and values in pages, forward, bf16"
    return Table("pages", title, COLUMNS, list(rows), (note,), plot)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    suite.add_selection(parser)
    add_output_options(parser)


def main(arguments: argparse.Namespace) -> int:
    predictor = printing_predictor(arguments.machine, arguments.draws)
    cases = suite.selected(arguments, default_cases)
    emit(table([row(case, predictor) for case in cases]), arguments)
    return 0
