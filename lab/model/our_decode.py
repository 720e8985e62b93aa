"""Our decode kernel for Blackwell on the timing model: its small calls, its replays, its tiles.

Costs of a tile are fitted to replays of one CTA with tiles of the call's own rows: how many of them
exist decides what a tile's end takes. Loads of a step are replayed at an SM's share of L2; HBM
bounds a whole problem (`lab.whole.problem`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.measure.providers import Pages
from bench.suite import SM100_FLOP_PER_CLOCK, Case
from bench.tables.comparison import OURS
from fa4_hd256.call.forward_problem import Problem
from fa4_hd256.call.options import Options
from fa4_hd256.check.single_kernels import empty_results, launch_values
from fa4_hd256.kernels.blackwell.decode.config import (
    DECODE,
    DECODE_E4M3,
    DECODE_NVFP4,
    DecodeConfig,
)
from fa4_hd256.kernels.context import CLAIM_STEPS
from fa4_hd256.kernels.limits import HEAD_DIM
from fa4_hd256.kernels.nvfp4_format import BLOCK_SCALES, NVFP4
from fa4_hd256.kernels.problem_class import query_rows
from fa4_hd256.quantize import quantize_nvfp4
from fa4_hd256.run.arguments import CallTensors, call_arguments
from fa4_hd256.run.catalogue import KernelSpec
from fa4_hd256.run.compile import compile_kernel
from lab.model.calls import Kind
from lab.model.forward import Kernel
from lab.model.machines import B200, compiling_ours, gpu_of
from lab.model.replays import SEED, Replayed, Traced, digest, fitted, kept, with_least
from lab.model.samples import SAMPLE_SOFTCAP
from lab.model.tiles import KEYS, ForwardTiling
from lab.paths import Paths
from lab.whole.problem import Late
from sm100_sim import timing
from sm100_sim.timing import Machine

#: One CTA, which has an SM to itself, runs every tile of a replay.
ONE_SM = replace(B200, sms=1, pairs=1)
#: Steps that the tensor core is behind the load warp, with six halves of tiles loaded.
LOADS_AHEAD = 1.5


@dataclass(frozen=True)
class Sample:
    """A small call: keys of each of its sequences, and parts of these keys; left: bound of a
    window, None without."""

    keys: int
    sequences: int = 1
    parts: int = 1
    left: int | None = None


#: Samples that costs are fitted to: tiles of different lengths, one and several per CTA.
WHOLE = (Sample(1024), Sample(4096), Sample(1024, 3), Sample(512, 4))
PARTS = (Sample(1024, 1, 2), Sample(2048, 1, 4), Sample(4096, 1, 4))
#: Tiles of one step in succession, twice as many in the second.
SHORT_WHOLE = (Sample(KEYS, 8), Sample(KEYS, 16))
SHORT_PARTS = (Sample(1024, 1, 8), Sample(2048, 1, 16))
#: Samples of windows; the keys before them are skipped.
WINDOWS = (
    Sample(4096, 1, 1, 1023), Sample(4096, 1, 1, 3071), Sample(4096, 3, 1, 1023),
    Sample(4096, 4, 1, 511),
)  # fmt: skip
WINDOW_PARTS = (
    Sample(4096, 1, 2, 1023), Sample(4096, 1, 4, 2047), Sample(6144, 1, 4, 5119),
)  # fmt: skip


@dataclass(frozen=True)
class DecodeVariant:
    """The kernel of a call, and the rows of its tiles.

    rows: of a tile of the configuration. queries: of a sequence that a tile has. ratio: query heads
    of a KV head, which share a tile. page_size: rows of a page of keys, None without. e4m3, nvfp4:
    keys and values are.
    """

    kind: Kind
    rows: int
    queries: int
    ratio: int
    divided: bool = False
    use_clc: bool = False
    page_size: int | None = None
    e4m3: bool = False
    nvfp4: bool = False

    @classmethod
    def of(cls, case: Case, problem: Problem, use_clc: bool, divided: bool) -> DecodeVariant:
        """problem: the case, with tiles of this kernel."""
        queries = min(case.seqlen_q, problem.tile_queries)
        return cls(
            Kind.of(case), problem.tiles.rows, queries, problem.packed_heads, divided, use_clc,
            case.page_size, problem.kv_dtype == torch.float8_e4m3fn, problem.kv_dtype == NVFP4,
        )  # fmt: skip

    @property
    def config(self) -> DecodeConfig:
        known = DECODE_E4M3 if self.e4m3 else DECODE_NVFP4 if self.nvfp4 else DECODE
        return next(config for config in known if config.rows == self.rows)

    @property
    def policy(self) -> str:
        return "dynamic" if self.use_clc else "static"

    @property
    def step_work(self) -> float:
        return 4 * self.rows * KEYS * HEAD_DIM / SM100_FLOP_PER_CLOCK

    def samples(self) -> tuple[Sample, ...]:
        if self.kind.window:
            return WINDOW_PARTS if self.divided else WINDOWS
        return PARTS if self.divided else WHOLE

    def short_samples(self) -> tuple[Sample, ...]:
        """Return the short samples; windows have none, as their tiles have more steps."""
        if self.kind.window:
            return ()
        return SHORT_PARTS if self.divided else SHORT_WHOLE

    def tiling(self, machine: Machine) -> DecodeTiling:
        return DecodeTiling(
            self.policy, rows=self.rows, cluster=1, packs_heads=True,
            prefetches=self.config.q_stages > 1,
            claims=Late((CLAIM_STEPS + LOADS_AHEAD) * self.step_work) if self.use_clc else 0,
            dependent=True, kv_bytes=self.config.tiles.step_bytes / (2 * KEYS * HEAD_DIM),
            gpu=gpu_of(machine),
        )  # fmt: skip


@dataclass(frozen=True)
class DecodeTiling(ForwardTiling):
    """Tiles of a CTA; a query takes a power of two of the rows."""

    def tile_of_queries(self, heads: int, heads_kv: int) -> tuple[int, int]:
        ratio = heads // heads_kv
        of_query = query_rows(ratio, self.rows)
        return (self.rows // of_query, heads_kv) if of_query <= self.rows else (self.rows, heads)


def forward(variant: DecodeVariant, machine: Machine, draws: int) -> Kernel:
    found = replays(variant, variant.samples(), machine, draws)
    tiling = variant.tiling(machine)
    costs = fitted(found, tiling.policy)
    if variant.short_samples():
        short = few, many = replays(variant, variant.short_samples(), machine, draws)
        costs = with_least(costs, few, many, variant.step_work)
        found = [*found, *short]
    return Kernel(OURS, tiling, machine.sampled(draws), costs, Paths.of(found))


def replays(
    variant: DecodeVariant, samples: tuple[Sample, ...], machine: Machine, draws: int
) -> list[Replayed]:
    """One CTA on each of the samples."""

    def trace() -> list[Traced]:
        found = []
        for sample in samples:
            compiled, arguments = call_on(machine, variant, sample)
            prediction = timing.predict(compiled, *arguments, draws=0)[-1]
            found.append(Traced.of(prediction, sample.parts * sample.sequences))
        return found

    compiled, _ = call_on(machine, variant, samples[0])
    what = digest(compiled.cubin), variant, samples
    return kept(what, trace, machine, draws)


def call_on(machine: Machine, variant: DecodeVariant, sample: Sample) -> tuple[Any, tuple]:
    """`call`, with the kernel as compiled by a process whose GPUs are all such machines."""
    with compiling_ours(machine):
        return call(variant, sample)


def call(variant: DecodeVariant, sample: Sample) -> tuple[Any, tuple]:
    """Return (compiled kernel, arguments of a call on one SM)."""
    kind, config = variant.kind, variant.config
    softcap = SAMPLE_SOFTCAP if kind.softcap else 0.0
    options = Options.check(None, kind.causal, (sample.left, None), softcap, variant.use_clc)
    (q, k, v), ragged = _tensors(variant, sample)
    if variant.e4m3:
        k, v = (tensor.to(torch.float8_e4m3fn) for tensor in (k, v))
    scales: list[torch.Tensor] = []
    if variant.nvfp4:
        (k, v), scales = map(list, zip(*map(quantize_nvfp4, (k, v)), strict=True))
        ragged |= dict(zip(BLOCK_SCALES, scales, strict=True))
    longest_q, longest_k = (variant.queries, sample.keys) if kind.packed else (None, None)
    problem = Problem.describe((q, k, v), options, None, ragged, longest_q, longest_k, config)
    problem = replace(problem, num_splits=sample.parts)
    compiled = compile_kernel(KernelSpec(problem.tiles.kind, config, problem.problem_class))
    out, lse = empty_results(problem, parts=sample.parts > 1)
    # Kernels take bytes in twos.
    optional = {name: ragged[name] for name in problem.ragged}
    optional |= zip(BLOCK_SCALES, (one.view(q.dtype) for one in scales))
    if variant.e4m3 or variant.nvfp4:
        k, v = (tensor.view(q.dtype) for tensor in (k, v))
    given = CallTensors(q, k, v, out, lse, optional)
    return compiled, launch_values(call_arguments(given, problem, ONE_SM))


def _tensors(variant: DecodeVariant, sample: Sample) -> tuple[Any, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(SEED)
    count, queries, keys = sample.sequences, variant.queries, sample.keys
    shapes = [(count, queries, variant.ratio), (count, keys, 1), (count, keys, 1)]
    ragged: dict[str, torch.Tensor] = {}
    if variant.kind.packed:
        shapes = [(1, count * rows, heads) for _, rows, heads in shapes]
        for name, rows in (("cu_seqlens_q", queries), ("cu_seqlens_k", keys)):
            ragged[name] = torch.arange(count + 1, dtype=torch.int32) * rows
    tensors = tuple(
        torch.randn(*shape, HEAD_DIM, generator=generator).bfloat16() for shape in shapes
    )
    if variant.page_size is None:
        return tensors, ragged
    return in_pages(tensors, variant.page_size, generator)


def in_pages(
    tensors: Any, page_size: int, generator: torch.Generator
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return (the tensors with keys and values in pages, in random order; ragged tensors). tensors:
    q, k, v, each with a batch, and any others. Their rows are a multiple of a page's."""
    q, k, v, *others = tensors
    pages = Pages.of(k, v, page_size, generator)
    return (q, pages.k, pages.v, *others), {
        "seqused_k": pages.lengths, "page_table": pages.table,
    }  # fmt: skip
