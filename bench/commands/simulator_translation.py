"""Second table of `python -m bench simulator`: how long the translation of kernels takes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from bench.tables.origin import simulator_machine
from bench.tables.table import BASIS, MACHINE, Column, Table
from fa4_hd256 import BackwardConfig, ForwardConfig
from fa4_hd256.kernels.problem_class import GradientClass, ProblemClass
from fa4_hd256.run.catalogue import KernelSpec
from fa4_hd256.run.compile import compile_kernel
from sm100_sim.isa import load_table
from sm100_sim.ptx.parser import Kernel, parse_module
from sm100_sim.translate.kernel import routine_address, translate
from softmax_emu.pattern import Ex2Pattern

COLUMNS = (
    Column("kernel"),
    Column("instructions", title="PTX instructions"),
    Column("parse_seconds", "s", ".2f", "parse"),
    Column("seconds", "s", ".2f", "translate"),
    Column("sanitized_seconds", "s", ".2f", "translate for the sanitizer"),
    Column("cached_seconds", "s", ".2f", "from the cache"),
)
NOTE = (
    "Parse and translate: once for all processes that share the cache on disk. From the cache: in "
    "each later process."
)


def kernels() -> dict[str, KernelSpec]:
    """This project's plain forward, and the largest of each of its kernels."""
    everything = {
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
        "dK/dV, packed windows, softcap": KernelSpec(
            "backward_dkdv", config.of_kernel("backward_dkdv"),
            GradientClass(backward, partial=True, stores_ds=True),
        ),
        "dQ, packed windows, softcap": KernelSpec(
            "backward_dq", config.of_kernel("backward_dq"), GradientClass(backward)
        ),
    }  # fmt: skip


def measure(name: str, spec: KernelSpec) -> dict[str, Any]:
    """A row. The run loop and the memory checks, which all kernels share, are there before."""
    ptx = compile_kernel(spec).ptx
    load_table()
    routine_address("run")
    start = time.perf_counter()
    (kernel,) = parse_module(ptx).values()
    parse_seconds = time.perf_counter() - start
    seconds = _seconds(kernel)
    found = {
        "kernel": name,
        "instructions": len(kernel.instructions),
        "parse_seconds": parse_seconds,
        "seconds": seconds,
        "sanitized_seconds": _seconds(kernel, sanitize=True),
    }
    translate(kernel, ptx=ptx)
    found["cached_seconds"] = _seconds(kernel, ptx=ptx)
    return found | {BASIS: "measured", MACHINE: simulator_machine()}


def _seconds(kernel: Kernel, **options: Any) -> float:
    start = time.perf_counter()
    translate(kernel, **options)
    return time.perf_counter() - start


def table(specs: Mapping[str, KernelSpec]) -> Table:
    """Translation of each of the kernels, by name."""
    title = "What a kernel's first launch in the simulator takes to translate"
    rows = [measure(name, spec) for name, spec in specs.items()]
    return Table("simulator", title, COLUMNS, rows, (NOTE,))
