"""`python -m bench throughput`: forward and backward over the suite, implementations side by side.

On a CUDA GPU every provider's result is checked against the one reference, then all of them are
timed, interleaved. Without one, times are those of the timing model, of all whose kernels are
replayed.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bench import suite
from bench.measure.providers import Provider, default_providers
from bench.measure.throughput import measured_rows
from bench.measure.time_limit import TimeLimit
from bench.measure.timer import (
    CudaTimer,
    Sampling,
)
from bench.suite import DIRECTIONS, FORWARD, Case
from bench.tables.comparison import AS_PUBLISHED, LIKELY, OURS, YARDSTICK
from bench.tables.paths import PATH_COLUMNS, path_note
from bench.tables.ready import ready, results
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from fa4_hd256.kernels.limits import ELEMENT_BYTES
from lab.model.stated_errors import stated_errors
from lab.model.throughput import Predictions

#: Columns of ours against its peers, in every table that has them.
STANDING_COLUMNS = (
    Column("peer", title="best peer"), Column("ratio", format=".2f", title="best peer / ours"),
    Column("ratio_low", format=".2f", title="low"),
    Column("ratio_high", format=".2f", title="high"),
    Column("probability", format=".0%"), Column("gain", format="+.0%"),
)  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def table(rows: list[dict[str, Any]]) -> Table:
    """Providers side by side; what did not run is listed below with its reason."""
    names = [name for name in rows[0]["details"] if name != AS_PUBLISHED or _has_published(rows)]
    columns = columns_of(names, rows[0][BASIS])
    plot = Plot(("shape", "heads"), tuple(names), panel="panel")
    return Table("throughput", "Throughput at head_dim 256", columns, rows, _notes(rows), plot)


def columns_of(names: Sequence[str], basis: str) -> tuple[Column, ...]:
    """Return the columns of rows with such providers. basis: measured or modelled."""
    columns = (
        Column("direction"), Column("shape"), Column("heads"), Column("mask"),
        *(Column(name, "TFLOPS", ".0f", name) for name in names),
        Column("range", title="ours, range"),
        Column("of_peak", format=".1%", title="ours, of peak"),
        Column("clock_mhz", "MHz", ".0f", "clock"),
        *STANDING_COLUMNS, Column("faster"),
    )  # fmt: skip
    if basis == "modelled":
        return (
            *columns,
            Column("sustained_peer", title="best peer, sustained"),
            Column("sustained_ratio", format=".2f", title="ratio, sustained"),
            Column("sustained_probability", format=".0%", title="probability, sustained"),
            *PATH_COLUMNS,
        )
    return (
        *columns,
        Column("us", "us", ".1f", "ours"), Column("peer_us", "us", ".1f", "best peer"),
        Column("kv_rate", "TB/s", ".2f", "K and V once, ours"),
        Column("power_watts", "W", ".0f", "power"), Column("l2", title="L2"),
    )  # fmt: skip


def _has_published(rows: list[dict[str, Any]]) -> bool:
    return any(row.get(AS_PUBLISHED) for row in rows)


def summary(rows: list[dict[str, Any]]) -> Table | None:
    """Ratios by direction, group and mask, every row counted; None where no row has one."""
    groups: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["ratio"] is not None:
            mask = row["mask"] if row["mask"] in ("full", "causal") else "windows"
            groups[row["direction"], row["group"], mask, row[BASIS], row[MACHINE]].append(row)
    if not groups:
        return None
    found = []
    for (direction, group, mask, basis, machine), of_group in groups.items():
        ratios = [row["ratio"] for row in of_group]
        winners = [row["faster"] for row in of_group]
        peers = Counter(row["peer"] for row in of_group)
        found.append({
            "direction": direction, "group": group, "mask": mask, "rows": len(of_group),
            "least": min(ratios), "median": statistics.median(ratios), "most": max(ratios),
            "least_probability": min(row["probability"] for row in of_group),
            OURS: winners.count(OURS), "open": winners.count("open"),
            "theirs": len(winners) - winners.count(OURS) - winners.count("open"),
            "peers": ", ".join(f"{name} {count}" for name, count in peers.most_common()),
            BASIS: basis, MACHINE: machine,
        })  # fmt: skip
    columns = (
        Column("direction"), Column("group"), Column("mask"), Column("rows"),
        Column("least", format=".2f"), Column("median", format=".2f"),
        Column("most", format=".2f"),
        Column("least_probability", format=".0%", title="least probability"),
        Column(OURS, title="ours ahead"), Column("open"), Column("theirs", title="peer ahead"),
        Column("peers", title="best peer, in how many rows"),
    )  # fmt: skip
    note = (
        f"Ahead: with a probability of {LIKELY:.0%} or more; open: neither is. Ratios, probability "
        "and best peer are those of the table of all rows."
    )
    plot = Plot(("direction", "group", "mask"), "median", low="least", high="most")
    title = "Ours over the best peer, ratios of rates"
    return Table("throughput", title, columns, found, (note,), plot)


def times_of(row: dict[str, Any], case: Case, direction: str) -> dict[str, Any]:
    """Return a measured row's microseconds of ours and of the best peer, the rate at which ours
    takes in K and V if each is read once, and power; None where it is not known."""
    details = row["details"]
    ours, peer = (details.get(name, {}) for name in (OURS, row["peer"]))
    milliseconds = ours.get("median_ms")
    rate = None
    if milliseconds and direction == FORWARD:
        rate = case.kv_elements * ELEMENT_BYTES / milliseconds / 1e9
    us = (None if t is None else 1e3 * t for t in (milliseconds, peer.get("median_ms")))
    names = "us", "peer_us", "kv_rate", "power_watts"
    return dict(zip(names, (*us, rate, ours.get("power_watts")), strict=True))


def _notes(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    measured = rows[0][BASIS] == "measured"
    samples = (
        "turns of the interleaved runs"
        if measured
        else (
            "sets of the model's constants that published rates do not contradict, the same set "
            "for all"
        )
    )
    notes = [
        "Best peer: the provider with the least time on average, ours and PyTorch's math aside. "
        "Ratio: the fastest peer's time over ours, the median with a tenth of the samples below "
        f'"low" and a tenth above "high"; samples are {samples}. Probability: that ours is '
        'faster than every peer; gain: by how much on average. "faster" names who is ahead with '
        f'{LIKELY:.0%}, "open" where nobody is. FLOP: 4 Sq Sk D a head, half if causal, visible '
        "pairs with a window or other lengths; backward 2.5 times that. Peak: dense bf16 at the "
        "clock recorded."
    ]
    if not measured:
        notes.append(
            "A modelled probability also counts what the model may be off under any set of "
            f"constants, by class ({stated_errors()}). TFLOPS and the first ratio: of a burst, a "
            "few launches on a GPU at rest; sustained: when the clock has given way to the power "
            "that the products need (docs/timing.md)."
        )
        if _has_published(rows):
            notes.append(
                f"{AS_PUBLISHED}: its highest published rate of the same call on such a GPU at a "
                "clock of its own, which the model has not replayed; a peer like the others but "
                "under lasting load. The rows behind it are in docs/tables/validate_published.md."
            )
        notes.append(path_note("the replays behind a row, ours / the best peer's"))
    reasons: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows:
        for name, found in row["details"].items():
            if found["status"] != "ok" and (name != AS_PUBLISHED or _has_published(rows)):
                reasons[name, found["status"]] += 1
    for (name, reason), count in reasons.items():
        notes.append(f"{name}: {count} of {len(rows)} not run: {reason}.")
    return tuple(notes)


def chosen_providers(names: list[str] | None, is_measured: bool = False) -> list[Provider]:
    """Return the providers of these names, None for all, but for the one whose runs take longer
    than all others' if time is measured."""
    known = default_providers()
    if not names:
        return [one for one in known if not (is_measured and one.name == YARDSTICK)]
    return [one for one in known if one.name in names]


def main(arguments: argparse.Namespace) -> int:
    """Exit status 1 if ours was run and broke, or was wrong."""
    limit = TimeLimit(arguments.within)
    directions = [arguments.direction] if arguments.direction else list(DIRECTIONS)
    cases = [(case, direction) for direction in directions for case in suite.selected(arguments)]
    is_measured = torch.cuda.is_available() and not arguments.modelled
    providers = chosen_providers(arguments.provider, is_measured)
    names = tuple(provider.name for provider in providers)
    if is_measured:
        columns = columns_of(names, "measured")
        begun = _measured(arguments, cases, providers, limit)
        rows = ready(begun, len(cases), columns, "measuring")
    else:
        columns = columns_of(names, "modelled")
        all_rows = Predictions(names, arguments.machine, arguments.draws).all(cases, arguments.jobs)
        found = results(all_rows, len(cases), columns, lambda numbered: [numbered[1]])
        rows = [row for _, row in sorted(found, key=lambda numbered: numbered[0])]
    tables = limit.noted(table(rows)), summary(rows)
    emit([found for found in tables if found], arguments)
    return 1 if any(row["details"][OURS].get("failed") for row in rows) else 0


def _measured(
    arguments: argparse.Namespace,
    cases: Sequence[tuple[Case, str]],
    providers: Sequence[Provider],
    limit: TimeLimit,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each case that begins in time."""
    sampling = Sampling(arguments.warmup, arguments.runs)
    timer, dtype = CudaTimer(l2=arguments.l2), DTYPES[arguments.dtype]
    rows = measured_rows(limit.begun(cases), providers, timer, sampling, dtype)
    for row, (case, direction) in zip(rows, cases, strict=False):  # the last may be left out
        yield row | times_of(row, case, direction) | {"l2": arguments.l2}
