"""flash-attn-4's kernels on the timing model: replays of its own calls, and how it cuts tiles.

Full dense attention runs persistent clusters, all else one tile a cluster, the longest first. With
KV splits (`num_splits` above 1, and 0 where its rule splits) it takes one CTA for a tile of 128
rows, and a second kernel makes one result of the float32 parts. Its backward at head_dim 256 has a
dQ and a dK/dV kernel of one tile a cluster, blocks ascending.

`FlashAttention4(releases.release(COMMIT))` has the kernels of an earlier commit, traced in a
process of their own (`lab.model.peers.releases`) and replayed here: dense attention at head_dim
256, one tile a cluster, blocks ascending. `traced(Variant(Kind(causal), release=...))` are the
programs of its forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from bench.peers import flash_attn_4
from bench.suite import BACKWARD, Case
from fa4_hd256.kernels.limits import HEAD_DIM
from lab.model.backward import Backward
from lab.model.calls import Kind
from lab.model.forward import Kernel
from lab.model.machines import B200
from lab.model.peers import flash_attn_4_code, releases
from lab.model.peers import flash_attn_4_traces as traces
from lab.model.peers.flash_attn_4_traces import Problem
from lab.model.replays import SEED, Replayed, Source, Traced, fitted, kept, programs
from lab.model.samples import (
    BACKWARD_SINGLE_SAMPLES,
    PERSISTENT_SAMPLES,
    SAMPLE_SOFTCAP,
    SAMPLE_SPLITS,
    SINGLE_SAMPLES,
    WINDOW_SAMPLES,
    Samples,
    forward_work,
    parts_of,
)
from lab.model.tiles import KEYS, ROWS, BackwardTiling, ForwardTiling
from lab.paths import Paths
from lab.published.rows import FLASH_ATTENTION, Build
from lab.whole.problem import TileCosts
from sm100_sim.timing import Machine

NAME, SINGLE_ROWS = flash_attn_4.PACKAGE, flash_attn_4_code.SINGLE_ROWS
#: Samples with KV splits: (left bound of windowed ones, keys).
SPLIT_SAMPLES = ((None, 1024), (None, 2048), (None, 4096))
SPLIT_WINDOW_SAMPLES = ((511, 1024), (1023, 2048), (2047, 4096))


@dataclass(frozen=True)
class Variant:
    """One of its kernels.

    head_dim: 128 or 256; 128 for dense kinds alone. divided: (queries, query heads of a KV head) of
    a tile of the kernel with KV splits, None for the other one. release: None for the installed
    one; not in the text by which programs are kept, which has the versions beside it.
    """

    kind: Kind
    head_dim: int = HEAD_DIM
    divided: tuple[int, int] | None = None
    release: releases.Release | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.head_dim not in (128, 256):
            raise ValueError(f"head_dim {self.head_dim}; known here are 128 and 256")

    @property
    def tiling(self) -> ForwardTiling:
        if self.release:
            return ForwardTiling("single", ordered=False)
        if self.divided:
            return ForwardTiling(
                "single", rows=SINGLE_ROWS, cluster=1, packs_heads=True, equal_parts=True
            )
        persistent = self.kind.is_dense and not self.kind.causal
        rows, cluster = ROWS, 2
        if self.head_dim == 128:
            # A CTA works on two tiles of 128 rows, and only full attention on CTA pairs.
            rows, cluster = (2 * ROWS, 2) if persistent else (ROWS, 1)
        return ForwardTiling(
            "static" if persistent else "single", self.head_dim, rows, cluster, packs_heads=True,
            exact_grid=True,
        )  # fmt: skip

    def samples(self) -> Samples:
        if self.divided:
            chosen = SPLIT_WINDOW_SAMPLES if self.kind.window else SPLIT_SAMPLES
            return tuple((*self.divided, *sample) for sample in chosen)
        if self.kind.window:
            return WINDOW_SAMPLES
        if self.tiling.policy == "single":
            return SINGLE_SAMPLES
        rows = self.tiling.rows
        return tuple(dict.fromkeys((max(n, rows), heads) for n, heads in PERSISTENT_SAMPLES))


class FlashAttention4:
    """flash-attn-4's kernels, as `predictor.Provider`. release: another than the installed one;
    only its dense attention is known."""

    def __init__(self, release: releases.Release | None = None) -> None:
        self.release = release
        self.name = NAME if release is None else f"{NAME} {release.commit}"

    def version(self) -> str:
        return self._named()[0]

    def replays(self, build: Build) -> bool:
        return build == Build(FLASH_ATTENTION, *self._named())

    def _named(self) -> tuple[str, str]:
        """Return (its version or commit, that of CuTe DSL)."""
        if self.release is not None:
            return self.release.commit, self.release.cutlass_dsl
        package, cutlass_dsl, _ = flash_attn_4_code.versions()
        return package, cutlass_dsl

    def refuses(self, case: Case, direction: str) -> str | None:
        if self.release is not None:
            if not Kind.of(case).is_dense:
                return f"of {self.name} only dense attention is replayed"
            if direction not in self.release.directions:
                return f"{self.name} is not known in this direction"
        reason = self._unavailable()
        if reason is None and direction == BACKWARD:
            kind = Kind.of(case)
            return flash_attn_4.backward_refusal(kind.window, kind.softcap)
        return reason

    def default(self, case: Case, direction: str, machine: Machine) -> tuple[bool, int]:
        """`num_splits=1` is its default."""
        return False, 1

    def variant(
        self, case: Case, direction: str, use_clc: bool = False, divided: bool = False
    ) -> Variant:
        """Raises ValueError for packed sequences with KV splits."""
        if not divided:
            return Variant(Kind.of(case), release=self.release)
        if self.release is not None:
            raise ValueError(f"KV splits of {self.name} are not modelled")
        if case.packed:
            raise ValueError("packed sequences divided by flash-attn-4 are not modelled")
        # Costs follow how many rows a tile has.
        ratio = case.heads // case.heads_kv
        return Variant(
            Kind.of(case), divided=(min(case.seqlen_q, max(SINGLE_ROWS // ratio, 1)), ratio)
        )

    def forward(self, variant: Variant, machine: Machine, draws: int) -> Kernel:
        """Raises RuntimeError if it is not there."""
        self._require()
        found, tiling = replays(variant, machine, draws), variant.tiling
        costs = fitted(found, tiling.policy)
        return Kernel(self.name, tiling, machine.sampled(draws), costs, Paths.of(found))

    def backward(self, variant: Variant, machine: Machine, draws: int) -> Backward:
        """Return its dedicated backward at head_dim 256. Raises RuntimeError if it is not
        installed, ValueError for a kind that it refuses."""
        self._require()
        kind = variant.kind
        reason = flash_attn_4.backward_refusal(kind.window, kind.softcap)
        if reason:
            raise ValueError(f"{self.name}: {reason}")

        @functools.cache
        def costs(which: str) -> list[TileCosts]:
            place = BACKWARD_KERNELS.index(which)
            count = len(BACKWARD_SINGLE_SAMPLES)
            rows = backward_replays(kind, machine, draws, self.release)[place * count :][:count]
            found = fitted(rows, tiling.policy)
            if kind.packed:
                rows = [*rows, _empty_replays(kind, machine, draws)[place]]
                found = [replace(one, empty=clocks) for one, clocks in zip(found, rows[-1].clocks)]
            paths[which] = Paths.of(rows)
            return found

        tiling = BackwardTiling("single", False, False, KEYS)
        paths: dict[str, Paths] = {}
        return Backward(self.name, tiling, machine.sampled(draws), costs, paths=paths)

    def _unavailable(self) -> str | None:
        if self.release is not None:
            return releases.unavailable(self.release)
        return flash_attn_4.unavailable()

    def _require(self) -> None:
        reason = self._unavailable()
        if reason:
            raise RuntimeError(reason)


class FlashAttention4Divided(FlashAttention4):
    """flash-attn-4's forward with `num_splits=0`, where its rule splits the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.name = flash_attn_4.DIVIDED

    def replays(self, build: Build) -> bool:
        return False

    def refuses(self, case: Case, direction: str) -> str | None:
        if direction == BACKWARD:
            return f"its backward is that of {NAME}"
        if case.packed:
            return "packed sequences whose keys it divides are not modelled"
        if not split_numbers(case, B200.sms):
            return f"it divides no keys here: as {NAME}"
        return super().refuses(case, direction)

    def default(self, case: Case, direction: str, machine: Machine) -> tuple[bool, int]:
        """Return the choice of its rule."""
        numbers = split_numbers(case, int(machine.values().sms))
        return False, numbers[-1] if numbers else 1


#: Earlier commits that published rates are of.
HISTORY = tuple(FlashAttention4(one) for one in releases.RELEASES.values())


def split_numbers(case: Case, sms: int) -> range:
    """The numbers of parts above 1 that its rule picks from for a case."""
    left, right = case.bounds
    ratio = case.heads // case.heads_kv
    steps = -(-case.seqlen_k // KEYS)
    if left is not None:
        # Most keys that it takes a tile of a windowed call to load.
        most = left + (case.seqlen_k if right is None else right) + 1 + SINGLE_ROWS
        steps = -(-min(case.seqlen_k, most) // KEYS)
    tiles = case.batch * case.heads_kv * -(-case.seqlen_q * ratio // SINGLE_ROWS)
    return flash_attn_4_code.split_numbers(tiles, steps, sms)


def replays(
    variant: Variant, machine: Machine, draws: int, samples: Samples | None = None
) -> list[Replayed]:
    """One cluster on each of the samples, by default those of the variant: all tiles where it is
    persistent, else the longest one."""
    return kept(*_source(variant, samples or variant.samples()), machine, draws)


def traced(variant: Variant, samples: Samples | None = None) -> list[Traced]:
    """The programs of `replays`, in the order of the samples."""
    return programs(*_source(variant, samples or variant.samples()))


def _source(variant: Variant, samples: Samples) -> Source:
    alone = variant.kind.is_dense and not variant.divided
    run = functools.partial(traces.forward, _problems(variant, samples), alone)

    def trace() -> list[Traced]:
        found = _of_release(variant.release, run)
        return [
            Traced(program, *_sample_tiles(variant, sample))
            for sample, program in zip(samples, found, strict=True)
        ]

    return (_versions(variant.release), variant, samples, SEED), trace


def _versions(release: releases.Release | None) -> tuple[str, ...]:
    return flash_attn_4_code.versions() if release is None else release.versions


def _of_release(release: releases.Release | None, run: Callable[[], Any]) -> Any:
    """Run a function in the process of a release, or in this one if that is None; return its
    result."""
    return run() if release is None else releases.call(release, run)


def _problems(variant: Variant, samples: Samples) -> tuple[Problem, ...]:
    """Keys and values have the heads of the queries, but one with KV splits."""
    kind, found = variant.kind, []
    options: dict[str, Any] = {"num_splits": SAMPLE_SPLITS if variant.divided else 1}
    if kind.softcap:
        options["softcap"] = SAMPLE_SOFTCAP
    for sample in samples:
        queries, heads, left, keys = parts_of(sample)
        mask = {"window_size": (left, 0)} if kind.window else {"causal": kind.causal}
        found.append(Problem(
            queries, keys, (heads, 1 if variant.divided else heads), variant.head_dim,
            tuple((mask | options).items()), kind.packed,
        ))  # fmt: skip
    return tuple(found)


def _sample_tiles(variant: Variant, sample: tuple) -> tuple[int, float]:
    """Return (tiles, masked work in all) of what one cluster runs of a sample."""
    if variant.divided:
        return 1, 0.0
    if variant.tiling.policy == "single":
        return 1, max(forward_work(sample))[1]
    queries, heads, *_ = sample
    return -(-queries // variant.tiling.rows) * heads, 0.0


#: Names of `Backward`, and parts of the kernels' names.
BACKWARD_KERNELS, _NAMES = ("dq", "dkdv"), ("dqkernel", "dkdvkernel")


def backward_replays(
    kind: Kind, machine: Machine, draws: int, release: releases.Release | None = None
) -> list[Replayed]:
    """Return the replays of the longest cluster of each of `BACKWARD_KERNELS` on each of the
    samples."""
    return kept(*_backward_source(kind, release), machine, draws)


def _backward_source(kind: Kind, release: releases.Release | None) -> Source:
    problems = tuple(
        Problem(seqlen, seqlen, (heads, 1), HEAD_DIM,
                (("causal", kind.causal), ("num_splits", 1)), kind.packed)
        for seqlen, heads in BACKWARD_SINGLE_SAMPLES
    )  # fmt: skip

    def trace() -> list[Traced]:
        found = _of_release(release, functools.partial(traces.backward, problems, _NAMES))
        return [Traced(both[n], 1) for n in range(len(_NAMES)) for both in found]

    what = BACKWARD, HEAD_DIM, kind, BACKWARD_SINGLE_SAMPLES, SEED
    return (_versions(release), *what), trace


def _empty_replays(kind: Kind, machine: Machine, draws: int) -> list[Replayed]:
    """Return the replays of its dQ and dK/dV kernels of a cluster whose sequence is empty."""

    def trace() -> list[Traced]:
        return [Traced(found, 1) for found in traces.empty_backward(ROWS, kind.causal, _NAMES)]

    what = flash_attn_4_code.versions(), BACKWARD, HEAD_DIM, kind, "empty"
    return kept(what, trace, machine, draws)
