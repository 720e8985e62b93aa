"""`python -m lab simulator`: the speed of the simulator itself on the forward kernel, and what
kernels take to translate (`sm100_sim.tools.speed` on ours)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from bench.tables.origin import simulator_machine
from bench.tables.ready import ready
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from fa4_hd256 import BackwardConfig, ForwardConfig
from fa4_hd256.call.forward_problem import Problem
from fa4_hd256.call.options import Options
from fa4_hd256.check.single_kernels import launch_forward
from fa4_hd256.kernels.limits import HEAD_DIM
from fa4_hd256.kernels.problem_class import GradientClass, ProblemClass
from fa4_hd256.run.catalogue import KernelSpec
from fa4_hd256.run.compile import compile_kernel
from fa4_hd256.softmax_emu.pattern import Ex2Pattern
from sm100_sim.tools import speed


@dataclass(frozen=True)
class Shape:
    """Full attention, batch 1."""

    seqlen: int
    heads: int
    heads_kv: int


#: Shapes measured by default, with the number of warm runs of each.
DEFAULTS = {Shape(2048, 2, 1): 3, Shape(8192, 2, 1): 1, Shape(32768, 1, 1): 0}


def row(shape: Shape, runs: int = 3) -> dict[str, Any]:
    """All figures of a shape; the floor is that of the same matrix products in float32 by numpy.

    Raises ValueError for a negative number of runs.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, shape.seqlen, heads, HEAD_DIM, generator=generator).bfloat16()
        for heads in (shape.heads, shape.heads_kv, shape.heads_kv)
    )
    config = ForwardConfig()
    options = Options.check(None, False, (None, None), 0.0, False)
    tensors = q, k, v
    problem = Problem.describe(tensors, options, config=config)
    compile_kernel(KernelSpec("forward", config, problem.problem_class))
    found = speed.measure(lambda: launch_forward(problem, tensors), runs)
    products = steps(shape, config) * _step_seconds(config)
    return {
        **asdict(shape),
        **{name: value for name, value in asdict(found).items() if name != "spent"},
        **found.spent,
        "product_seconds": products,
        "instructions_per_second": found.instructions_per_second,
        "floor_seconds": products / found.cores,
        "cpu_ratio_to_floor": found.cpu_seconds / products,
        "ratio_to_floor": found.seconds * found.cores / products,
        "sanitized_ratio": found.sanitized_ratio,
        BASIS: "measured",
        MACHINE: simulator_machine(),
    }


def steps(shape: Shape, config: ForwardConfig) -> int:
    """Steps of tile_q queries x block_kv keys of full attention."""
    tiles, keys = (-(-shape.seqlen // size) for size in (config.tile_q, config.block_kv))
    return shape.heads * tiles * keys


def _step_seconds(config: ForwardConfig) -> float:
    """Processor time of one step's two float32 products."""
    q = np.ones((config.tile_q, HEAD_DIM), np.float32)
    kv = np.ones((config.block_kv, HEAD_DIM), np.float32)
    return speed.work_seconds(lambda: (q @ kv.T) @ kv)


COLUMNS = (
    Column("seqlen"),
    Column("heads"),
    Column("heads_kv", title="KV heads"),
    Column("first_seconds", "s", ".2f", "first run"),
    Column("seconds", "s", ".2f", "fastest run"),
    Column("instructions_per_second", "1/s", ".3g", "warp instructions"),
    Column("floor_seconds", "s", ".2f", "float32 products"),
    Column("ratio_to_floor", format=".1f", title="run / products"),
    Column("cpu_seconds", "s", ".2f", "processor time"),
    Column("cpu_ratio_to_floor", format=".1f", title="the same by processor time"),
    *(Column(part, "s", ".2f") for part in speed.PARTS),
    Column("sanitized_ratio", format=".1f", title="sanitized / plain, by processor time"),
    Column("threads"),
    Column("peak_memory_bytes", "B", ".3g", "peak memory"),
)


NOTE = (
    "Fastest run: of the warm ones; the first one where there are none. float32 products: alone, "
    "all cores sharing them. Products to python: the run's processor time by what it was spent on."
)


def table(rows: list[dict[str, Any]]) -> Table:
    title = "The simulator's speed on the forward, full attention, batch 1"
    return Table("simulator", title, COLUMNS, rows, (NOTE,), Plot("seqlen", "seconds"))


TRANSLATION_COLUMNS = (
    Column("kernel"),
    Column("instructions", title="PTX instructions"),
    Column("parse_seconds", "s", ".2f", "parse"),
    Column("seconds", "s", ".2f", "translate"),
    Column("sanitized_seconds", "s", ".2f", "translate for the sanitizer"),
    Column("cached_seconds", "s", ".2f", "from the cache"),
)
TRANSLATION_NOTE = (
    "Parse and translate: once for all processes that share the cache on disk. From the cache: in "
    "each later process."
)


def kernels() -> dict[str, KernelSpec]:
    """Return this project's plain forward, and the largest of each of its kernels."""
    everything: dict[str, Any] = {
        "dtype": torch.bfloat16, "bounded_left": True, "bounded_right": True, "softcap": True,
        "ragged": ("cu_seqlens_q", "cu_seqlens_k"), "use_clc": True,
    }  # fmt: skip
    forward = ProblemClass(**everything, sink=True, packed_heads=8)
    backward, config = ProblemClass(**everything), BackwardConfig()
    mixed = ForwardConfig(ex2_pattern=Ex2Pattern(4, 3))
    return {
        "forward, full attention": KernelSpec(
            "forward", ForwardConfig(), ProblemClass(torch.bfloat16)
        ),
        "forward, every option": KernelSpec("forward", ForwardConfig(), forward),
        "forward, every option, mixed exp2": KernelSpec("forward", mixed, forward),
        "dV and dS, packed windows, softcap": KernelSpec(
            "backward_dv", config.of_kernel("backward_dv"), GradientClass(backward, partial=True)
        ),
        "dK/dV, packed windows, softcap": KernelSpec(
            "backward_dkdv", config.of_kernel("backward_dkdv"),
            GradientClass(backward, partial=True),
        ),
        "dQ, packed windows, softcap": KernelSpec(
            "backward_dq", config.of_kernel("backward_dq"), GradientClass(backward)
        ),
    }  # fmt: skip


def translation_table(specs: Mapping[str, KernelSpec]) -> Table:
    """Translation of each of the kernels, by name."""
    title = "What a kernel's first launch in the simulator takes to translate"

    def translated(name: str) -> dict[str, Any]:
        (found,) = speed.translation(compile_kernel(specs[name]).ptx)
        origin = {BASIS: "measured", MACHINE: simulator_machine()}
        return asdict(found) | {"kernel": name} | origin

    rows = ready(map(translated, specs), len(specs), TRANSLATION_COLUMNS, "translating")
    return Table("simulator", title, TRANSLATION_COLUMNS, rows, (TRANSLATION_NOTE,))


def main(arguments: argparse.Namespace) -> int:
    shapes = DEFAULTS
    if arguments.seqlen is not None:
        shapes = {Shape(arguments.seqlen, arguments.heads, arguments.heads_kv): 3}
    found = (
        row(shape, runs if arguments.runs is None else arguments.runs)
        for shape, runs in shapes.items()
    )
    tables = [table(ready(found, len(shapes), COLUMNS, "simulating"))]
    if arguments.seqlen is None:
        tables.append(translation_table(kernels()))
    emit(tables, arguments)
    return 0
