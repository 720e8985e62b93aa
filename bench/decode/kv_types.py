"""Decoding over keys and values in e4m3 beside the same in bf16, timed interleaved on a GPU.

Both caches hold the same numbers, those that e4m3 has, so that both results are compared with the
same float64 attention before anything is timed.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from bench.decode.variants import measured_variants
from bench.measure.providers import Inputs, Ours
from bench.measure.timer import Sampling, Timer
from bench.suite import Case
from bench.tables.table import Column, Plot, Table
from fa4_hd256.kernels.limits import ELEMENT_BYTES

E4M3, BF16 = "e4m3", "bf16"
#: Bytes of an element, by type of K and V.
BYTES = {BF16: ELEMENT_BYTES, E4M3: 1}


def default_cases() -> list[Case]:
    """Sequences, keys, heads: those of the decode tables."""
    shapes = ((128, 131072, (32, 2)), (1, 131072, (32, 2)), (8, 8192, (16, 2)))
    return [
        Case("decode", ((queries, keys),) * batch, *heads, True)
        for batch, keys, heads in shapes for queries in (1, 2, 4)
    ]  # fmt: skip


def measured(case: Case, timer: Timer, sampling: Sampling) -> dict[str, Any]:
    """A row of the timer's GPU."""
    of_bf16, of_e4m3 = _inputs(case, timer.device)
    variants = {BF16: (Ours(), of_bf16), E4M3: (Ours(), of_e4m3)}
    found = measured_variants(variants, E4M3, timer, sampling)
    del variants, of_bf16, of_e4m3
    gc.collect()
    timer.release_memory()
    times, reasons = found.pop("times"), found.pop("reasons")
    row = {"group": case.group, "shape": case.shape, "heads": case.heads_text, "ratio": None}
    for kind, nbytes in BYTES.items():
        of_kind = times.get(kind)
        row[kind] = of_kind and of_kind[1] * 1e6
        row[f"range_{kind}"] = of_kind and f"{of_kind[0] * 1e6:.1f}..{of_kind[2] * 1e6:.1f}"
        row[f"rate_{kind}"] = of_kind and case.kv_elements * nbytes / of_kind[1] / 1e12
    if len(times) == len(BYTES):
        row["ratio"] = times[BF16][1] / times[E4M3][1]
    refused = "; ".join(f"{kind}: {why}" for kind, why in sorted(reasons.items()))
    return row | {"refused": refused, "failed": bool(refused)} | found


def _inputs(case: Case, device: torch.device) -> tuple[Inputs, Inputs]:
    """Return (inputs with k and v in bf16, inputs in e4m3) of the same numbers."""
    found = Inputs.random(case, device, torch.bfloat16)
    codes = []
    for tensor in (found.k, found.v):
        codes.append(tensor.to(torch.float8_e4m3fn))
        # In place: a cache of a GPU's size has no room for a copy of all of it.
        for rows, exact in zip(tensor, codes[-1]):
            rows.copy_(exact)
    return found, replace(found, k=codes[0], v=codes[1])


RATIO = Column("ratio", format=".2f", title="tokens a second, of bf16's")
COLUMNS = (
    Column("shape"), Column("heads"),
    *(column for kind in BYTES for column in (
        Column(kind, "us", ".1f"), Column(f"range_{kind}", title="p20..p80"),
        Column(f"rate_{kind}", "TB/s", ".2f", f"K and V once, {kind}"),
    )),
    RATIO, Column("clock_mhz", "MHz", ".0f", "clock"), Column("power_watts", "W", ".0f", "power"),
)  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Tabulate rows of `measured`."""
    reasons = sorted({row["refused"] for row in rows} - {""})
    notes = (
        "Medians; both of a row interleaved, results checked, L2 overwritten before each launch. "
        "Clock and power are e4m3's.",
        *(f"Not run: {reason}." for reason in reasons),
    )
    return compared(COLUMNS, rows, notes)


def compared(
    columns: tuple[Column, ...], rows: Sequence[dict[str, Any]], notes: tuple[str, ...]
) -> Table:
    """Both types side by side."""
    title = "Decoding over K and V in e4m3 beside bf16"
    return Table("decode", title, columns, list(rows), notes, Plot(("shape",), tuple(BYTES)))
