"""`python -m bench simulator`: the speed of the simulator itself on the forward kernel."""

from __future__ import annotations

import argparse
import os
import resource
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

import sm100_sim
from fa4_hd256.backends import run_forward
from fa4_hd256.compile import compile_forward
from fa4_hd256.config import HEAD_DIM, ForwardConfig
from fa4_hd256.problem import Options, Problem

from .results import (
    BASIS,
    MACHINE,
    Column,
    Plot,
    Table,
    add_output_options,
    emit,
    simulator_machine,
)


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


def row(found: Measurement) -> dict[str, Any]:
    """All figures of a measurement."""
    return {
        **asdict(found.shape),
        **{name: value for name, value in asdict(found).items() if name != "shape"},
        "instructions_per_second": found.instructions_per_second,
        "ratio_to_floor": found.ratio_to_floor,
        BASIS: "measured",
        MACHINE: simulator_machine(),
    }


COLUMNS = (
    Column("seqlen"),
    Column("heads"),
    Column("heads_kv", title="KV heads"),
    Column("first_seconds", "s", ".2f", "first run"),
    Column("seconds", "s", ".2f", "fastest run"),
    Column("instructions_per_second", "1/s", ".3g", "warp instructions"),
    Column("floor_seconds", "s", ".2f", "float32 products"),
    Column("ratio_to_floor", format=".1f", title="run / products"),
    Column("peak_memory_bytes", "B", ".3g", "peak memory"),
)


def table(measurements: list[Measurement]) -> Table:
    title = "The simulator's speed on the forward, full attention, batch 1"
    rows = [row(found) for found in measurements]
    return Table("simulator", title, COLUMNS, rows, plot=Plot("seqlen", "seconds"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seqlen", type=int, default=DEFAULT.seqlen)
    parser.add_argument("--heads", type=int, default=DEFAULT.heads)
    parser.add_argument("--heads-kv", type=int, default=DEFAULT.heads_kv)
    parser.add_argument("--runs", type=int, default=3, help="warm runs; the fastest counts")
    add_output_options(parser)


def main(arguments: argparse.Namespace) -> int:
    shape = Shape(arguments.seqlen, arguments.heads, arguments.heads_kv)
    emit(table([measure(shape, arguments.runs)]), arguments)
    return 0
