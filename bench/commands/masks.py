"""`python -m bench masks`: forward and backward under masks, and with score_mods, that people train
with.

Ours with `block_mask=`, or with `score_mod=`, beside what training takes without it: SDPA with a
dense mask or bias, and FlexAttention; ours under the causal mask alone says how fast it may get,
and ours with the mask_mod evaluated in the kernels what bits spare. Needs a CUDA GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from bench.measure.mask_providers import (
    FLEX,
    SDPA,
    DenseSdpa,
    FlexAttention,
    mask_microseconds,
    mask_providers,
)
from bench.measure.masks import CASES, PACKED_CASES, MaskedCase
from bench.measure.providers import Provider, attempt
from bench.measure.scored import SCORED_CASES, ScoredCase
from bench.measure.settings import Sampling
from bench.measure.throughput import measured_row
from bench.measure.time_limit import TimeLimit
from bench.measure.timer import CudaTimer
from bench.peers import flash_attn_4
from bench.suite import BACKWARD, DIRECTIONS
from bench.tables.comparison import BOUND, FUNCTION, OURS, SOFTCAP
from bench.tables.ready import ready
from bench.tables.results import emit
from bench.tables.table import Column, Plot, Table

#: Columns: of milliseconds of each provider, of rates, of times over ours.
TIMES = {
    OURS: "ours_ms", FUNCTION: "function_ms", SOFTCAP: "softcap_ms", BOUND: "causal_ms",
    SDPA: "sdpa_ms", FLEX: "flex_ms", flash_attn_4.PACKAGE: "flash_attn_4_ms",
}  # fmt: skip
RATES = OURS, BOUND
RATIOS = {
    FUNCTION: "function_ratio", SDPA: "sdpa_ratio", FLEX: "flex_ratio",
    flash_attn_4.PACKAGE: "flash_attn_4_ratio",
}  # fmt: skip

#: A mask, or a score_mod.
AnyCase = MaskedCase | ScoredCase

COLUMNS = (
    Column("direction"), Column("shape"), Column("heads"), Column("mask"),
    Column("visible", format=".1%", title="pairs seen"),
    *(Column(column, "ms", ".3f", name) for name, column in TIMES.items()),
    *(Column(column, "", ".2f", f"{name} / ours") for name, column in RATIOS.items()),
    *(Column(name, "TFLOPS", ".0f", name) for name in RATES),
    Column("of_peak", format=".1%", title="ours, of peak"),
    Column("mask_us", "us", ".0f", "making the mask"),
    Column("clock_mhz", "MHz", ".0f", "clock"), Column("power_watts", "W", ".0f", "power"),
    Column("runs"), Column("remarks"),
)  # fmt: skip

NOTES = (
    "FLOP: 4 x 256 a head for each pair of a query and a key that it sees, backward 2.5 times "
    f"that; of \"{BOUND}\" those of the causal mask. Times: medians of interleaved runs, with a "
    "cold L2; \"runs\" says how many. Making the mask: on the host's clock, from its name to bits "
    "and lists of steps, with those of the backward in rows of it; once for all layers, and in no "
    "other column.",
    f"{SDPA}: a bool mask that is there before, KV heads repeated as transformers does where there "
    "is a mask. FlexAttention: compiled for the shape, its BlockMask made before.",
    f"Rows of score_mods, causal: ours with score_mod=, in CuTe DSL; {SDPA}: a bias of "
    f"bfloat16 that is there before. {SOFTCAP} and {flash_attn_4.PACKAGE}: the option softcap= in "
    "the place of the function.",
    "Packed rows: sequences of which each query sees keys that an indexer chose, as packed bits; "
    "ours and FlexAttention as one dense row that the mask keeps apart, ours with mask_mod= and "
    f"{flash_attn_4.PACKAGE}, which has no lists of tiles, as packed sequences. Making the mask: "
    "of a layer, from its bits, within the mask of the batch, made before.",
)  # fmt: skip


def measure(
    cases: Iterable[tuple[AnyCase, str]], providers: Sequence[Provider], timer: CudaTimer,
    sampling: Sampling, total: int | None = None,
) -> Table:  # fmt: skip
    """Every (case, direction) on the timer's GPU; results are checked before. total: how many
    there are, None if nobody knows."""
    rows = (_row(case, direction, providers, timer, sampling) for case, direction in cases)
    plot = Plot(("shape", "heads", "mask"), tuple(TIMES.values()), panel="direction")
    title = "Attention under masks at head_dim 256"
    return Table("masks", title, COLUMNS, ready(rows, total, COLUMNS, "measuring"), NOTES, plot)


def _row(
    case: AnyCase, direction: str, providers: Sequence[Provider], timer: CudaTimer,
    sampling: Sampling,
) -> dict[str, Any]:  # fmt: skip
    chosen = [provider for provider in providers if provider.concerns(case)]
    row = measured_row((case, direction), chosen, timer, sampling)
    details, remarks = row["details"], [*_remarks(row["details"], chosen)]
    microseconds = None
    if isinstance(case, MaskedCase):
        making = partial(mask_microseconds, case, timer.device, direction == BACKWARD)
        microseconds, failed = attempt(making)
        remarks += [f"the mask by itself: {failed}"] if failed else []
    times = {name: details.get(name, {}).get("median_ms") for name in TIMES}
    ours = details.get(OURS, {})
    return row | {
        "visible": case.pairs / sum(queries * keys for queries, keys in case.lengths),
        **{column: times[name] for name, column in TIMES.items()},
        **{
            column: times[name] / times[OURS] if times[name] and times[OURS] else None
            for name, column in RATIOS.items()
        },
        **{name: row.get(name) for name in RATES},
        "power_watts": ours.get("power_watts"), "runs": ours.get("runs"),
        "mask_us": microseconds, "remarks": "; ".join(remarks) or None,
    }  # fmt: skip


def _remarks(details: dict[str, dict[str, Any]], providers: Sequence[Provider]) -> Iterable[str]:
    for provider in providers:
        status = details[provider.name]["status"]
        if status != "ok":
            yield f"{provider.name}: {status}"
        elif isinstance(provider, DenseSdpa) and provider.backend:
            yield f"{provider.name}: {provider.backend}"
        elif isinstance(provider, FlexAttention) and provider.failure:
            yield f"{provider.name}: with {provider.options}; without, {provider.failure}"


def chosen(only: str, names: Sequence[str] | None) -> tuple[list[AnyCase], list[Provider]]:
    """Cases with `only` in their line, providers of these names, None for all. Raises ValueError
    for a text that is in none."""
    known_cases: tuple[AnyCase, ...] = CASES + PACKED_CASES + SCORED_CASES
    cases = [case for case in known_cases if only in str(case)]
    if not cases:
        lines = "; ".join(map(str, known_cases))
        raise ValueError(f"no case has {only!r} in its line; there are {lines}")
    return cases, [one for one in mask_providers() if not names or one.name in names]


def main(arguments: argparse.Namespace) -> int:
    """Exit status 1 if ours was run and broke, or was wrong."""
    limit = TimeLimit(arguments.within)
    cases, providers = chosen(arguments.only, arguments.provider)
    sampling = Sampling(arguments.warmup, arguments.runs, arguments.seconds)
    directions = [arguments.direction] if arguments.direction else DIRECTIONS
    jobs = [(case, direction) for direction in directions for case in cases]
    table = measure(limit.begun(jobs), providers, CudaTimer(), sampling, len(jobs))
    emit(limit.noted(table), arguments)
    failed = (row["details"].get(OURS, {}).get("failed") for row in table.rows)
    return 1 if any(failed) else 0
