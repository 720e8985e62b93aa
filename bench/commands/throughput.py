"""`python -m bench throughput`: forward and backward over the suite, implementations side by side.

On a CUDA GPU every provider's result is checked against the one reference, then all of them are
timed, interleaved. Without one, times are those of the timing model, of all whose kernels are
replayed.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from bench import suite
from bench.measure.providers import Ours, OursInBf16, Provider, default_providers
from bench.measure.settings import Sampling
from bench.measure.throughput import measured_row
from bench.measure.time_limit import TimeLimit
from bench.measure.timer import CudaTimer
from bench.modelled import modelled
from bench.suite import DIRECTIONS, FORWARD, Case
from bench.tables.comparison import LIKELY, OURS, YARDSTICK
from bench.tables.ready import ready
from bench.tables.results import emit
from bench.tables.table import Column, Plot, Table
from fa4_hd256.kernels.problem_class import E4M3

#: Columns of ours against its peers, in every table that has them.
STANDING_COLUMNS = (
    Column("peer", title="best peer"), Column("ratio", format=".2f", title="best peer / ours"),
    Column("ratio_low", format=".2f", title="low"),
    Column("ratio_high", format=".2f", title="high"),
    Column("probability", format=".0%"), Column("gain", format="+.0%"),
)  # fmt: skip
#: What the spread of a measured ratio is over.
SAMPLES = "turns of the interleaved runs"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": E4M3}


def table(rows: list[dict[str, Any]]) -> Table:
    """Tabulate measured rows; what did not run is listed below with its reason."""
    names = list(rows[0]["details"])
    return compared(rows, names, columns_of(names), (standing_note(SAMPLES),))


def compared(
    rows: list[dict[str, Any]],
    names: Sequence[str],
    columns: tuple[Column, ...],
    notes: tuple[str, ...],
) -> Table:
    """Providers side by side; why some did not run stands below the notes."""
    reasons = Counter(
        (name, row["details"][name]["status"])
        for row in rows
        for name in names
        if row["details"][name]["status"] != "ok"
    )
    refused = (
        f"{name}: {count} of {len(rows)} not run: {reason}."
        for (name, reason), count in reasons.items()
    )
    plot = Plot(("shape", "heads"), tuple(names), panel="panel")
    title = "Throughput at head_dim 256"
    return Table("throughput", title, columns, rows, (*notes, *refused), plot)


def rate_columns(names: Sequence[str]) -> tuple[Column, ...]:
    """Return the columns that measured and modelled rows of such providers have."""
    return (
        Column("direction"), Column("shape"), Column("heads"), Column("mask"),
        *(Column(name, "TFLOPS", ".0f", name) for name in names),
        Column("range", title="ours, range"),
        Column("of_peak", format=".1%", title="ours, of peak"),
        Column("clock_mhz", "MHz", ".0f", "clock"),
        *STANDING_COLUMNS, Column("faster"),
    )  # fmt: skip


def columns_of(names: Sequence[str]) -> tuple[Column, ...]:
    """Return the columns of measured rows with such providers."""
    return (
        *rate_columns(names),
        Column("us", "us", ".1f", "ours"), Column("peer_us", "us", ".1f", "best peer"),
        Column("kv_rate", "TB/s", ".2f", "K and V once, ours"),
        Column("power_watts", "W", ".0f", "power"), Column("l2", title="L2"),
    )  # fmt: skip


def times_of(
    row: dict[str, Any], case: Case, direction: str, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """Return a measured row's microseconds of ours and of the best peer, the rate at which ours
    takes in K and V if each is read once, and power; None where it is not known."""
    details = row["details"]
    ours, peer = (details.get(name, {}) for name in (OURS, row["peer"]))
    milliseconds = ours.get("median_ms")
    rate = None
    if milliseconds and direction == FORWARD:
        rate = case.kv_elements * dtype.itemsize / milliseconds / 1e9
    us = (None if t is None else 1e3 * t for t in (milliseconds, peer.get("median_ms")))
    names = "us", "peer_us", "kv_rate", "power_watts"
    return dict(zip(names, (*us, rate, ours.get("power_watts")), strict=True))


def standing_note(samples: str) -> str:
    """Explain the columns of ours against its peers. samples: what a ratio's spread is over."""
    return (
        "Best peer: the provider with the least time on average, ours and PyTorch's math aside. "
        "Ratio: the fastest peer's time over ours, the median with a tenth of the samples below "
        f'"low" and a tenth above "high"; samples are {samples}. Probability: that ours is '
        'faster than every peer; gain: by how much on average. "faster" names who is ahead with '
        f'{LIKELY:.0%}, "open" where nobody is. FLOP: 4 Sq Sk D a head, half if causal, visible '
        "pairs with a window or other lengths; backward 2.5 times that. Peak: dense bf16 at the "
        "clock recorded."
    )


def chosen_providers(
    names: list[str] | None, dtype: torch.dtype = torch.bfloat16
) -> list[Provider]:
    """Return the providers of these names; None for all but the one whose runs take longer than all
    others'. In e4m3, which no other offers at head_dim 256, ours is beside itself in bf16. Raises
    ValueError for a name that does not take the dtype."""
    if dtype == E4M3:
        ours: list[Provider] = [Ours(), OursInBf16()]
        if refused := set(names or ()) - {one.name for one in ours}:
            raise ValueError(
                f"{', '.join(sorted(refused))}: no q, k and v in e4m3 at head_dim 256; accepted "
                f"with --dtype e4m3: {', '.join(one.name for one in ours)}"
            )
        return [one for one in ours if not names or one.name in names]
    known = default_providers()
    return [one for one in known if (one.name in names if names else one.name != YARDSTICK)]


def main(arguments: argparse.Namespace) -> int:
    """Exit status 1 if ours was run and broke, or was wrong."""
    if arguments.modelled or not torch.cuda.is_available():
        return modelled("throughput", arguments)
    dtype = DTYPES[arguments.dtype]
    directions = [arguments.direction] if arguments.direction else list(DIRECTIONS)
    if dtype == E4M3:
        if arguments.direction not in (None, FORWARD):
            raise ValueError("--dtype e4m3 --direction backward: there are no gradients in e4m3")
        directions = [FORWARD]
    cases = [(case, direction) for direction in directions for case in suite.selected(arguments)]
    sampling = Sampling(arguments.warmup, arguments.runs)
    timer = CudaTimer(l2=arguments.l2)
    providers = chosen_providers(arguments.provider, dtype)
    limit = TimeLimit(arguments.within)
    jobs = limit.begun(cases)
    begun = (measured(job, providers, timer, sampling, dtype) for job in jobs)
    rows = ready(begun, len(cases), columns_of([one.name for one in providers]), "measuring")
    emit(limit.noted(table(rows)), arguments)
    return int(any(row["failed"] for row in rows))


def measured(
    job: tuple[Case, str], providers: Sequence[Provider], timer: CudaTimer, sampling: Sampling,
    dtype: torch.dtype,
) -> dict[str, Any]:  # fmt: skip
    """Return the row of a case and direction; `failed`: ours was run and broke, or was wrong."""
    row = measured_row(job, providers, timer, sampling, dtype)
    failed = bool(row["details"].get(OURS, {}).get("failed"))
    return row | times_of(row, *job, dtype) | {"l2": timer.l2, "failed": failed}
