"""A forward kernel on the timing model: what a tile costs, and whole problems from that.

The costs come from replays of one cluster that runs a few tiles of small problems (`replays`); a
problem of any size is then a list of tiles (`tiles`) that a discrete-event run places on all
clusters (`lab.whole.problem`). Nothing here is measured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from bench.suite import Case
from fa4_hd256.kernels.limits import HEAD_DIM
from lab.model.machines import memory_seconds
from lab.model.tiles import ForwardTiling, forward_tiles
from lab.paths import Paths
from lab.whole.conditions import Call
from lab.whole.problem import Schedule, TileCosts, Tiles, schedule
from sm100_sim.timing import Values


@dataclass(frozen=True)
class Kernel:
    """A forward kernel and what its tiles cost. values, costs: one of each replay, the central one
    first. paths: of the replays. last_wave: of a case whose last tiles are a launch of their own,
    with KV splits, else None."""

    name: str
    tiling: ForwardTiling
    values: list[Values]
    costs: list[TileCosts]
    paths: Paths = Paths()
    last_wave: Callable[[Case], InTwo | None] = lambda case: None

    def divided(self, num_splits: int) -> Kernel:
        tiling = replace(self.tiling, num_splits=num_splits)
        return replace(self, tiling=tiling, last_wave=lambda case: None)

    def run(self, case: Case) -> list[Schedule]:
        """The case under each of the drawn machines, the central one first."""
        tiles, how = _tiles(case, self.tiling), self.tiling
        return [
            schedule(tiles, costs, values, how.cluster, how.policy, how.prefetches, how.claims)
            for costs, values in zip(self.costs, self.values)
        ]

    def calls(self, case: Case) -> list[Call]:
        """A call for each of the drawn machines, the central one first. With KV splits, the kernel
        that combines them is included."""
        in_two = self.last_wave(case)
        if in_two is not None:
            behind = in_two.kernel.calls(in_two.rest)
            return [
                Call([(1, found), *one.schedules], one.beside)
                for found, one in zip(self.run(in_two.first), behind)
            ]
        parts, early = self.tiling.num_splits, self.tiling.dependent
        return [
            Call([(1, found)], combine_seconds(case, parts, values, early) if parts > 1 else 0.0)
            for found, values in zip(self.run(case), self.values)
        ]

    def paths_of(self, case: Case) -> Paths:
        in_two = self.last_wave(case)
        return self.paths if in_two is None else self.paths + in_two.kernel.paths

    def seconds(self, case: Case) -> np.ndarray:
        """float64, predicted for each of the drawn machines, the central one first."""
        calls = zip(self.calls(case), self.values)
        return np.array([one.seconds(values) for one, values in calls])


@dataclass(frozen=True)
class InTwo:
    """Two launches of a case: its first queries, then the rest by a kernel with KV splits."""

    first: Case
    rest: Case
    kernel: Kernel


@functools.lru_cache(maxsize=64)
def _tiles(case: Case, tiling: ForwardTiling) -> Tiles:
    return Tiles.of(forward_tiles(case, tiling))


def combine_seconds(case: Case, splits: int, values: Values, dependent: bool = False) -> float:
    """Return the seconds of the kernel that makes one result of the splits.  dependent: launched as
    one."""
    if dependent:
        values = values._replace(launch_us=values.dependent_launch_us)
    rows = sum(q for q, _ in case.lengths) * case.heads
    nbytes = rows * (splits * (4 * HEAD_DIM + 4) + 2 * HEAD_DIM + 4)
    return memory_seconds(nbytes, values)
