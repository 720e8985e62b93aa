"""What is kept of replays on the timing model: clocks and work, in memory and on disk.

A prediction simulates a kernel and replays it several times, which takes from seconds to a minute.
What a whole problem needs of it is a few numbers. They are kept in the cache directory under a key
of everything they depend on: the kernel, the problem replayed, the machine's constants, and the
code of the timing model. Deleting the directory is always safe. `fitted` makes costs of a tile of
them.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fa4_hd256.environment import CACHE_DIR, cache_directory
from fa4_hd256.run.native_cache import NativeCache
from sm100_sim import timing
from sm100_sim.timing import Machine, Sample, TileCosts, fit


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


def replayed(prediction: timing.Prediction, tiles: int, masked: float = 0.0) -> Replayed:
    """What is kept of a prediction."""
    compiled = prediction.compiled
    action, sms = compiled.program.action, compiled.program.sms
    work = sum(c.compute * int(action[e, 4]) / sms for e, c in compiled.mma.items())
    clocks = tuple(map(float, prediction.clocks))
    return Replayed(tiles, work, clocks, compiled.unmatched, compiled.ambiguous, masked)


def fitted(rows: Sequence[Replayed], policy: str) -> list[TileCosts]:
    """Costs of a tile for each of the replays' machines. policy: see `problem.POLICIES`."""
    return [
        fit([Sample(r.tiles, r.work, r.clocks[n], r.masked) for r in rows], policy == "single")
        for n in range(len(rows[0].clocks))
    ]


#: Of random inputs: how often O is rescaled depends on them.
SEED = 0


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Random tensors made inside are the same each time; the generators' state is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        yield


@contextlib.contextmanager
def one_cluster() -> Iterator[None]:
    """Persistent kernels that ask CuTe DSL for the number of SMs get two."""
    from cutlass.utils import HardwareInfo

    saved = HardwareInfo.get_device_multiprocessor_count
    HardwareInfo.get_device_multiprocessor_count = lambda self: 2
    try:
        yield
    finally:
        HardwareInfo.get_device_multiprocessor_count = saved


def of_kernels(
    predictions: Sequence[timing.Prediction], *parts: str
) -> list[timing.Prediction]:
    """Of the launches of one call, that of the kernel with each of the parts in its name.

    Raises RuntimeError where a part does not name exactly one of them.
    """
    found = []
    for part in parts:
        named = [p for p in predictions if part in p.report.kernel.lower()]
        if len(named) != 1:
            kernels = [p.report.kernel for p in predictions]
            raise RuntimeError(f"expected one kernel with {part!r} in its name, found {kernels}")
        found += named
    return found


_memory: dict[str, list[Replayed]] = {}


def kept(
    what: Sequence[Any], machine: Machine, draws: int, make: Callable[[], list[Replayed]]
) -> list[Replayed]:
    """The replays that `make` gives, from the cache if it has run before.

    what: what is replayed, anything whose `repr` says it in full; for a kernel `digest` of its
    cubin, or the versions of the packages that make it. draws: replays beside the central one.
    """
    constants = sorted((name, c.value, c.low, c.high) for name, c in machine.constants.items())
    text = repr((tuple(what), constants, draws, timing.model_digest()))
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    if key in _memory:
        return _memory[key]
    cache = NativeCache(cache_directory() / "replays", "replays", CACHE_DIR.name)
    header, _, _ = cache.obtain(
        f"{key}.replays", lambda: ({"rows": [asdict(row) for row in make()]}, [])
    )
    found = [Replayed(**{**row, "clocks": tuple(row["clocks"])}) for row in header["rows"]]
    _memory[key] = found
    return found


def digest(content: bytes) -> str:
    """A short name of some bytes."""
    return hashlib.sha256(content).hexdigest()[:16]
