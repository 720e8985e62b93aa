"""`python -m bench decode`: decoding steps beside other implementations, over keys and values in
e4m3, in pages, and with new rows of a cache.

Each part is a table. Results are checked before anything is timed, and what is compared in a row is
timed interleaved. Without a GPU the timing model has all parts but new rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from bench import suite
from bench.commands import throughput
from bench.measure import caches, new_rows
from bench.measure.providers import Ours
from bench.measure.settings import COLD, L2_CONTENTS, WARM, Sampling
from bench.measure.time_limit import TimeLimit
from bench.measure.timer import CudaTimer
from bench.modelled import modelled
from bench.options import DECODE_PARTS, DECODE_PROVIDERS
from bench.suite import FORWARD, Case
from bench.tables.ready import ready
from bench.tables.results import emit
from bench.tables.table import Column, Table


class Part(NamedTuple):
    """A table. measured: the row of a case, whose `failed` says that ours broke or was wrong. l2:
    the state of L2 before each run, unless it is chosen."""

    cases: Callable[[], Sequence[Case]]
    columns: tuple[Column, ...]
    measured: Callable[[Case, CudaTimer, Sampling], dict[str, Any]]
    table: Callable[[Sequence[dict[str, Any]]], Table]
    l2: str = COLD


def rate_cases() -> list[Case]:
    return suite.cases(["decode"])


def _rates(case: Case, timer: CudaTimer, sampling: Sampling) -> dict[str, Any]:
    providers = throughput.chosen_providers(list(DECODE_PROVIDERS))
    return throughput.measured((case, FORWARD), providers, timer, sampling, torch.bfloat16)


def _rate_table(rows: Sequence[dict[str, Any]]) -> Table:
    return replace(throughput.table(list(rows)), command="decode", title=RATES_TITLE)


RATES_TITLE = "Decoding beside other implementations"


def _over_caches(title: str, cases: Callable[[], list[caches.CacheCase]]) -> Part:
    first = cases()[0]
    return Part(
        cases, caches.columns_of(first), caches.measured, partial(caches.table, first, title)
    )


PARTS = {
    "rates": Part(rate_cases, throughput.columns_of(DECODE_PROVIDERS), _rates, _rate_table),
    "kv-types": _over_caches(
        "Decoding over K and V in e4m3 and NVFP4 beside bf16", caches.type_cases
    ),
    "pages": _over_caches("Keys and values in pages, forward, bf16", caches.page_cases),
    "small-pages": _over_caches("Keys and values in pages of few rows", caches.small_page_cases),
    "new-rows": Part(
        new_rows.default_cases, new_rows.COLUMNS, new_rows.measured, new_rows.table, WARM
    ),
}  # fmt: skip


def chosen(
    arguments: argparse.Namespace, makers: dict[str, Callable[[], Sequence[Case]]]
) -> dict[str, list[Case]]:
    """Return the cases of each part that was requested, all parts if none was; a part without a
    case of `--only` is left out. Raises ValueError if none is left."""
    names = arguments.parts or list(makers)
    found = {
        name: [case for case in makers[name]() if (arguments.only or "") in str(case)]
        for name in names
    }
    if not any(found.values()):
        lines = "; ".join(str(case) for name in names for case in makers[name]())
        raise ValueError(f"no case has {arguments.only!r} in its line; there are {lines}")
    return {name: cases for name, cases in found.items() if cases}


def main(arguments: argparse.Namespace) -> int:
    """Exit status 1 if ours broke, or was wrong."""
    if arguments.modelled or Ours().missing() is not None:
        return modelled("decode", arguments)
    sampling = Sampling(arguments.warmup, arguments.runs)
    tables, failed = [], False
    makers = {name: PARTS[name].cases for name in DECODE_PARTS}
    for name, cases in chosen(arguments, makers).items():
        part, limit = PARTS[name], TimeLimit(arguments.within)
        timer = CudaTimer(l2=arguments.l2 or part.l2)
        begun = (part.measured(case, timer, sampling) for case in limit.begun(cases))
        rows = ready(begun, len(cases), part.columns, f"measuring {name}")
        of_part = part.table(rows)
        note = f"L2 before each run, {timer.l2}: {L2_CONTENTS[timer.l2]}."
        tables.append(limit.noted(replace(of_part, notes=(*of_part.notes, note))))
        failed |= any(row["failed"] for row in rows)
    emit(tables, arguments)
    return int(failed)
