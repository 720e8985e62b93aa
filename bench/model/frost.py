"""cuDNN's CuTe DSL kernels (FROST) on the timing model: replays of its own calls, in its own order.

Its forward takes tiles of 256 queries over by cluster launch control; two of the steps of a causal
tile are masked, and slower. Heads are not packed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bench.peers import frost
from bench.suite import BACKWARD, Case
from bench.tables.paths import Paths
from fa4_hd256.kernels.limits import HEAD_DIM
from sm100_sim import timing
from sm100_sim.timing import Machine

from .backward import Backward
from .calls import Kind
from .forward import Kernel
from .machines import simulating, target_of
from .published.rows import FROST, Build
from .replays import SEED, Replayed, Source, Traced, fitted, kept, programs, seeded
from .samples import PERSISTENT_SAMPLES, WINDOW_SAMPLES, Samples, forward_work, parts_of
from .tiles import ForwardTiling


@dataclass(frozen=True)
class Tiling(ForwardTiling):
    """Tiles of its forward, in its own order."""

    def places(self, case: Case) -> Iterator[tuple[int, int, int]]:
        blocks = -(-case.seqlen_q // self.rows)
        causal = case.bounds[1] is not None
        return frost.forward_order(
            blocks, case.batch, case.heads, case.heads_kv, case.seqlen_k, causal
        )


@dataclass(frozen=True)
class Variant:
    """One of its forwards. versions: as `bench.peers.frost.versions` gives them."""

    kind: Kind
    versions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.versions:
            object.__setattr__(self, "versions", frost.versions())

    def samples(self) -> Samples:
        """What costs are fitted to."""
        return WINDOW_SAMPLES if self.kind.window else PERSISTENT_SAMPLES


class Frost:
    """Its kernels, as `predictor.Provider`. release: versions of another build than the installed
    one, whose programs have been traced before."""

    def __init__(self, release: tuple[str, ...] = ()) -> None:
        self.name = frost.NAME if not release else f"{frost.NAME} {release[0]}"
        self._release = release

    def version(self) -> str:
        return self._versions()[0]

    def _versions(self) -> tuple[str, ...]:
        return self._release or frost.versions()

    def replays(self, build: Build) -> bool:
        return build.project == FROST and build.version == self.version()

    def refuses(self, case: Case, direction: str) -> str | None:
        reason = None if self._release else frost.unavailable()
        if reason is None and direction == BACKWARD:
            reason = "its backward is not modelled"
        return reason or frost.forward_refusal(case.packed, bool(case.softcap), case.bounds[1])

    def default(self, case: Case, direction: str, machine: Machine) -> tuple[bool, int]:
        """Always CLC, which is no choice of the call; keys are not divided."""
        return False, 1

    def variant(
        self, case: Case, direction: str, use_clc: bool = False, divided: bool = False
    ) -> Variant:
        """Raises ValueError where keys are to be divided."""
        if divided:
            raise ValueError(f"{self.name} with divided keys is not modelled")
        return Variant(Kind.of(case), self._versions())

    def forward(self, variant: Variant, machine: Machine, draws: int) -> Kernel:
        """Raises RuntimeError if it is not installed, or of another build not traced."""
        found = replays(variant, machine, draws)
        tiling = Tiling("dynamic")
        costs = fitted(found, tiling.policy)
        return Kernel(self.name, tiling, machine.sampled(draws), costs, Paths.of(found))

    def backward(self, variant: Variant, machine: Machine, draws: int) -> Backward:
        raise ValueError(f"{self.name}'s backward is not modelled")


def traced(variant: Variant, machine: Machine) -> list[Traced]:
    """The programs of its forward on the machine's kind of GPU, in the order of the samples."""
    return programs(*_forward_source(variant, machine))


def replays(variant: Variant, machine: Machine, draws: int) -> list[Replayed]:
    """One cluster on each of the variant's samples, every tile of them run by it."""
    return kept(*_forward_source(variant, machine), machine, draws)


def _forward_source(variant: Variant, machine: Machine) -> Source:
    def trace() -> list[Traced]:
        reason = frost.unavailable()
        if reason is None and frost.versions() != variant.versions:
            reason = f"{frost.NAME} {variant.versions} is to be traced, {frost.versions()} is there"
        if reason:
            raise RuntimeError(reason)
        with simulating(machine):
            frost.forget_compiled()
            predictions = _forward_predictions(variant)
        found = []
        for sample, prediction in zip(variant.samples(), predictions, strict=True):
            work = forward_work(sample)
            found.append(Traced.of(prediction, len(work), sum(masked for _, masked in work)))
        return found

    return (frost.NAME, variant, target_of(machine), variant.samples(), SEED), trace


def _forward_predictions(variant: Variant) -> list[timing.Prediction]:
    """Through its class; keys and values have one head."""
    forward, kind = frost.Forward(), variant.kind
    with timing.attached(draws=0) as session, seeded():
        for sample in variant.samples():
            queries, heads, left, keys = parts_of(sample)
            q, k, v = (
                torch.randn(1, rows, n, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
                for rows, n in ((queries, heads), (keys, 1), (keys, 1))
            )
            forward(q, k, v, causal=kind.causal, left=left if kind.window else None)
    return session.predictions
