"""`python -m bench simulator`: the speed of the simulator itself on the forward kernel."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import asdict, dataclass

import numpy as np
import torch

import sm100_sim
from fa4_hd256.backends import run_forward
from fa4_hd256.compile import compile_forward
from fa4_hd256.config import HEAD_DIM, ForwardConfig
from fa4_hd256.problem import Options, Problem


@dataclass(frozen=True)
class Shape:
    """Full attention, batch 1."""

    seqlen: int
    heads: int
    heads_kv: int


DEFAULT = Shape(2048, 2, 1)


@dataclass(frozen=True)
class Measurement:
    """seconds: the fastest of `runs` warm runs; first_seconds: the first one of the process, with
    the translation of the kernel. floor_seconds: the same matrix products in float32 by numpy.
    """

    shape: Shape
    runs: int
    first_seconds: float
    seconds: float
    warp_instructions: int
    floor_seconds: float
    peak_memory_bytes: int
    cores: int

    @property
    def instructions_per_second(self) -> float:
        return self.warp_instructions / self.seconds

    @property
    def ratio_to_floor(self) -> float:
        return self.seconds / self.floor_seconds


def measure(shape: Shape = DEFAULT, runs: int = 3) -> Measurement:
    """Run the forward once cold and `runs` times warm."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, shape.seqlen, heads, HEAD_DIM, generator=generator).bfloat16()
        for heads in (shape.heads, shape.heads_kv, shape.heads_kv)
    )
    config = ForwardConfig()
    problem = Problem.describe(
        (q, k, v), Options.check(None, False, (None, None), 0.0, False)
    )
    compiled = compile_forward(config, problem.problem_class)
    times = []
    for _ in range(1 + runs):
        start = time.perf_counter()
        run_forward(compiled, problem, (q, k, v))
        times.append(time.perf_counter() - start)
    report = sm100_sim.last_reports()[-1]
    return Measurement(
        shape=shape,
        runs=runs,
        first_seconds=times[0],
        seconds=min(times[1:]),
        warp_instructions=sum(counts["warps"] for counts in report.instructions.values()),
        floor_seconds=_steps(shape, config) * _step_floor(config),
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        cores=len(os.sched_getaffinity(0)),
    )


def _steps(shape: Shape, config: ForwardConfig) -> int:
    """Steps of tile_q queries x block_kv keys of full attention."""
    tiles, keys = (-(-shape.seqlen // size) for size in (config.tile_q, config.block_kv))
    return shape.heads * tiles * keys


def _step_floor(config: ForwardConfig, repeats: int = 20) -> float:
    """Seconds of the two float32 products of one step; the median of `repeats`."""
    q = np.ones((config.tile_q, HEAD_DIM), np.float32)
    kv = np.ones((config.block_kv, HEAD_DIM), np.float32)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        (q @ kv.T) @ kv
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]


def as_json(found: Measurement) -> dict:
    """All figures as JSON values; `kind` says that they were measured, and on what."""
    return {
        **asdict(found),
        "instructions_per_second": found.instructions_per_second,
        "ratio_to_floor": found.ratio_to_floor,
        "kind": "measured",
        "on": f"CPU, {found.cores} cores",
    }


def as_text(found: Measurement) -> str:
    """The figures as the command prints them."""
    shape = found.shape
    return "\n".join(
        [
            f"forward, full attention, batch 1, heads {shape.heads}/{shape.heads_kv}, seqlen "
            f"{shape.seqlen}; measured on {found.cores} cores",
            f"  first run     {found.first_seconds:8.2f} s, with the translation of the kernel",
            f"  run           {found.seconds:8.2f} s, the fastest of {found.runs}",
            f"  instructions  {found.warp_instructions / 1e6:8.2f} M of warps, "
            f"{found.instructions_per_second / 1e6:.2f} M/s "
            f"({found.instructions_per_second * 32 / 1e6:.0f} M/s of lanes)",
            f"  floor         {found.floor_seconds:8.2f} s of float32 products; the run takes "
            f"{found.ratio_to_floor:.1f} times that",
            f"  peak memory   {found.peak_memory_bytes / 2**30:8.2f} GiB",
        ]
    )
