"""cuDNN's CuTe DSL kernels (FROST) on the timing model: replays of its own calls, in its own order.

Its forward takes tiles of 256 queries over by cluster launch control; two of the steps of a causal
tile are masked, and slower. Heads are not packed. Its backward is in `frost_backward`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.peers import frost, releases
from bench.suite import BACKWARD, Case
from bench.tables.paths import Paths
from fa4_hd256.kernels.limits import HEAD_DIM
from sm100_sim import timing
from sm100_sim.timing import Machine, TileCosts

from .calls import Kind
from .forward import Kernel
from .frost_backward import KERNELS, FrostBackward
from .machines import simulating, target_of
from .published.rows import FROST, Build
from .replays import SEED, Replayed, Source, Traced, fitted, kept, programs, seeded
from .samples import (
    BACKWARD_SAMPLES,
    PERSISTENT_SAMPLES,
    WINDOW_SAMPLES,
    Samples,
    forward_work,
    parts_of,
)
from .tiles import KEYS, ROWS, ForwardTiling


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
    """What of a case is compiled in. versions: as `bench.peers.frost.versions` gives them. release:
    None for the installed one; not in the text by which programs are kept, which has the versions.
    """

    kind: Kind
    versions: tuple[str, ...] = ()
    release: releases.FrostRelease | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.versions:
            object.__setattr__(self, "versions", frost.versions())

    def samples(self) -> Samples:
        """What costs are fitted to."""
        return WINDOW_SAMPLES if self.kind.window else PERSISTENT_SAMPLES


class Frost:
    """Its kernels, as `predictor.Provider`. release: another than the installed one."""

    def __init__(self, release: releases.FrostRelease | None = None) -> None:
        self.release = release
        self.name = frost.NAME if release is None else f"{frost.NAME} {' '.join(release.versions)}"

    def version(self) -> str:
        return self._versions()[0]

    def _versions(self) -> tuple[str, ...]:
        return frost.versions() if self.release is None else self.release.versions

    def replays(self, build: Build) -> bool:
        """Where a plan is named, the one that it takes here: undivided keys, heads by themselves.
        Which of the orders it is follows from the case, as in the plans of its heuristics."""
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
        """Always CLC, which is no choice of the call; keys are not divided."""
        return False, 1

    def variant(
        self, case: Case, direction: str, use_clc: bool = False, divided: bool = False
    ) -> Variant:
        """Raises ValueError where keys are to be divided."""
        if divided:
            raise ValueError(f"{self.name} with divided keys is not modelled")
        return Variant(Kind.of(case), self._versions(), self.release)

    def forward(self, variant: Variant, machine: Machine, draws: int) -> Kernel:
        """Raises RuntimeError if it is not installed."""
        found = replays(variant, machine, draws)
        tiling = Tiling("dynamic")
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


def backward_traced(variant: Variant, machine: Machine) -> list[Traced]:
    """The programs of the kernels of its backward, `KERNELS`, each on `BACKWARD_SAMPLES`."""
    return programs(*_backward_source(variant, machine))


def backward_replays(variant: Variant, machine: Machine, draws: int) -> list[Replayed]:
    """One cluster that runs every tile of each, in the order of `backward_traced`."""
    return kept(*_backward_source(variant, machine), machine, draws)


def _of_release(variant: Variant, run: Callable[..., Any], machine: Machine) -> Any:
    """What `run(variant, machine)` returns, in the process of the variant's release if it has one.

    Raises RuntimeError where no release is named and another build than the variant's is installed.
    """
    if variant.release is not None:
        return releases.call(variant.release, functools.partial(run, variant, machine))
    reason = frost.unavailable()
    if reason is None and frost.versions() != variant.versions:
        reason = f"{frost.NAME} {variant.versions} is to be traced, {frost.versions()} is there"
    if reason:
        raise RuntimeError(reason)
    return run(variant, machine)


@contextlib.contextmanager
def _tracing(machine: Machine) -> Iterator[None]:
    """What is called inside is compiled for the machine's GPU."""
    with simulating(machine), seeded():
        frost.forget_compiled()
        yield


def _forward_source(variant: Variant, machine: Machine) -> Source:
    def trace() -> list[Traced]:
        found = []
        runs = _of_release(variant, forward_programs, machine)
        for sample, program in zip(variant.samples(), runs, strict=True):
            work = forward_work(sample)
            found.append(Traced(program, len(work), sum(masked for _, masked in work)))
        return found

    return (frost.NAME, variant, target_of(machine), variant.samples(), SEED), trace


def forward_programs(variant: Variant, machine: Machine) -> list[timing.StoredProgram]:
    """Of each of the variant's samples, through its class; keys and values have one head."""
    forward, kind = frost.Forward(), variant.kind
    with _tracing(machine), timing.attached(draws=0) as session:
        for sample in variant.samples():
            queries, heads, left, keys = parts_of(sample)
            q, k, v = _random((queries, heads), (keys, 1), (keys, 1))
            forward(q, k, v, causal=kind.causal, left=left if kind.window else None)
    return _programs(session)


def _programs(session: Any) -> list[timing.StoredProgram]:
    return [timing.StoredProgram.of(found.compiled) for found in session.predictions]


def _random(*shapes: tuple[int, int]) -> list[torch.Tensor]:
    """Rows of one sequence, standard normal. shapes: (rows, heads) of each."""
    return [
        torch.randn(1, *shape, HEAD_DIM, dtype=torch.bfloat16, device="cuda") for shape in shapes
    ]


#: Parts of the names of its kernels that only read and write.
_BESIDE = "fill", "dot", "reduce"


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


def backward_programs(
    variant: Variant, machine: Machine
) -> list[list[timing.StoredProgram]]:
    """Of each of `BACKWARD_SAMPLES` its three kernels, in their order. O and LSE are its own
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
