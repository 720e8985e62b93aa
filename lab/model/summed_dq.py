"""A backward of one kernel that adds up dQ in float32, as flash-attn-4's: its tiles, its launches.

A tile's keys stay in a cluster and pass the queries of one head; each step adds to dQ. Where a KV
head has several query heads dK and dV are added up, too. Kernels around it set sums to zero before
and convert them after.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from bench.suite import Case
from lab.model.backward import FLOAT_BYTES, Backward
from lab.model.calls import Chunk
from lab.model.machines import memory_seconds
from lab.model.tiles import PARTIAL_ROW, ROW, key_steps
from lab.paths import Paths
from lab.whole.problem import Schedule, Tile, Tiles, schedule
from sm100_sim.timing import Values

#: Names of the kernel: where dK and dV leave at once, and where they are added up.
WHOLE, PARTIAL = "whole", "partial"


class Step(NamedTuple):
    """keys: of a tile. queries: of a step. work: of a step, as `Tile.work`. cluster: CTAs of a
    tile."""

    keys: int
    queries: int
    work: float
    cluster: int


@dataclass(frozen=True, kw_only=True)
class SummedDq(Backward):
    """Launches of such a backward. Kernels: `WHOLE` and `PARTIAL`."""

    step: Step

    def plan(self, case: Case) -> list[Chunk]:
        return [Chunk(case, 1, False)]

    def run(self, chunk: Chunk) -> dict[str, list[Schedule]]:
        which, tiles = kernel_of(chunk.case), tiles_of(chunk.case, self.step)
        return {
            which: [
                schedule(tiles, costs, values, self.step.cluster, self.tiling.policy)
                for costs, values in zip(self.costs(which), self.values)
            ]
        }

    def paths_of(self, case: Case) -> Paths:
        return self.paths.get(kernel_of(case), Paths())

    def _beside(self, case: Case, chunks: Sequence[Chunk], values: Values) -> float:
        rows, keys = (sum(side) for side in zip(*case.lengths))
        sums = rows * case.heads * PARTIAL_ROW
        # out and dout read, LSE read, LSE and delta and the zeros of dQ written; dQ converted.
        nbytes = [rows * case.heads * (2 * ROW + 3 * FLOAT_BYTES) + sums, sums * 1.5]
        if kernel_of(case) == PARTIAL:
            # Zeros, and both converted.
            nbytes += [keys * case.heads_kv * PARTIAL_ROW * times for times in (1, 1, 1.5, 1.5)]
        return sum(memory_seconds(n, values) for n in nbytes)


def kernel_of(case: Case) -> str:
    """`WHOLE` or `PARTIAL`."""
    return WHOLE if case.heads == case.heads_kv else PARTIAL


@functools.lru_cache(maxsize=64)
def tiles_of(case: Case, step: Step) -> Tiles:
    """Return the tiles in order: keys ascending, one query head after the other."""
    ratio, added = case.heads // case.heads_kv, kernel_of(case) == PARTIAL

    @functools.cache
    def of(block: int, lengths: tuple[int, int]) -> Tile:
        begin, (seqlen_q, seqlen_k), (left, right) = block * step.keys, lengths, case.bounds
        rows = min(seqlen_k - begin, step.keys)
        if rows <= 0:
            return Tile(0.0)
        # The mask of the transposed scores is the same one with its sides exchanged.
        sides = (right, left)
        steps, _ = key_steps(begin, begin + rows, (seqlen_k, seqlen_q), sides, step.queries)
        reads, writes = 2 * ROW * rows, 2 * (PARTIAL_ROW / ratio if added else ROW) * rows
        return Tile(step.work * steps, own_bytes=reads + writes, reads=reads, writes=writes)

    found = []
    for batch, lengths in enumerate(case.lengths):
        # Q and dO, and dQ in float32, read and written.
        shared = lengths[0] * (2 * ROW + 2 * PARTIAL_ROW)
        for head in range(case.heads):
            group = batch * case.heads + head
            found += [
                replace(of(block, lengths), group=group, shared_bytes=shared)
                for block in range(-(-case.seqlen_k // step.keys))
            ]
    return Tiles.of(found)
