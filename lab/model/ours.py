"""Our kernels on the timing model: which one a call takes, its small calls, its replays.

A `Variant` names a kernel of the forward or of the backward; `call` makes it and a small problem on
one CTA pair, `replays` has that replayed, and `forward` and `backward` fit costs of tiles to it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.suite import BACKWARD, FORWARD, Case
from bench.tables.comparison import OURS
from fa4_hd256 import BackwardConfig
from fa4_hd256.call.backward_problem import BackwardProblem
from fa4_hd256.call.division import divided, last_wave
from fa4_hd256.call.forward_problem import Problem
from fa4_hd256.call.mxfp8_scales import words_of
from fa4_hd256.call.options import BY_RULE, Options
from fa4_hd256.check.single_kernels import empty_results, empty_stats, launch_values
from fa4_hd256.kernels.blackwell.backward.mxfp8.config import Mxfp8BackwardConfig
from fa4_hd256.kernels.blackwell.decode.config import DecodeConfig
from fa4_hd256.kernels.blackwell.forward.config import E4M3_TILES, TILES, ForwardConfig
from fa4_hd256.kernels.blackwell.forward.mxfp8_config import MXFP8_TILES
from fa4_hd256.kernels.context import CLAIM_STEPS
from fa4_hd256.kernels.kernel_set import MXFP8
from fa4_hd256.kernels.limits import HEAD_DIM
from fa4_hd256.kernels.problem_class import DESCALES, E4M3, OF_BLOCKS
from fa4_hd256.quantize import quantize_mxfp8
from fa4_hd256.quantize.mxfp8 import quantized
from fa4_hd256.run.arguments import CallTensors, call_arguments
from fa4_hd256.run.backward_arguments import GradientTensors, gradient_call_arguments
from fa4_hd256.run.bug_report import versions
from fa4_hd256.run.catalogue import KernelSpec, backward_specs
from fa4_hd256.run.compile import compile_kernel
from lab.model import our_decode
from lab.model.backward import Backward
from lab.model.calls import Kind, default_splits, defaults_to_clc, forward_problem
from lab.model.forward import InTwo, Kernel
from lab.model.machines import ONE_PAIR, compiling_ours, gpu_of
from lab.model.our_decode import DecodeVariant, in_pages
from lab.model.replays import (
    SEED,
    Replayed,
    Source,
    Traced,
    digest,
    fitted,
    kept,
    programs,
    with_least,
)
from lab.model.samples import (
    BACKWARD_SAMPLES,
    DIAGONAL_SAMPLES,
    LONGEST,
    SAMPLE_SOFTCAP,
    SAMPLE_SPLITS,
    SAMPLES,
    SHORT_SAMPLES,
    SHORT_SPLIT_SAMPLES,
    SPLIT_SAMPLES,
    WINDOW_SAMPLES,
    Sample,
    Samples,
    backward_tiles,
    forward_work,
    parts_of,
)
from lab.model.tiles import DKDV, ROWS, STEP_WORK, BackwardTiling, ForwardTiling
from lab.paths import Paths
from lab.published.rows import Build
from lab.whole.problem import Late, TileCosts
from sm100_sim import timing
from sm100_sim.timing import Machine

#: Steps that the tensor core is behind the load warp, with three tiles of keys or values loaded.
LOADS_AHEAD = 2.5


@dataclass(frozen=True)
class Variant:
    """One of our kernels.

    kernel: "forward", or one of the backward's (`backward.Backward`), or "backward" for all of
    these. config: of that direction, None for the default one. samples: that costs are fitted to,
    None for those of its kind. split_rows: for the forward with KV splits, how many rows of it
    exist, all in samples of windows; None for the other one. page_size: of the forward's keys, None
    without pages.
    """

    kind: Kind
    use_clc: bool = False
    config: ForwardConfig | BackwardConfig | Mxfp8BackwardConfig | None = None
    samples: Samples | None = None
    split_rows: int | None = None
    kernel: str = FORWARD
    page_size: int | None = None

    @property
    def policy(self) -> str:
        return "dynamic" if self.use_clc else "static"

    @property
    def claims(self) -> Late | int:
        """The scheduler's warp requests when the load warp has a few steps left, which itself is as
        far ahead as its ring has stages."""
        step = STEP_WORK if self.kernel == FORWARD else DKDV
        if isinstance(self.config, ForwardConfig):
            step *= self.config.element_bytes / 2
        return Late((CLAIM_STEPS + LOADS_AHEAD) * step) if self.use_clc else 0

    @property
    def element_bytes(self) -> int:
        """Bytes of an operand of the backward."""
        return 1 if isinstance(self.config, Mxfp8BackwardConfig) else 2

    @property
    def diagonal(self) -> bool:
        """Return True if masked steps have a cost of their own in a causal kernel without a window.
        They have in mxfp8's of dV: its gradient warps set the pace, and only mask where it is
        needed."""
        of_dv = self.kernel.removesuffix(" partial") in (BACKWARD, "dv")
        causal = self.kind.causal and not self.kind.window
        return causal and of_dv and self.element_bytes == 1

    def num_splits(self, sample: Sample) -> int:
        if self.split_rows is None:
            return 1
        return SAMPLE_SPLITS if len(sample) < 5 else int(sample[4] or 1)

    def chosen_samples(self) -> Samples:
        if self.samples:
            return self.samples
        unlimited = DIAGONAL_SAMPLES if self.diagonal else BACKWARD_SAMPLES
        found = WINDOW_SAMPLES if self.kind.window else unlimited
        if self.kernel.endswith(" partial"):
            # Each of two parts has a query head: an empty one's tiles tell nothing of others.
            return tuple((queries, 2 * heads, *others) for queries, heads, *others in found)
        if self.kind.window or self.kernel != FORWARD:
            return found
        if self.split_rows is None:
            return SAMPLES
        return tuple((self.split_rows, *others) for _, *others in SPLIT_SAMPLES)

    @property
    def short(self) -> Variant | None:
        """Return the variant with samples of tiles of one step, twice as many or more in the
        second; None of windows, whose tiles have more steps, and for other samples than its
        kind's."""
        if self.kind.window or self.samples or self.kernel != FORWARD:
            return None
        if self.split_rows is None:
            return replace(self, samples=SHORT_SAMPLES)
        parts = tuple((self.split_rows, *others) for _, *others in SHORT_SPLIT_SAMPLES)
        return replace(self, samples=parts)

    def sample_tiles(self, sample: Sample) -> tuple[int, float]:
        """Return (tiles, masked work in all) of a sample."""
        if self.kernel != FORWARD:
            return backward_tiles(self.kernel, sample, self.diagonal, self.element_bytes)
        work = forward_work(sample)
        return len(work) * self.num_splits(sample), sum(masked for _, masked in work)


class OurProvider:
    """Base of `predictor.Provider` for this project's kernels of all architectures."""

    name = OURS

    def version(self) -> str:
        return versions()["fa4-hd256"]

    def replays(self, build: Build) -> bool:
        return False

    def default(self, case: Case, direction: str, machine: Machine) -> tuple[bool, int]:
        """Return (whether a call takes CLC, its KV splits) if it requests neither."""
        splits = 1 if direction == BACKWARD else default_splits(case, gpu_of(machine))
        return defaults_to_clc(case, direction), splits


class Ours(OurProvider):
    """Our kernels for Blackwell. config: of the forward, None for what calls take by default.
    kv_dtype: of K and V, None for bf16; calls with another take a kernel for a few rows."""

    def __init__(
        self, config: ForwardConfig | DecodeConfig | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.config, self.kv_dtype = config, kv_dtype
        if config is not None:
            self.name = f"{OURS}, {config.tiles.kind}, {config.tiles.rows} rows"
        elif kv_dtype is not None:
            self.name = f"{OURS}, K and V in {str(kv_dtype).removeprefix('torch.')}"

    def default(self, case: Case, direction: str, machine: Machine) -> tuple[bool, int]:
        use_clc, splits = super().default(case, direction, machine)
        if direction == FORWARD:
            splits = default_splits(case, gpu_of(machine), self.config, self.kv_dtype)
        return use_clc, splits

    def refuses(self, case: Case, direction: str) -> str | None:
        if case.page_size and direction == BACKWARD:
            return "keys in pages have no gradients"
        if self.kv_dtype is not None and direction == BACKWARD:
            return "keys of another dtype than queries have no gradients"
        return None

    def _problem(self, case: Case) -> Problem:
        return forward_problem(case, config=self.config, kv_dtype=self.kv_dtype)

    def variant(
        self, case: Case, direction: str, use_clc: bool = False, divided: bool = False
    ) -> Variant | DecodeVariant:
        kind, rows, problem = Kind.of(case), None, self._problem(case)
        config = None
        if isinstance(self.config, ForwardConfig) and problem.tiles in (E4M3_TILES, MXFP8_TILES):
            config = self.config
        if direction == FORWARD and problem.tiles not in (TILES, E4M3_TILES, MXFP8_TILES):
            return DecodeVariant.of(case, problem, use_clc, divided)
        if divided:
            # Costs follow how many rows a tile has, which store their O; windowed samples have all.
            rows = ROWS if kind.window else min(case.seqlen_q * problem.packed_heads, ROWS)
        return Variant(
            kind, use_clc, config, split_rows=rows, kernel=direction, page_size=case.page_size
        )  # fmt: skip

    def forward(self, variant: Variant | DecodeVariant, machine: Machine, draws: int) -> Kernel:
        """Our forward, with costs fitted to replays of that kernel."""
        if isinstance(variant, DecodeVariant):
            return our_decode.forward(variant, machine, draws)
        found = replays(variant, machine, draws)
        config: Any = variant.config or ForwardConfig()
        # Q is there twice: the load warp loads the next tile's when a tile's S are done with it.
        tiling = ForwardTiling(
            variant.policy, packs_heads=config.tiles.kind != MXFP8, in_a_row=True,
            dependent=True, prefetches=True, claims=variant.claims, gpu=gpu_of(machine),
            kv_bytes=config.element_bytes, operand_bytes=config.element_bytes,
        )  # fmt: skip
        costs = fitted(found, variant.policy)
        if variant.short:
            short = few, many = replays(variant.short, machine, draws)
            costs = with_least(costs, few, many, STEP_WORK * config.element_bytes / 2)
            found = [*found, *short]

        def in_two(case: Case) -> InTwo | None:
            return self._in_two(case, variant.use_clc, machine, draws)

        return Kernel(self.name, tiling, machine.sampled(draws), costs, Paths.of(found), in_two)

    def _in_two(self, case: Case, use_clc: bool, machine: Machine, draws: int) -> InTwo | None:
        """A case whose last wave of tiles the operator splits, else None."""
        last = last_wave(self._problem(case), BY_RULE, gpu_of(machine))
        if last is None:
            return None
        first, rest = (
            replace(case, lengths=((rows, case.seqlen_k),) * case.batch)
            for rows in (last.queries, case.seqlen_q - last.queries)
        )
        variant = self.variant(case, FORWARD, use_clc, divided=True)
        return InTwo(first, rest, self.forward(variant, machine, draws).divided(last.splits))

    def backward(self, variant: Variant, machine: Machine, draws: int) -> Backward:
        """Our kernels under the static or the CLC scheduler."""

        @functools.cache
        def costs(which: str) -> list[TileCosts]:
            one = replace(variant, kernel=which)
            rows = replays(one, machine, draws)
            found = fitted(rows, variant.policy)
            if variant.kind.packed:
                rows = [*rows, *empty_replays(one, machine, draws)]
                found = with_empty_tiles(found, rows[0], rows[-1])
            paths[which] = Paths.of(rows)
            return found

        tiling = BackwardTiling(
            variant.policy, True, True, ROWS, claims=variant.claims, gpu=gpu_of(machine),
            element_bytes=variant.element_bytes, diagonal=variant.diagonal,
        )  # fmt: skip
        paths: dict[str, Paths] = {}
        config: Any = variant.config or BackwardConfig()
        return Backward(self.name, tiling, machine.sampled(draws), costs, config.ds_bytes, paths)


def replays(variant: Variant, machine: Machine, draws: int) -> list[Replayed]:
    """One CTA pair on each of the variant's samples, every tile of them run by it."""
    return kept(*_source(variant, machine), machine, draws)


def traced(variant: Variant, machine: Machine) -> list[Traced]:
    """The programs of `replays`, in the order of the samples."""
    return programs(*_source(variant, machine))


def _source(variant: Variant, machine: Machine) -> Source:
    samples = variant.chosen_samples()

    def trace() -> list[Traced]:
        found = []
        for sample in samples:
            compiled, arguments = call_on(machine, variant, sample)
            prediction = timing.predict(compiled, *arguments, draws=0)[-1]
            found.append(Traced.of(prediction, *variant.sample_tiles(sample)))
        return found

    compiled, _ = call_on(machine, variant, samples[0])
    others: tuple[Any, ...] = () if variant.page_size is None else (variant.page_size,)
    if variant.element_bytes == 1 and variant.kind.window:
        # Kept programs say their masked work.
        others = *others, [variant.sample_tiles(sample) for sample in samples]
    return (digest(compiled.cubin), variant.kernel, variant.kind, samples, *others), trace


def empty_replays(variant: Variant, machine: Machine, draws: int) -> list[Replayed]:
    """One, of the first sample on a grid for `LONGEST`; its tiles are those of the grid."""
    sample = variant.chosen_samples()[0]

    def trace() -> list[Traced]:
        prediction = timing.predict(compiled, *arguments, draws=0)[-1]
        return [Traced.of(prediction, variant.sample_tiles((LONGEST, sample[1]))[0])]

    compiled, arguments = call_on(machine, variant, sample, LONGEST)
    what = digest(compiled.cubin), variant.kernel, sample, LONGEST
    return kept(what, trace, machine, draws)


def with_empty_tiles(costs: list[TileCosts], without: Replayed, some: Replayed) -> list[TileCosts]:
    """Costs with those of an empty tile. without, some: replays that differ in such tiles only."""
    tiles = some.tiles - without.tiles
    return [
        replace(one, empty=(more - less) / tiles)
        for one, more, less in zip(costs, some.clocks, without.clocks, strict=True)
    ]


def call_on(
    machine: Machine, variant: Variant, sample: Sample, longest: int | None = None
) -> tuple[Any, tuple]:
    """`call`, with the kernel as compiled by a process whose GPUs are all such machines."""
    with compiling_ours(machine):
        return call(variant, sample, longest)


def call(variant: Variant, sample: Sample, longest: int | None = None) -> tuple[Any, tuple]:
    """Return (compiled kernel, arguments of a call on one CTA pair). longest: length that packed
    sequences are said to have at most, by default that of the sample."""
    queries, heads, left, keys = parts_of(sample)
    kind, generator = variant.kind, torch.Generator().manual_seed(SEED)
    shapes = ((queries, heads), (keys, 1), (keys, 1), (queries, heads))
    tensors: Any = tuple(
        torch.randn(1, rows, n, HEAD_DIM, generator=generator).bfloat16() for rows, n in shapes
    )
    softcap = SAMPLE_SOFTCAP if kind.softcap else 0.0
    bounds = (left if kind.window else None, None)
    options = Options.check(None, kind.causal, bounds, softcap, variant.use_clc)
    ragged = {}
    if kind.packed:
        ragged = {
            name: torch.tensor([0, rows], dtype=torch.int32)
            for name, rows in (("cu_seqlens_q", queries), ("cu_seqlens_k", keys))
        }
    if variant.page_size is not None:
        tensors, ragged = in_pages(tensors, variant.page_size, generator)
    limits = (longest or queries, longest or keys) if kind.packed else (None, None)
    # The forward's own tiles, however few the rows.
    config = variant.config if isinstance(variant.config, ForwardConfig) else ForwardConfig()
    if config.tiles.kind == MXFP8:
        found = quantize_mxfp8(*tensors[:3])
        tensors, ragged = found[:3], ragged | dict(zip(DESCALES, found[3:], strict=True))
    elif config.is_e4m3:
        tensors = tuple(one.to(torch.float8_e4m3fn) for one in tensors[:3])
    problem = Problem.describe(tensors[:3], options, None, ragged, limits[0], limits[1], config)
    if variant.kernel == FORWARD:
        problem = divided(problem, variant.num_splits(sample), ONE_PAIR)
        given = {name: ragged[name] for name in problem.ragged}
        given |= {name: words_of(ragged[name], name) for name in problem.scales}
        return forward_call(variant, problem, tensors, given)
    return backward_call(variant, problem, tensors, ragged)


def forward_call(
    variant: Variant, problem: Problem, tensors: Any, optional: dict[str, torch.Tensor]
) -> tuple[Any, tuple]:
    """Return (compiled kernel, arguments of a call on one CTA pair). tensors: q, k, v first."""
    config: Any = variant.config or ForwardConfig()
    compiled = compile_kernel(KernelSpec(config.tiles.kind, config, problem.problem_class))
    results = empty_results(problem, parts=problem.num_splits > 1)
    # Kernels take e4m3 in twos, as elements of 16 bits.
    (q, k, v), (out, lse) = (one.view(problem.dtype) for one in tensors[:3]), results
    given = CallTensors(q, k, v, out, lse, optional)
    return compiled, launch_values(call_arguments(given, problem, ONE_PAIR))


def backward_call(
    variant: Variant, forward: Problem, tensors: Any, ragged: dict[str, torch.Tensor]
) -> tuple[Any, tuple]:
    """Return (compiled kernel, arguments of a call on one CTA pair). forward: the call whose
    gradients they are; tensors: q, k, v, dout; ragged: those of that call, by name."""
    (q, k, *_), which = tensors, variant.kernel
    name, head_parts = which.removesuffix(" partial"), 2 if which.endswith(" partial") else 1
    keeps = name in ("dv", "products")
    config: Any = variant.config or BackwardConfig()
    if isinstance(config, Mxfp8BackwardConfig):
        name, tensors = f"{name}_mxfp8", in_mxfp8(tensors)
        forward = replace(forward, q_dtype=E4M3, kv_dtype=E4M3, descale=OF_BLOCKS)
    problem = BackwardProblem(forward, tuple(k.shape), False, head_parts, keeps_ds=keeps)
    stats = empty_stats(problem)
    # Rows as the preprocess kernel leaves them; their values decide no instruction.
    stats.zero_()
    dtype = torch.float32 if head_parts > 1 else q.dtype
    of_keys = 1, k.shape[1], head_parts, HEAD_DIM
    results = tuple(
        torch.empty_like(q) if made == "dq" else torch.empty(of_keys, dtype=dtype)
        for made in problem.kernels.kernel(f"backward_{name}").results
    )
    spec = backward_specs(problem, config)[name]
    # Zeros: a dS of another call would do as well, but no bits that are not numbers.
    ds = torch.zeros(problem.ds_shape, dtype=q.dtype) if keeps else None
    given = GradientTensors(tensors, stats, results, ragged, ds)
    return compile_kernel(spec), launch_values(gradient_call_arguments(given, problem, ONE_PAIR))


def in_mxfp8(tensors: Any) -> tuple[torch.Tensor, ...]:
    """Return the operands of the backward's kernels in mxfp8.  tensors: q, k, v, dout."""
    q, k, v, dout = tensors
    columns = [quantized(n, t, None) for n, t in zip(("q", "k", "v", "dout"), (q, k, v, dout))]
    rows = [quantized("", t, None, along_rows=True) for t in (q, k, dout)]
    codes, scales = zip(*columns, *rows)
    words = zip(scales, ("",) * len(columns) + ("q_rows_descale",) * len(rows), strict=True)
    # Kernels take e4m3 in twos, as elements of 16 bits.
    return *(one.view(q.dtype) for one in codes), *(words_of(*one) for one in words)
