"""cuDNN's CuTe DSL kernels (FROST) on the timing model: replays of its own calls, in its own order.

Its forward takes tiles of 256 queries over by cluster launch control; two of the steps of a causal
tile are masked, and slower. Heads are packed where a call has few queries, and those of very few
rows have a kernel of one CTA per tile. KV splits are combined by a kernel of their own. Its
backward is in `frost_backward`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.peers import frost
from bench.suite import BACKWARD, Case
from fa4_hd256.kernels.limits import HEAD_DIM
from lab.model.calls import Kind
from lab.model.forward import Kernel
from lab.model.machines import simulating, target_of
from lab.model.peers import frost_code, releases
from lab.model.peers.frost_backward import KERNELS, FrostBackward
from lab.model.replays import SEED, Replayed, Source, Traced, fitted, kept, programs, seeded
from lab.model.samples import (
    BACKWARD_SAMPLES,
    PERSISTENT_SAMPLES,
    SAMPLE_SPLITS,
    WINDOW_SAMPLES,
    Sample,
    Samples,
    forward_work,
    parts_of,
)
from lab.model.tiles import KEYS, ROWS, ForwardTiling
from lab.paths import Paths
from lab.published.rows import FROST, Build
from lab.whole.problem import TileCosts
from sm100_sim import timing
from sm100_sim.timing import Machine


@dataclass(frozen=True)
class Tiling(ForwardTiling):
    """Tiles of its forward, in its own order."""

    def places(self, case: Case) -> Iterator[tuple[int, int, int]]:
        queries, heads = self.tile_of_queries(case.heads, case.heads_kv)
        blocks, parts = -(-case.seqlen_q // queries), self.num_splits
        by_length = parts == 1 and self.cluster == 2 and case.bounds[1] is not None
        order = frost_code.forward_order(
            blocks, case.batch * parts, heads, case.heads_kv, case.seqlen_k, by_length
        )
        for block, head, entry in order:
            # Splits come last in its grid, behind the batch.
            part, batch = divmod(entry, case.batch)
            yield block, head, batch * parts + part


@dataclass(frozen=True)
class Few:
    """A call of few queries: so many of them, query heads of a KV head, whether keys are split, and
    rows of a tile of the kernel for decoding, 0 for the other one."""

    queries: int
    ratio: int
    divided: bool
    columns: int


@dataclass(frozen=True)
class Variant:
    """Facts of a case that are compiled in, or decide the costs of its tiles. versions: as
    `bench.peers.frost.versions` gives them. few: None for whole prompts. release: None for the
    installed one; not in the text by which programs are cached, which has the versions."""

    kind: Kind
    versions: tuple[str, ...] = ()
    release: releases.FrostRelease | None = field(default=None, repr=False)
    few: Few | None = None

    def __post_init__(self) -> None:
        if not self.versions:
            object.__setattr__(self, "versions", frost_code.versions())

    @property
    def tiling(self) -> Tiling:
        if self.few is None:
            # Its scheduler requests the next tile when a tile begins.
            return Tiling("dynamic", claims=1)
        packs = frost.packs_heads(self.few.queries, self.few.ratio, 1)
        if self.few.columns:
            return Tiling("single", rows=self.few.columns, cluster=1, packs_heads=packs)
        return Tiling("dynamic", packs_heads=packs, claims=1)

    @property
    def num_splits(self) -> int:
        return SAMPLE_SPLITS if self.few and self.few.divided else 1

    def samples(self) -> Samples:
        if self.kind.window:
            return WINDOW_SAMPLES
        if self.few is None:
            return PERSISTENT_SAMPLES
        return tuple((self.few.queries, *rest) for rest in self.few_samples())

    def few_samples(self) -> tuple[tuple[int, None, int], ...]:
        """Return (heads, no left bound, keys) of samples of few queries: of the kernel for
        decoding, with one tile per CTA, of different lengths; of the other one also of several
        tiles a cluster."""
        assert self.few is not None
        keys = (1024, 2048, 4096) if self.few.columns else (1024, 2048)
        several = () if self.few.columns else ((2 * self.few.ratio, None, 1024),)
        return (*((self.few.ratio, None, n) for n in keys), *several)

    def tiles_of(self, sample: Sample) -> tuple[int, float]:
        """Return (tiles, masked work in all) that the cluster of a sample runs."""
        if self.few is None:
            work = forward_work(sample)
            return len(work), sum(masked for _, masked in work)
        if self.few.columns:
            return 1, 0.0
        queries, heads, *_ = parts_of(sample)
        rows, of_heads = self.tiling.tile_of_queries(heads, heads // self.few.ratio)
        return -(-queries // rows) * of_heads * self.num_splits, 0.0


class Frost:
    """FROST's kernels, as `predictor.Provider`. release: another than the installed one."""

    def __init__(self, release: releases.FrostRelease | None = None) -> None:
        self.release = release
        self.name = frost.NAME if release is None else f"{frost.NAME} {' '.join(release.versions)}"

    def version(self) -> str:
        return self._versions()[0]

    def _versions(self) -> tuple[str, ...]:
        return frost_code.versions() if self.release is None else self.release.versions

    def replays(self, build: Build) -> bool:
        """Return True if the build is the one that it takes here for whole prompts, where a plan is
        named: unsplit keys, heads by themselves. Which of the orders it is follows from the case,
        as in the plans of its heuristics."""
        plan = dict(build.options)
        return (build.project, build.version, build.cutlass_dsl) == (FROST, *self._versions()) and (
            plan.get("SPLIT_KV", 1) == 1 and plan.get("PACK_GQA", 0) == 0
        )

    def refuses(self, case: Case, direction: str) -> str | None:
        if self.release is None:
            reason = frost.unavailable()
        else:
            reason = releases.unavailable(self.release)
        if reason is None and direction == BACKWARD:
            reason = frost.backward_refusal(case.packed, bool(case.softcap), case.bounds)
        return reason or frost.forward_refusal(case.packed, bool(case.softcap), case.bounds[1])

    def default(self, case: Case, direction: str, machine: Machine) -> tuple[bool, int]:
        """CLC is no choice of the call. Keys are split as its heuristics choose."""
        if direction == BACKWARD or case.window != (None, None) or self.release is not None:
            return False, 1
        sms, (lengths, *_) = int(machine.values().sms), case.lengths
        return False, frost.chosen_splits(case.batch, lengths, case.heads, case.heads_kv, sms)

    def variant(
        self, case: Case, direction: str, use_clc: bool = False, divided: bool = False
    ) -> Variant:
        """Raises ValueError where keys of a windowed call are to be split."""
        kind, few = Kind.of(case), None
        if divided and kind.window:
            raise ValueError(f"windows divided by {self.name} are not modelled")
        columns = frost.decode_columns(
            case.batch, case.lengths[0], case.heads, case.heads_kv, kind.window
        )
        if (
            direction != BACKWARD
            and not kind.window
            and (divided or columns or case.seqlen_q < ROWS)
        ):
            # Costs follow how many rows a tile has, and those of whole tiles nothing else.
            queries = min(case.seqlen_q, ROWS)
            few = Few(queries, case.heads // case.heads_kv, divided, columns)
        return Variant(kind, self._versions(), self.release, few)

    def forward(self, variant: Variant, machine: Machine, draws: int) -> Kernel:
        """Raises RuntimeError if it is not installed."""
        found, tiling = replays(variant, machine, draws), variant.tiling
        costs = fitted(found, tiling.policy)
        return Kernel(self.name, tiling, machine.sampled(draws), costs, Paths.of(found))

    def backward(self, variant: Variant, machine: Machine, draws: int) -> FrostBackward:
        """Raises as `forward`."""

        @functools.cache
        def costs(which: str) -> list[TileCosts]:
            count, place = len(BACKWARD_SAMPLES), KERNELS.index(which)
            rows = backward_replays(variant, machine, draws)[place * count :][:count]
            paths[which] = Paths.of(rows)
            return fitted(rows, "dynamic")

        paths: dict[str, Paths] = {}
        return FrostBackward(self.name, machine.sampled(draws), costs, paths)


def traced(variant: Variant, machine: Machine) -> list[Traced]:
    """The programs of its forward on the machine's kind of GPU, in the order of the samples."""
    return programs(*_forward_source(variant, machine))


def replays(variant: Variant, machine: Machine, draws: int) -> list[Replayed]:
    """One cluster on each of the variant's samples, every tile of them run by it."""
    return kept(*_forward_source(variant, machine), machine, draws)


def backward_replays(variant: Variant, machine: Machine, draws: int) -> list[Replayed]:
    """One cluster that runs every tile of each of `KERNELS`, each on `BACKWARD_SAMPLES`."""
    return kept(*_backward_source(variant, machine), machine, draws)


def _of_release(variant: Variant, run: Callable[..., Any], machine: Machine) -> Any:
    """Return the result of `run(variant, machine)`, in the process of the variant's release if it
    has one. Raises RuntimeError where no release is named and another build than the variant's is
    installed."""
    if variant.release is not None:
        return releases.call(variant.release, functools.partial(run, variant, machine))
    reason = frost.unavailable()
    if reason is None and frost_code.versions() != variant.versions:
        reason = (
            f"{frost.NAME} {variant.versions} is to be traced, {frost_code.versions()} is there"
        )
    if reason:
        raise RuntimeError(reason)
    return run(variant, machine)


@contextlib.contextmanager
def _tracing(machine: Machine) -> Iterator[None]:
    with simulating(machine), seeded():
        frost_code.forget_compiled()
        yield


def _forward_source(variant: Variant, machine: Machine) -> Source:
    def trace() -> list[Traced]:
        found = []
        runs = _of_release(variant, forward_programs, machine)
        for sample, program in zip(variant.samples(), runs, strict=True):
            found.append(Traced(program, *variant.tiles_of(sample)))
        return found

    return (frost.NAME, variant, target_of(machine), variant.samples(), SEED), trace


def forward_programs(variant: Variant, machine: Machine) -> list[timing.StoredProgram]:
    """Trace each of the variant's samples, through its class; keys and values have one head, or
    those that the query heads of a call of few queries have."""
    forward, kind = frost.Forward(), variant.kind
    with _tracing(machine), timing.attached(draws=0, chosen=_on_tensor_cores) as session:
        for sample in variant.samples():
            queries, heads, left, keys = parts_of(sample)
            of_keys = keys, heads // variant.few.ratio if variant.few else 1
            q, k, v = _random((queries, heads), of_keys, of_keys)
            forward(
                q, k, v, causal=kind.causal, left=left if kind.window else None,
                num_splits=variant.num_splits,
            )  # fmt: skip
    return _programs(session)


def _programs(session: Any) -> list[timing.StoredProgram]:
    return [timing.StoredProgram.of(found.compiled) for found in session.predictions]


def _random(*shapes: tuple[int, int]) -> list[torch.Tensor]:
    """Rows of one sequence, standard normal. shapes: (rows, heads) of each."""
    return [
        torch.randn(1, *shape, HEAD_DIM, dtype=torch.bfloat16, device="cuda") for shape in shapes
    ]


#: Parts of the names of its kernels that only read and write.
_BESIDE = "fill", "dot", "reduce", "combine"


def _backward_source(variant: Variant, machine: Machine) -> Source:
    def trace() -> list[Traced]:
        runs = _of_release(variant, backward_programs, machine)
        rows = {"main": KEYS, "dk": ROWS, "dq": ROWS}
        return [
            Traced(run[place], seqlen // rows[kernel] * heads)
            for place, kernel in enumerate(KERNELS)
            for run, (seqlen, heads) in zip(runs, BACKWARD_SAMPLES)
        ]

    what = frost.NAME, BACKWARD, variant, target_of(machine), BACKWARD_SAMPLES, SEED
    return what, trace


def backward_programs(variant: Variant, machine: Machine) -> list[list[timing.StoredProgram]]:
    """Trace the three kernels of each of `BACKWARD_SAMPLES`, in their order. O and LSE are its own
    forward's."""
    causal, found = variant.kind.causal, []
    with _tracing(machine):
        for seqlen, heads in BACKWARD_SAMPLES:
            with timing.attached(draws=0, chosen=_on_tensor_cores) as session:
                shape, of_keys = (seqlen, heads), (seqlen, 1)
                q, k, v, dout = _random(shape, of_keys, of_keys, shape)
                out, lse = frost.Forward()(q, k, v, causal=causal)
                frost.Backward()(q, k, v, out, lse, dout, causal=causal)
            found.append(_programs(session)[1:])
    return found


def _on_tensor_cores(kernel: str) -> bool:
    return not any(part in kernel for part in _BESIDE)


#: Earlier releases that published rates are of.
HISTORY = tuple(Frost(one) for one in releases.FROST_RELEASES.values())
