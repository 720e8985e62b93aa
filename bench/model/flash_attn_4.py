"""flash-attn-4's kernels on the timing model: replays of its own calls, and how it cuts tiles.

Full dense attention runs persistent clusters, all else one tile a cluster, the longest first. With
divided keys (`num_splits` above 1, and 0 where its rule divides) it takes one CTA for a tile of 128
rows, and a second kernel makes one result of the float32 parts. Its backward at head_dim 256 has a
dQ and a dK/dV kernel of one tile a cluster, blocks ascending.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.peers import flash_attn_4
from bench.suite import BACKWARD, Case
from bench.tables.paths import Paths
from fa4_hd256.kernels.limits import HEAD_DIM
from sm100_sim import timing
from sm100_sim.timing import Machine, TileCosts

from .backward import Backward
from .calls import Kind
from .forward import Kernel
from .published.rows import FLASH_ATTENTION, Build
from .replays import (
    SEED,
    Replayed,
    Source,
    Traced,
    fitted,
    kept,
    of_kernels,
    one_cluster,
    programs,
    seeded,
)
from .samples import (
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
from .tiles import KEYS, ROWS, BackwardTiling, ForwardTiling

NAME, SINGLE_ROWS = flash_attn_4.PACKAGE, flash_attn_4.SINGLE_ROWS
#: Samples with divided keys: (left bound of windowed ones, keys).
SPLIT_SAMPLES = ((None, 1024), (None, 2048), (None, 4096))
SPLIT_WINDOW_SAMPLES = ((511, 1024), (1023, 2048), (2047, 4096))


@dataclass(frozen=True)
class Variant:
    """One of its kernels.

    head_dim: 128 or 256; 128 for dense kinds alone. divided: (queries, query heads of a KV head) of
    a tile of the kernel with divided keys, None for the other one.
    """

    kind: Kind
    head_dim: int = HEAD_DIM
    divided: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.head_dim not in (128, 256):
            raise ValueError(f"head_dim {self.head_dim}; known here are 128 and 256")

    @property
    def tiling(self) -> ForwardTiling:
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
        """What costs are fitted to."""
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
    """Its kernels, as `predictor.Provider`."""

    name = NAME

    def version(self) -> str:
        return flash_attn_4.versions()[0]

    def replays(self, build: Build) -> bool:
        package, cutlass_dsl, _ = flash_attn_4.versions()
        return build == Build(FLASH_ATTENTION, package, cutlass_dsl)

    def refuses(self, case: Case, direction: str) -> str | None:
        reason = flash_attn_4.unavailable()
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
        """Raises ValueError for packed sequences whose keys are divided."""
        if not divided:
            return Variant(Kind.of(case))
        if case.packed:
            raise ValueError("packed sequences divided by flash-attn-4 are not modelled")
        # Costs follow how many rows a tile has.
        ratio = case.heads // case.heads_kv
        return Variant(
            Kind.of(case), divided=(min(case.seqlen_q, max(SINGLE_ROWS // ratio, 1)), ratio)
        )

    def forward(self, variant: Variant, machine: Machine, draws: int) -> Kernel:
        """Raises RuntimeError if it is not installed."""
        _require()
        found, tiling = replays(variant, machine, draws), variant.tiling
        costs = fitted(found, tiling.policy)
        return Kernel(self.name, tiling, machine.sampled(draws), costs, Paths.of(found))

    def backward(self, variant: Variant, machine: Machine, draws: int) -> Backward:
        """Its dedicated backward at head_dim 256.

        Raises RuntimeError if it is not installed, ValueError for a kind that it refuses.
        """
        _require()
        kind = variant.kind
        reason = flash_attn_4.backward_refusal(kind.window, kind.softcap)
        if reason:
            raise ValueError(f"{self.name}: {reason}")

        @functools.cache
        def costs(which: str) -> list[TileCosts]:
            place = BACKWARD_KERNELS.index(which)
            count = len(BACKWARD_SINGLE_SAMPLES)
            rows = backward_replays(kind, machine, draws)[place * count :][:count]
            found = fitted(rows, tiling.policy)
            if kind.packed:
                rows = [*rows, _empty_replays(kind, machine, draws)[place]]
                found = [replace(one, empty=clocks) for one, clocks in zip(found, rows[-1].clocks)]
            paths[which] = Paths.of(rows)
            return found

        tiling = BackwardTiling("single", False, False, KEYS)
        paths: dict[str, Paths] = {}
        return Backward(self.name, tiling, machine.sampled(draws), costs, paths=paths)


def _require() -> None:
    reason = flash_attn_4.unavailable()
    if reason:
        raise RuntimeError(reason)


def split_numbers(case: Case, sms: int) -> range:
    """The numbers of parts above 1 that its rule picks from for a case."""
    left, right = case.bounds
    ratio = case.heads // case.heads_kv
    steps = -(-case.seqlen_k // KEYS)
    if left is not None:
        # What it takes a tile of a windowed call to load at most.
        most = left + (case.seqlen_k if right is None else right) + 1 + SINGLE_ROWS
        steps = -(-min(case.seqlen_k, most) // KEYS)
    tiles = case.batch * case.heads_kv * -(-case.seqlen_q * ratio // SINGLE_ROWS)
    return flash_attn_4.split_numbers(tiles, steps, sms)


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
    def trace() -> list[Traced]:
        predictions = _forward_predictions(variant, samples)
        return [
            Traced.of(prediction, *_sample_tiles(variant, sample))
            for sample, prediction in zip(samples, predictions, strict=True)
        ]

    return (flash_attn_4.versions(), variant, samples, SEED), trace


def _sample_tiles(variant: Variant, sample: tuple) -> tuple[int, float]:
    """(tiles, masked work in all) of what one cluster runs of a sample."""
    if variant.divided:
        return 1, 0.0
    if variant.tiling.policy == "single":
        return 1, max(forward_work(sample))[1]
    queries, heads, *_ = sample
    return -(-queries // variant.tiling.rows) * heads, 0.0


def _forward_predictions(
    variant: Variant, samples: Iterable[tuple]
) -> list[timing.Prediction]:
    """Through its public functions; keys and values have the heads of the queries, but one where
    keys are divided."""
    kind = variant.kind
    options: dict[str, Any] = {"num_splits": SAMPLE_SPLITS if variant.divided else 1}
    if kind.softcap:
        options["softcap"] = SAMPLE_SOFTCAP
    is_dense = kind.is_dense and not variant.divided
    alone = one_cluster() if is_dense else contextlib.nullcontext()
    with timing.attached(draws=0) as session, alone, seeded():
        for sample in samples:
            queries, heads, left, keys = parts_of(sample)
            mask = {"window_size": (left, 0)} if kind.window else {"causal": kind.causal}
            heads_kv = 1 if variant.divided else heads
            shapes = ((queries, heads), (keys, heads_kv), (keys, heads_kv))
            _attention(_random(shapes, variant), kind, **mask, **options)
    # Each call with divided keys launches the kernel that makes one result of the parts, too.
    return [found for found in session.predictions if "combine" not in found.report.kernel.lower()]


def _random(
    shapes: Iterable[tuple[int, int]], variant: Variant
) -> list[torch.Tensor]:
    """q, k and v of one sequence, standard normal, without a batch where they are packed. shapes:
    (rows, heads) of each."""
    tensors = [
        torch.randn(1, *shape, variant.head_dim, dtype=torch.bfloat16, device="cuda")
        for shape in shapes
    ]
    return [tensor[0] for tensor in tensors] if variant.kind.packed else tensors


def _attention(leaves: list[torch.Tensor], kind: Kind, **options: Any) -> torch.Tensor:
    """leaves: q, k, v of one sequence."""
    packed, (q, k, v) = None, leaves
    if kind.packed:
        of_q, of_k = (
            (torch.tensor([0, len(t)], dtype=torch.int32, device="cuda"), len(t)) for t in (q, k)
        )
        packed = of_q, of_k
    return flash_attn_4.attention(q, k, v, packed, **options)


#: As `Backward` names them, and parts of their names.
BACKWARD_KERNELS, _NAMES = ("dq", "dkdv"), ("dqkernel", "dkdvkernel")


def backward_replays(kind: Kind, machine: Machine, draws: int) -> list[Replayed]:
    """Of each of `BACKWARD_KERNELS` the longest cluster on each of the samples."""
    return kept(*_backward_source(kind), machine, draws)


def backward_traced(kind: Kind) -> list[Traced]:
    """The programs of `backward_replays`."""
    return programs(*_backward_source(kind))


def _backward_source(kind: Kind) -> Source:
    def trace() -> list[Traced]:
        found = [_backward_predictions(sample, kind) for sample in BACKWARD_SINGLE_SAMPLES]
        return [Traced.of(both[n], 1) for n in range(2) for both in found]

    return (flash_attn_4.versions(), BACKWARD, HEAD_DIM, kind, BACKWARD_SINGLE_SAMPLES, SEED), trace


def _backward_predictions(
    sample: tuple[int, int], kind: Kind
) -> list[timing.Prediction]:
    """Its dQ and dK/dV kernels, each on its longest cluster, through its own interface."""
    seqlen, heads = sample
    with timing.attached(draws=0) as session, one_cluster(), seeded():
        leaves = _random([(seqlen, n) for n in (heads, 1, 1)], Variant(kind))
        for leaf in leaves:
            leaf.requires_grad_()
        out = _attention(leaves, kind, causal=kind.causal, num_splits=1)
        out.backward(torch.randn_like(out))
    return of_kernels(session.predictions, *_NAMES)


def _empty_replays(kind: Kind, machine: Machine, draws: int) -> list[Replayed]:
    """Its dQ and dK/dV kernels, a cluster whose sequence is empty."""

    def trace() -> list[Traced]:
        with timing.attached(draws=0) as session, one_cluster():
            flash_attn_4.backward_of_an_empty_sequence(ROWS, kind.causal)
        return [Traced.of(found, 1) for found in of_kernels(session.predictions, *_NAMES)]

    what = flash_attn_4.versions(), BACKWARD, HEAD_DIM, kind, "empty"
    return kept(what, trace, machine, draws)
