"""The timing model against published rates, and against replays outside its fits; rows of them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bench.peers import flash_attn_4
from sm100_sim import timing
from sm100_sim.timing import Tile, TileCosts, load, schedule

from . import flash_attn_4 as theirs
from .backward import Backward
from .calls import Kind
from .forward import Kernel
from .published.rows import Published
from .replays import Replayed, Traced, fitted, kept, one_cluster
from .samples import Samples

DRAWS = 4
#: (M, N, K) of the GEMMs whose replays give the costs of a tile of 256 x 256.
GEMM_SAMPLES = ((256, 256, 512), (256, 256, 1024), (512, 256, 512), (512, 512, 1024))
GEMM_TILE = 256


@functools.cache
def gemm_seconds(size: int, machine_name: str) -> np.ndarray:
    """quack's bf16 GEMM (its default configuration) of size^3, for each of the drawn machines."""
    machine = load(machine_name)

    def trace() -> list[Traced]:
        from quack.gemm_interface import gemm

        found = []
        for m, n, k in GEMM_SAMPLES:
            with timing.attached(draws=0) as session, one_cluster():
                a = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
                gemm(a, torch.randn(k, n, dtype=torch.bfloat16, device="cuda"), tuned=False)
            tiles = m * n // GEMM_TILE**2
            found.append(Traced.of(session.predictions[-1], tiles))
        return found

    rows = kept((flash_attn_4.versions(), "gemm", GEMM_SAMPLES), trace, machine, DRAWS)
    # 256 x 256 x 16 takes a pair 128 clocks.
    work = size / 16 * 128
    tiles = [Tile(work, own_bytes=2.0 * GEMM_TILE**2)] * (size // GEMM_TILE) ** 2
    tiles[0] = Tile(work, own_bytes=4.0 * size**2)
    return np.array([
        schedule(tiles, costs, values, 2, "dynamic").seconds
        for costs, values in zip(fitted(rows, "dynamic"), machine.sampled(DRAWS))
    ])  # fmt: skip


def rate_row(
    case: str, published: float, tflops: np.ndarray, role: str, source: str
) -> dict[str, Any]:
    return {
        "case": case,
        "clock": None,
        "published": published,
        "modelled": float(tflops[0]),
        "low": float(tflops.min()),
        "high": float(tflops.max()),
        "error": float(tflops[0] / published - 1),
        "role": role,
        "source": source,
    }


def _theirs(row: Published, machine_name: str) -> Kernel | Backward:
    variant = theirs.Variant(Kind(row.causal), row.head_dim)
    return getattr(theirs.FlashAttention4(), row.direction)(variant, load(machine_name), DRAWS)


def attention_rows(
    published: Iterable[Published], machine_name: str
) -> Iterator[dict[str, Any]]:
    kernels: dict[tuple, Kernel | Backward] = {}
    for row in published:
        key = row.head_dim, row.causal, row.direction
        if key not in kernels:
            print(f"replaying {row.direction}, {row.case}", file=sys.stderr, flush=True)
            kernels[key] = _theirs(row, machine_name)
        kernel = kernels[key]
        if row.clock.ghz:
            locked = [values._replace(clock_ghz=row.clock.ghz) for values in kernel.values]
            kernel = replace(kernel, values=locked)
        found = rate_row(row.case, row.tflops, kernel.tflops(row.problem), row.role, row.source)
        yield {**found, "clock": row.clock.ghz}


def held_out_rows(
    name: str, costs: TileCosts, outside: tuple[Samples, list[Replayed]], step: float
) -> Iterator[dict[str, Any]]:
    """outside: samples and their replays. step: clocks of the tensor core in a step."""
    for (seqlen, _, left), run in zip(*outside, strict=True):
        clocks = costs.begin + costs.each * run.tiles
        clocks += costs.rate * run.work + costs.mask * run.masked
        yield {
            "kernel": name, "seqlen": seqlen, "window": f"({left}, 0)", "tiles": run.tiles,
            "steps": run.work / step, "masked": run.masked / step,
            "replayed": run.clocks[0], "predicted": clocks, "error": clocks / run.clocks[0] - 1,
        }  # fmt: skip
