"""Decoding by the timing model: all parts but new rows of a cache."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.commands.decode import PARTS, RATES_TITLE, chosen
from bench.measure.caches import BF16, BYTES, E4M3, NVFP4, CacheCase, page_cases
from bench.options import DECODE_PROVIDERS
from bench.suite import FORWARD, Case
from bench.tables.comparison import OURS
from bench.tables.ready import ready
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from lab.model.calls import forward_problem
from lab.model.machines import gpu_of
from lab.model.origin import modelled_machine
from lab.model.predictor import OURS_E4M3, OURS_NVFP4, PROVIDERS, Predictor, predictor_of
from lab.modelled import throughput

MODELLED = ("rates", "kv-types", "pages")
KV_TYPES_COLUMNS = (
    Column("shape"), Column("heads"), Column("rows", title="rows of a tile"),
    *(column for kind in BYTES for column in (
        Column(kind, "us", ".1f"), Column(f"parts_{kind}", title=f"parts, {kind}"),
        Column(f"hbm_{kind}", format=".1%", title=f"of HBM, {kind}"),
    )),
    *(
        Column(f"{name}_{kind}", format=".2f", title=f"{title}, {kind}")
        for kind in (E4M3, NVFP4) for name, title in (
            ("ratio", "tokens a second, of bf16's"), ("least", "least"), ("most", "most"),
        )
    ),
)  # fmt: skip
_PAGED = page_cases()[0]
#: Columns of page sizes, the first of no pages.
SIZES = {_PAGED.name(form): form.size for form in _PAGED.forms()}
PAGES_COLUMNS = (
    Column("shape"), Column("heads"), Column("rows", title="rows of a tile"),
    *(Column(_PAGED.name(form), "us", ".1f", _PAGED.title(form)) for form in _PAGED.forms()),
    *(
        Column(f"behind_{size}", format="+.1%", title=f"pages of {size} over none")
        for size in _PAGED.sizes[1:]
    ),
    Column("worst", format="+.1%", title="at most, of all sets"),
)  # fmt: skip


def kv_types_row(case: Case, predictor: Predictor) -> dict[str, Any]:
    machine = predictor.machine
    of_kind = {BF16: OURS, E4M3: OURS_E4M3.name, NVFP4: OURS_NVFP4.name}
    found = {kind: predictor.predict(one, case, FORWARD) for kind, one in of_kind.items()}
    row = {
        "group": case.group, "shape": case.shape, "heads": case.heads_text,
        "rows": forward_problem(case).tiles.rows,
        BASIS: "modelled", MACHINE: modelled_machine(machine),
    }  # fmt: skip
    for kind in (E4M3, NVFP4):
        ratios = found[BF16].seconds / found[kind].seconds
        figures = ratios[0], ratios.min(), ratios.max()
        for name, ratio in zip(("ratio", "least", "most"), figures, strict=True):
            row[f"{name}_{kind}"] = float(ratio)
    rate = gpu_of(machine).hbm_bytes_per_second
    for kind, nbytes in BYTES.items():
        seconds = float(found[kind].seconds[0])
        row[kind] = seconds * 1e6
        row[f"parts_{kind}"] = PROVIDERS[of_kind[kind]].default(case, FORWARD, machine)[1]
        row[f"hbm_{kind}"] = case.kv_elements * nbytes / seconds / rate
    return row


def pages_row(case: Case, predictor: Predictor) -> dict[str, Any]:
    found = {
        size: predictor.predict(OURS, replace(case, page_size=size), FORWARD).seconds
        for size in SIZES.values()
    }
    times = {name: float(found[size][0]) * 1e6 for name, size in SIZES.items()}
    over = {size: found[size] / found[None] for size in _PAGED.sizes[1:]}
    behind = {f"behind_{size}": float(ratios[0]) - 1 for size, ratios in over.items()}
    worst = max(float(ratios.max()) for ratios in over.values()) - 1
    return {
        "group": case.group, "shape": case.shape, "heads": case.heads_text,
        "rows": forward_problem(case).tiles.rows, **times, **behind, "worst": worst,
        BASIS: "modelled", MACHINE: modelled_machine(predictor.machine),
    }  # fmt: skip


def kv_types_table(rows: Sequence[dict[str, Any]]) -> Table:
    note = (
        "The call's default kernels and parts, those that make one result of the parts included. "
        "Of HBM: bytes of keys and values, scales of blocks included, over what HBM gives by its "
        "data sheet in the time. "
        "Least, most: the ratio under any of the sets of constants that were drawn."
    )
    title, plot = (
        "Decoding over K and V in e4m3 and NVFP4 beside bf16",
        Plot(("shape",), tuple(BYTES)),
    )
    return Table("decode", title, KV_TYPES_COLUMNS, list(rows), (note,), plot)


def pages_table(rows: Sequence[dict[str, Any]]) -> Table:
    note = (
        "The call's default kernel and parts, its second kernel included. Page numbers are in an "
        "order by chance. At most, of all sets: the larger ratio under any of the sets of "
        "constants that were drawn."
    )
    title, plot = "Keys and values in pages, forward, bf16", Plot(("shape", "heads"), tuple(SIZES))
    return Table("decode", title, PAGES_COLUMNS, list(rows), (note,), plot)


def _table(name: str, cases: Sequence[Case], arguments: argparse.Namespace) -> Table:
    if name == "rates":
        jobs = [(case, FORWARD) for case in cases]
        found = throughput.table(throughput.rows_of(jobs, DECODE_PROVIDERS, arguments))
        return replace(found, command="decode", title=RATES_TITLE)
    predictor = predictor_of(arguments.machine, arguments.draws)
    cases = [case.of(None) if isinstance(case, CacheCase) else case for case in cases]
    if name == "kv-types":
        of_types = (kv_types_row(case, predictor) for case in cases)
        return kv_types_table(ready(of_types, len(cases), KV_TYPES_COLUMNS))
    of_pages = (pages_row(case, predictor) for case in cases)
    return pages_table(ready(of_pages, len(cases), PAGES_COLUMNS))


def main(arguments: argparse.Namespace) -> int:
    """Run the command. Raises ValueError for new rows alone, which are not modelled."""
    if arguments.parts and not {*arguments.parts} & {*MODELLED}:
        raise ValueError(
            f"{', '.join(arguments.parts)} needs a GPU; modelled are {', '.join(MODELLED)}"
        )
    makers = {name: PARTS[name].cases for name in MODELLED}
    arguments.parts = [name for name in arguments.parts if name in MODELLED]
    parts = chosen(arguments, makers).items()
    emit([_table(name, cases, arguments) for name, cases in parts], arguments)
    return 0
