"""Cache of kernels on the timing model: traced programs, and the clocks of their replays.

Simulating a kernel and matching its trace takes from seconds to a minute, a replay of what comes of
it some 20 ms. Programs are stored in the cache directory under a key of the kernel, the problem and
the code that traces them, so that any set of constants can be tried on them; the clocks of replays
under a key that has the constants and the rest of the model's code besides. Deleting the directory
is always safe. `fitted` makes costs of a tile of replays.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from fa4_hd256 import progress
from fa4_hd256.environment import CACHE_DIR, cache_directory
from fa4_hd256.run.native_cache import NativeCache
from lab.whole.problem import Sample, TileCosts, fit
from sm100_sim import timing
from sm100_sim.timing import Machine


@dataclass(frozen=True)
class Replayed:
    """One cluster's run of a small problem.

    tiles: that it worked on. work: clocks of the tensor core of one of its CTAs. clocks: of the
    replays, the one with the central constants first. unmatched, ambiguous: as in `Prediction`.
    masked: the part of the work in masked steps, where masked and unmasked ones are told apart.
    """

    tiles: int
    work: float
    clocks: tuple[float, ...]
    unmatched: int = 0
    ambiguous: int = 0
    masked: float = 0.0


@dataclass(frozen=True)
class Traced:
    """One cluster's program of a small problem, to be replayed under any constants; tiles, masked:
    see `Replayed`."""

    program: timing.StoredProgram
    tiles: int
    masked: float = 0.0

    @classmethod
    def of(cls, prediction: timing.Prediction, tiles: int, masked: float = 0.0) -> Traced:
        return cls(timing.StoredProgram.of(prediction.compiled), tiles, masked)

    def replayed(self, values: Iterable[timing.Values]) -> Replayed:
        """Replay it under each set of constants. Raises ReplayError if a replay hangs."""
        one = self.program
        clocks = tuple(float(timing.replay_program(one, drawn).clocks) for drawn in values)
        return Replayed(
            self.tiles, one.work, clocks, one.unmatched, one.ambiguous, self.masked
        )  # fmt: skip


def fitted(rows: Sequence[Replayed], policy: str) -> list[TileCosts]:
    """Costs of a tile for each of the replays' machines. policy: see `problem.POLICIES`."""
    return [
        fit([Sample(r.tiles, r.work, r.clocks[n], r.masked) for r in rows], policy == "single")
        for n in range(len(rows[0].clocks))
    ]


def with_least(
    costs: Sequence[TileCosts], few: Replayed, many: Replayed, step: float
) -> list[TileCosts]:
    """Costs with what a tile takes at least. few, many: replays of tiles of one step, which heads
    may share, so that their work counts them. step: work of one."""
    tiles = (many.work - few.work) / step
    return [
        replace(one, least=(more - less) / tiles)
        for one, less, more in zip(costs, few.clocks, many.clocks, strict=True)
    ]


#: Seed of random inputs: how often O is rescaled depends on them.
SEED = 0


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Random tensors made inside are the same each time; the generators' state is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        yield


@contextlib.contextmanager
def one_cluster() -> Iterator[None]:
    """Give persistent kernels that query CuTe DSL for the number of SMs two."""
    from cutlass.utils import HardwareInfo

    saved = HardwareInfo.get_device_multiprocessor_count
    HardwareInfo.get_device_multiprocessor_count = lambda self: 2
    try:
        yield
    finally:
        HardwareInfo.get_device_multiprocessor_count = saved


def of_kernels(predictions: Sequence[timing.Prediction], *parts: str) -> list[timing.Prediction]:
    """Return, of the launches of one call, that of the kernel with each of the parts in its name.
    Raises RuntimeError where a part does not name exactly one of them."""
    found = []
    for part in parts:
        named = [p for p in predictions if part in p.report.kernel.lower()]
        if len(named) != 1:
            kernels = [p.report.kernel for p in predictions]
            raise RuntimeError(f"expected one kernel with {part!r} in its name, found {kernels}")
        found += named
    return found


#: Traced call and its tracer: the first two arguments of `kept`, those of `programs`.
Source = tuple[Sequence[Any], Callable[[], "list[Traced]"]]

_memory: dict[str, list[Traced]] = {}


def programs(what: Sequence[Any], trace: Callable[[], list[Traced]]) -> list[Traced]:
    """The traced programs that `trace` gives, from the cache if it has run before. what: what is
    traced, anything whose `repr` says it in full; for a kernel `digest` of its cubin, or the
    versions of the packages that make it."""
    key = _key(tuple(what), timing.trace_digest())
    if key not in _memory:
        with replaying():
            header, parts, _ = _cache().obtain(f"{key}.programs", lambda: _packed(trace()))
        _memory[key] = [
            Traced(timing.StoredProgram.from_bytes(part), tiles, masked)
            for part, (tiles, masked) in zip(parts, header["rows"], strict=True)
        ]
    return _memory[key]


@contextlib.contextmanager
def replaying() -> Iterator[None]:
    """Show that kernels are replayed, where no step that says which is under way."""
    if progress.is_under_way("replaying"):
        yield
    else:
        with progress.step("replaying"):
            yield


def _packed(rows: Sequence[Traced]) -> tuple[dict[str, Any], list[bytes]]:
    header = {"rows": [[row.tiles, row.masked] for row in rows]}
    return header, [row.program.as_bytes() for row in rows]


def kept(
    what: Sequence[Any], trace: Callable[[], list[Traced]], machine: Machine, draws: int
) -> list[Replayed]:
    """Replays of the programs that `trace` gives, from the cache if they have been made before.
    what, trace: see `programs`. draws: replays beside the central one."""
    values = machine.sampled(draws)
    key = _key(tuple(what), [tuple(drawn) for drawn in values], timing.model_digest())

    def make() -> tuple[dict[str, Any], list[bytes]]:
        traced = programs(what, trace)
        with replaying():
            return {"rows": [asdict(one.replayed(values)) for one in traced]}, []

    header, _, _ = _cache().obtain(f"{key}.replays", make)
    return [Replayed(**{**row, "clocks": tuple(row["clocks"])}) for row in header["rows"]]


def _cache() -> NativeCache:
    return NativeCache(cache_directory() / "replays", "replays", CACHE_DIR.name)


def _key(*what: Any) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:32]


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
