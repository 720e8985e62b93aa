"""Our Hopper kernels on the timing model, on an H200 or an H100.

Costs of tiles are fitted to replays of a CTA, or of a cluster of our backward, with a few tiles;
problems are placed on all SMs as Blackwell's are (`forward`, `backward`). Work of a tile is counted
as there, one clock of a CTA for every 8192 FLOP; a Hopper SM does half: `fit`'s rate has it.

The clock follows what the tensor cores do and what the power budget leaves (`clocks`).
"""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from bench.suite import FLOP_PER_CLOCK, FORWARD, SM100_FLOP_PER_CLOCK, Case
from fa4_hd256.call.backward_problem import BackwardProblem
from fa4_hd256.call.division import divided
from fa4_hd256.call.forward_problem import Problem
from fa4_hd256.call.options import Options
from fa4_hd256.check.single_kernels import empty_results, empty_stats, launch_values
from fa4_hd256.environment import ARCHITECTURE
from fa4_hd256.kernels.context import CLAIM_STEPS
from fa4_hd256.kernels.kernel_set import kernels_of
from fa4_hd256.kernels.limits import HEAD_DIM
from fa4_hd256.run.arguments import CallTensors, call_arguments
from fa4_hd256.run.backward_arguments import GradientTensors, gradient_call_arguments
from fa4_hd256.run.catalogue import backward_specs, forward_spec, tuning_key
from fa4_hd256.run.compile import compile_kernel
from lab.model.backward import Backward
from lab.model.calls import Kind, architecture_on, defaults_to_clc, forward_problem
from lab.model.forward import Kernel
from lab.model.hopper.clocks import DEFAULT, Clocks
from lab.model.hopper.loads import under_traffic
from lab.model.machines import gpu_of, held_at
from lab.model.replays import SEED, Replayed, Traced, digest, fitted, kept
from lab.model.samples import BACKWARD_SAMPLES, Sample, Samples, backward_tiles, parts_of
from lab.model.stored_tiles import DV
from lab.model.tiles import ROWS, BackwardTiling, ForwardTiling
from lab.whole.conditions import Call
from lab.whole.problem import Late, TileCosts
from sm100_sim import timing
from sm100_sim.timing import Machine, Values, load

#: Clock at which kernels are replayed; L2's part of latencies follows it (`machines.held_at`).
REPLAYED_GHZ = 1.65
WORK_FLOP = float(SM100_FLOP_PER_CLOCK)
#: Over work as it is counted: clocks of a Hopper SM's tensor core.
SM_CLOCKS = SM100_FLOP_PER_CLOCK / FLOP_PER_CLOCK[9, 0]
#: Steps that the load warp is ahead of the products, with two buffers of K and of V.
_LOADS_AHEAD = 1.5


def hopper(machine: str = "h200", ghz: float = REPLAYED_GHZ) -> Machine:
    """The modelled H200, or another of its kind, at the clock of its replays."""
    return held_at(load(machine), ghz)


def on_hopper() -> contextlib.AbstractContextManager[Any]:
    """CPU tensors take the kernels for sm_90a inside."""
    return mock.patch.dict(os.environ, {ARCHITECTURE.name: "sm_90a"})


@dataclass(frozen=True)
class Variant:
    """One of our kernels: "forward", or "dv" or "products" of the backward. keys: of the forward's
    step; decodes: whether it has one warpgroup, for a few rows; splits: whether keys are split."""

    kind: Kind
    use_clc: bool
    kernel: str = FORWARD
    keys: int = 0
    decodes: bool = False
    splits: bool = False

    def samples(self) -> Samples:
        """Return (queries, heads, left bound, keys) of small calls."""
        if self.kernel != FORWARD:
            return BACKWARD_SAMPLES
        rows, keys = (64, 64) if self.decodes else (128, self.keys)
        if self.kind.window:
            return (
                (512, 1, 256, 512), (1024, 1, 256, 1024), (256, 1, 1024, 2048),
                (512, 2, 512, 1024),
            )  # fmt: skip
        return (
            (rows, 1, None, 4 * keys), (rows, 1, None, 24 * keys), (rows, 4, None, 12 * keys),
            (rows, 8, None, 4 * keys),
        )  # fmt: skip

    def tiling(self, machine: Machine) -> ForwardTiling:
        gpu, late = gpu_of(machine), Late((CLAIM_STEPS + _LOADS_AHEAD) * 16.0 * self.keys)
        rows = 64 if self.decodes else 128
        # Q has one buffer, which is free with a tile's last QK.
        return ForwardTiling(
            "dynamic" if self.use_clc else "static", rows=rows, cluster=1, keys=self.keys,
            warpgroups=rows // 64, packs_heads=True, prefetches=False, gpu=gpu,
            claims=late if self.use_clc else 0,
        )  # fmt: skip


def forward_variant(case: Case, machine: Machine, splits: int = 1) -> Variant:
    gpu = gpu_of(machine)
    problem = forward_problem(case, architecture_on(gpu))
    config = forward_spec(problem, gpu).config
    return Variant(
        Kind.of(case), defaults_to_clc(case, FORWARD), keys=config.block_kv,
        decodes=problem.tiles.rows == 64, splits=splits > 1,
    )  # fmt: skip


def forward(variant: Variant, machine: Machine, draws: int = 0) -> Kernel:
    """Our forward with costs of its tiles."""
    tiling, rows = variant.tiling(machine), replays(variant, machine, draws)
    return Kernel("fa4_hd256", tiling, machine.sampled(draws), fitted(rows, tiling.policy))


def backward(kind: Kind, use_clc: bool, machine: Machine, keys: int, draws: int = 0) -> Backward:
    """Our backward with stored dS, of calls with so many keys."""
    config = kernels_of(architecture_on(gpu_of(machine))).config("backward")()

    @functools.cache
    def costs(which: str) -> list[TileCosts]:
        if which not in ("dv", "products"):
            raise ValueError(f"the model has no replay of the Hopper kernel {which!r}")
        one = Variant(kind, use_clc, which)
        gpu = under_traffic(machine, keys) if which == "dv" else machine
        return fitted(replays(one, gpu, draws), "dynamic" if use_clc else "static")

    policy, late = "dynamic" if use_clc else "static", Late(CLAIM_STEPS * DV)
    tiling = BackwardTiling(
        policy, True, True, ROWS, claims=late if use_clc else 0, gpu=gpu_of(machine)
    )
    return Backward(
        "fa4_hd256", tiling, machine.sampled(draws), costs, config.ds_bytes
    )  # fmt: skip


def replays(variant: Variant, machine: Machine, draws: int = 0) -> list[Replayed]:
    """One CTA, or cluster, on each of the variant's samples."""
    samples = variant.samples()

    def trace() -> list[Traced]:
        found = []
        for sample in samples:
            compiled, arguments = call(variant, sample)
            prediction = timing.predict(compiled, *arguments, machine=machine, draws=0)[-1]
            found.append(Traced.of(prediction, *_tiles_of(variant, sample)))
        return found

    cubin = call(variant, samples[0])[0].cubin
    rows = kept((digest(cubin), variant, samples), trace, machine, draws)
    return [replace(row, work=row.work / SM_CLOCKS) for row in rows]


def _tiles_of(variant: Variant, sample: Sample) -> tuple[int, float]:
    """Return (tiles, masked work) of a sample."""
    if variant.kernel != FORWARD:
        return backward_tiles(variant.kernel, sample)
    queries, heads, _, _ = parts_of(sample)
    return -(-queries // (64 if variant.decodes else 128)) * heads, 0.0


def call(variant: Variant, sample: Sample) -> tuple[Any, tuple]:
    """Return (compiled kernel, arguments of a call on one CTA, or cluster of two)."""
    queries, heads, left, keys = parts_of(sample)
    kind, generator = variant.kind, torch.Generator().manual_seed(SEED)
    shapes = ((queries, heads), (keys, 1), (keys, 1), (queries, heads))
    if variant.decodes or variant.kernel == FORWARD:
        # A KV head each, or the heads would share tiles.
        shapes = ((queries, heads), (keys, heads), (keys, heads), (queries, heads))
    tensors: Any = tuple(
        torch.randn(1, rows, n, HEAD_DIM, generator=generator).bfloat16() for rows, n in shapes
    )
    bounds = (left if kind.window else None, None)
    with on_hopper():
        options = Options.check(None, kind.causal, bounds, 0.0, variant.use_clc)
        problem = Problem.describe(tensors[:3], options)
        alone = replace(gpu_of(load("h200")), sms=1, pairs=1)
        if variant.kernel != FORWARD:
            return _backward_call(variant, problem, tensors, alone)
        if variant.splits:
            problem = divided(problem, 2, alone)
        key = tuning_key(problem, alone.tuning_name)
        config = key.config(keys)
        if config.block_kv != variant.keys:
            config = replace(config, block_kv=variant.keys)
        compiled = compile_kernel(forward_spec(problem, alone, config))
        out, lse = empty_results(problem, parts=problem.num_splits > 1)
        q, k, v, _ = tensors
        given = CallTensors(q, k, v, out, lse)
        return compiled, launch_values(call_arguments(given, problem, alone))


def _backward_call(variant: Variant, forward: Problem, tensors: Any, gpu: Any) -> tuple[Any, tuple]:
    q, k, *_ = tensors
    problem = BackwardProblem(forward, tuple(k.shape), False, 1, keeps_ds=True)
    stats = empty_stats(problem)
    stats.zero_()
    made = problem.kernels.kernel(f"backward_{variant.kernel}").results
    results = tuple(torch.empty_like(q if name == "dq" else k) for name in made)
    config = kernels_of(forward.architecture).config("backward")()
    ds = torch.zeros(problem.ds_shape, dtype=q.dtype)
    given = GradientTensors(tensors, stats, results, ds=ds)
    spec = backward_specs(problem, config)[variant.kernel]
    return compile_kernel(spec), launch_values(gradient_call_arguments(given, problem, gpu))


# ------------------------------------------------------------ times


@dataclass(frozen=True)
class Times:
    """clocks: of the SMs with the most to do, all launches. busy: share of them that the tensor
    cores work. seconds: of a call of first launches, for_good: when the power budget has told."""

    clocks: float
    busy: float
    seconds: float
    for_good: float


def times_of(call: Call, values: Values, clocks: Clocks = DEFAULT) -> Times:
    """Return the times of a call on a machine held at the clock of its replays."""
    count = sum(times * schedule.clocks for times, schedule in call.schedules)
    flop = sum(times * schedule.work for times, schedule in call.schedules) * WORK_FLOP
    busy = flop / (FLOP_PER_CLOCK[9, 0] * values.sms * count)
    first = clocks.first(busy)
    lasting = clocks.for_good(first, call, values)
    seconds, for_good = (call.at(ghz / values.clock_ghz) for ghz in (first, lasting))
    return Times(count, busy, seconds, for_good)


def times(calls: list[Call], machine: Machine, clocks: Clocks = DEFAULT) -> Times:
    return times_of(calls[0], machine.values(), clocks)
