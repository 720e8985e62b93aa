"""A decoding step by `flash_attn_with_kvcache` over a cache in pages, with and without new rows to
be written, with their rotary embedding, and with a cache in e4m3.

Steps are CUDA graphs of several calls, timed interleaved, with what the call before left in L2, as
that of one layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.measure.providers import Inputs, Pages
from bench.measure.settings import Sampling
from bench.measure.timer import CudaTimer, interleave
from bench.suite import Case
from bench.tables.table import BASIS, MACHINE, Column, Table
from fa4_hd256 import flash_attn_with_kvcache
from fa4_hd256.kernels.limits import HEAD_DIM

#: Sequences, and keys of each.
SHAPES = (4, 1024), (8, 8192), (32, 8192), (128, 8192)
HEADS, HEADS_KV, PAGE_ROWS, ROTARY_COLUMNS = 16, 2, 16, 64
#: Calls of a graph.
CALLS = 20

NONE, ROWS, ROTATED, E4M3, E4M3_ROWS = (
    "no new rows", "new rows", "with rotary embedding", "no new rows, e4m3", "new rows, e4m3",
)  # fmt: skip
COLUMNS = (
    Column("shape"),
    *(Column(kind, "us", ".2f") for kind in (NONE, ROWS, ROTATED, E4M3, E4M3_ROWS)),
    Column("clock_mhz", "MHz", ".0f", "clock"),
)


def default_cases() -> list[Case]:
    """Return one query of each sequence."""
    return [Case("decode", ((1, keys),) * batch, HEADS, HEADS_KV, True) for batch, keys in SHAPES]


def calls_of(case: Case, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Return, by kind, calls of one query per sequence. The last of the keys is the new row."""
    batch, keys = case.batch, case.seqlen_k
    inputs = Inputs.random(case, device, torch.bfloat16)
    pages = Pages.of(inputs.k, inputs.v, PAGE_ROWS, torch.Generator().manual_seed(0))
    caches = [pages.k, pages.v]
    codes = [cache.to(torch.float8_e4m3fn) for cache in caches]
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    k, v = (normal(batch, 1, HEADS_KV, HEAD_DIM, dtype=torch.bfloat16) for _ in "kv")
    tables = {
        name: normal(keys, ROTARY_COLUMNS // 2, dtype=torch.float32)
        for name in ("rotary_cos", "rotary_sin")
    }
    scales = {
        name: torch.ones(batch, HEADS_KV, device=device) for name in ("k_descale", "v_descale")
    }
    before = pages.lengths - 1
    function: Callable[..., Any] = flash_attn_with_kvcache

    def call(stored: list[torch.Tensor], writes: bool, **options: Any) -> Callable[[], Any]:
        new, lengths = ((k, v), before) if writes else ((None, None), pages.lengths)
        return lambda: function(
            inputs.q, *stored, *new, cache_seqlens=lengths, page_table=pages.table, causal=True,
            **options,
        )  # fmt: skip

    return {
        NONE: call(caches, False),
        ROWS: call(caches, True),
        ROTATED: call(caches, True, **tables),
        E4M3: call(codes, False, **scales),
        E4M3_ROWS: call(codes, True, **scales),
    }


def _several(call: Callable[[], Any]) -> None:
    for _ in range(CALLS):
        call()


@torch.no_grad()
def measured(case: Case, timer: CudaTimer, sampling: Sampling) -> dict[str, Any]:
    name = f"{case.batch} x {case.seqlen_k:,}"
    calls: dict[str, Callable[[], Any]] = {
        kind: functools.partial(_several, call)
        for kind, call in calls_of(case, timer.device).items()
    }
    found = interleave(timer, calls, sampling)
    row = {kind: samples.quantile(0.5) / CALLS * 1e6 for kind, samples in found.items()}
    state = found[ROWS].median_state()
    timer.release_memory()
    return row | {
        "shape": name, "failed": False, "clock_mhz": state.clock_mhz,
        BASIS: "measured", MACHINE: timer.gpu.text,
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> Table:
    notes = (
        f"Sequences x keys, a query and a new row each, heads {HEADS}/{HEADS_KV}, pages of "
        f"{PAGE_ROWS} rows in no order; median of a call among {CALLS} of a CUDA graph. Rotary "
        f"embedding is of {ROTARY_COLUMNS} columns.",
    )
    return Table("decode", "New rows of a cache of keys and values", COLUMNS, list(rows), notes)
