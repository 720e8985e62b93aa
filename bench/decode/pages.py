"""Keys and values in pages, beside the same call without, timed interleaved on a GPU.

Decoding steps and a few queries at once on long sequences. Pages of 16 and of 128 rows: boxes of
TMA are no larger than a page, so that small pages take more instructions for the same bytes;
flash-attn-4 stands beside ours. Pages of fewer rows, beside pages of 64, in bf16 and in e4m3: rows
are gathered.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bench.decode.kv_types import BF16, BYTES, E4M3
from bench.decode.variants import measured_variants
from bench.measure.providers import FlashAttention4, Inputs, Ours, Provider
from bench.measure.timer import Sampling, Timer
from bench.peers.flash_attn_4 import PACKAGE
from bench.suite import Case
from bench.tables.comparison import OURS
from bench.tables.table import Column, Plot, Table

#: Rows of a page, the first those that others are compared with; None: in no pages.
SIZES: tuple[int | None, ...] = (None, 128, 16)
SMALL_SIZES: tuple[int | None, ...] = (64, 8, 4, 2, 1)


@dataclass(frozen=True)
class CacheCase(Case):
    """A `Case` over a cache of a type: `BF16` or `E4M3`."""

    kv_type: str = field(kw_only=True)

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.kv_type}"


def default_cases() -> list[Case]:
    """Return (batch, queries, keys), heads of Qwen3.5."""
    return [
        Case("pages", ((queries, keys),) * batch, 32, 2, True)
        for batch in (1, 128)
        for keys in (8192, 131072)
        for queries in (1, 2, 4)
    ]


def small_cases() -> list[CacheCase]:
    """Return (batch, queries, keys) over caches of both types, heads of Qwen3.5. Each size has rows
    of its own, so that more than 64 of the long sequences have no room on an H200."""
    return [
        CacheCase("small pages", ((queries, keys),) * batch, 32, 2, True, kv_type=kv_type)
        for batch in (1, 64)
        for keys in (8192, 131072)
        for queries in (1, 4)
        for kv_type in BYTES
    ]


def measured(case: Case, timer: Timer, sampling: Sampling) -> dict[str, Any]:
    """Return a row of the timer's GPU, flash-attn-4 in pages of each of the sizes beside ours."""
    return _row(case, _timed(case, (Ours(), FlashAttention4()), SIZES, timer, sampling), SIZES)


def measured_small(case: Case, timer: Timer, sampling: Sampling) -> dict[str, Any]:
    """Return a row of ours in pages of few rows. case: a `CacheCase`."""
    assert isinstance(case, CacheCase)
    row = _row(case, _timed(case, (Ours(),), SMALL_SIZES, timer, sampling), SMALL_SIZES)
    return row | {"kv_type": case.kv_type}


def _row(case: Case, found: dict[str, Any], sizes: tuple[int | None, ...]) -> dict[str, Any]:
    """found: of `_timed`."""
    times, reasons = found.pop("times"), found.pop("reasons")
    whole = times.get((OURS, sizes[0]))
    row: dict[str, Any] = {
        "group": case.group, "shape": case.shape, "heads": case.heads_text,
        "rate": whole and case.kv_elements * BYTES[_type_of(case)] / whole[1] / 1e12,
        "refused": "; ".join(sorted({f"{name}: {why}" for (name, _), why in reasons.items()})),
        "failed": any(name == OURS for name, _ in reasons),
    }  # fmt: skip
    for size in sizes:
        ours, theirs = (times.get((name, size)) for name in (OURS, PACKAGE))
        name = name_of(size)
        row[name] = ours and ours[1] * 1e6
        row[f"range_{name}"] = ours and f"{ours[0] * 1e6:.1f}..{ours[2] * 1e6:.1f}"
        row[f"theirs_{name}"] = theirs and theirs[1] * 1e6
        if size != sizes[0]:
            row[f"behind_{size}"] = ours and whole and ours[1] / whole[1] - 1
    return row | found


def _type_of(case: Case) -> str:
    """Return the type of a case's keys and values."""
    return case.kv_type if isinstance(case, CacheCase) else BF16


def _timed(
    case: Case,
    providers: tuple[Provider, ...],
    sizes: tuple[int | None, ...],
    timer: Timer,
    sampling: Sampling,
) -> dict[str, Any]:
    """`measured_variants` of one case in pages of each size, None for keys in no pages, by
    (provider, size)."""
    whole = Inputs.random(case, timer.device, torch.bfloat16)
    if _type_of(case) == E4M3:
        whole.k, whole.v = (tensor.to(torch.float8_e4m3fn) for tensor in (whole.k, whole.v))
    # All read the same pages: a cache of a GPU's size has no room for copies.
    of_sizes = {size: replace(whole, case=replace(case, page_size=size)) for size in sizes}
    variants = {
        (provider.name, size): (provider, inputs)
        for size, inputs in of_sizes.items() for provider in providers
    }  # fmt: skip
    found = measured_variants(variants, (OURS, sizes[0]), timer, sampling)
    del variants, of_sizes, whole
    gc.collect()
    timer.release_memory()
    return found


def name_of(size: int | None) -> str:
    """Return the column of a size."""
    return "none" if size is None else f"pages_{size}"


def title_of(size: int | None) -> str:
    """Name a size in a heading."""
    return "no pages" if size is None else f"pages of {size}"


def _behind_columns(sizes: tuple[int | None, ...]) -> tuple[Column, ...]:
    base = "none" if sizes[0] is None else sizes[0]
    return tuple(
        Column(f"behind_{size}", format="+.1%", title=f"{title_of(size)} over {base}")
        for size in sizes[1:]
    )


def _columns(sizes: tuple[int | None, ...], theirs: tuple[Column, ...] = ()) -> tuple[Column, ...]:
    return (
        Column("shape"), Column("heads"),
        *(column for size in sizes for column in (
            Column(name_of(size), "us", ".1f", title_of(size)),
            Column(f"range_{name_of(size)}", title="p20..p80"),
        )),
        *_behind_columns(sizes),
        *theirs,
        Column("rate", "TB/s", ".2f", f"K and V once, {title_of(sizes[0])}"),
        Column("clock_mhz", "MHz", ".0f", "clock"), Column("power_watts", "W", ".0f", "power"),
    )  # fmt: skip


BEHIND_COLUMNS = _behind_columns(SIZES)
COLUMNS = _columns(
    SIZES,
    tuple(
        Column(f"theirs_{name_of(size)}", "us", ".1f", f"{PACKAGE}, {title_of(size)}")
        for size in SIZES
    ),
)
_SHAPE, _HEADS, *_OTHERS = _columns(SMALL_SIZES)
SMALL_COLUMNS = (_SHAPE, _HEADS, Column("kv_type", title="k, v"), *_OTHERS)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Tabulate rows of `measured`."""
    return compared(COLUMNS, rows, _notes(rows))


def small_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Tabulate rows of `measured_small`."""
    return compared(
        SMALL_COLUMNS, rows, _notes(rows), SMALL_SIZES, "Keys and values in pages of few rows"
    )


def _notes(rows: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    reasons = sorted({row["refused"] for row in rows} - {""})
    return (
        "Medians; all of a row interleaved, results checked, L2 overwritten before each "
        "launch. Page numbers are in an order by chance.",
        *(f"Not run: {reason}." for reason in reasons),
    )


def compared(
    columns: tuple[Column, ...],
    rows: Sequence[dict[str, Any]],
    notes: tuple[str, ...],
    sizes: tuple[int | None, ...] = SIZES,
    title: str = "Keys and values in pages, forward, bf16",
) -> Table:
    """All sizes side by side."""
    plot = Plot(("shape", "heads"), tuple(map(name_of, sizes)))
    return Table("decode", title, columns, list(rows), notes, plot)
