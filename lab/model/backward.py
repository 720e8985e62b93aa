"""A backward on the timing model: its two kernels on CTA pairs, and what runs beside them.

These are dQ and dK/dV, or where ours keep dS that of dV and the products of dS. They are replayed
and fitted like the forward. Ours run chunk by chunk, as the operator does
(`calls.backward_chunks`), and keep dS between them where it fits. The kernels around them do
nothing but read and write: the rows' statistics before, and the sum over the parts of dK and dV
after, where our kernel splits a group of query heads. They are taken at HBM's rate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bench.suite import Case
from fa4_hd256.kernels.limits import ELEMENT_BYTES, HEAD_DIM
from lab.model.calls import Chunk, backward_chunks
from lab.model.machines import memory_seconds
from lab.model.stored_tiles import dv_tiles, product_tiles
from lab.model.tiles import ROW, BackwardTiling, dkdv_tiles, dq_tiles
from lab.paths import Paths
from lab.whole.conditions import Call
from lab.whole.problem import Schedule, TileCosts, Tiles, schedule
from sm100_sim.timing import Values

FLOAT_BYTES = 4.0


class GradientCalls:
    """Times of a backward from its `calls` on each of the drawn machines, `values`."""

    values: list[Values]

    def calls(self, case: Case) -> list[Call]:
        """All kernels one after the other, for each of the drawn machines, the central one
        first."""
        raise NotImplementedError

    def seconds(self, case: Case) -> np.ndarray:
        """float64, predicted of `calls`."""
        calls = zip(self.calls(case), self.values)
        return np.array([one.seconds(values) for one, values in calls])


@dataclass(frozen=True)
class Backward(GradientCalls):
    """Both kernels of a kind. costs: kernel -> tile costs for each of the drawn machines; a
    function, because some are only replayed if a case needs them. Kernels: "dq", "dkdv", where dS
    is kept "dv" and "products"; all but "dq" with " partial" behind, too. ds_bytes: memory that dS
    may take, 0: it is not kept. paths: of the replays of each requested kernel.
    """

    name: str
    tiling: BackwardTiling
    values: list[Values]
    costs: Callable[[str], list[TileCosts]]
    ds_bytes: int = 0
    paths: dict[str, Paths] = field(default_factory=dict)

    def plan(self, case: Case) -> list[Chunk]:
        how = self.tiling
        found = backward_chunks(case, self.ds_bytes, how.gpu, how.element_bytes == 1)
        return found if how.divides_heads else [replace(one, head_parts=1) for one in found]

    def run(self, chunk: Chunk) -> dict[str, list[Schedule]]:
        """The kernels of a chunk, once, under each of the drawn machines, the central one first."""
        how = self.tiling
        return {
            kernel: [
                schedule(_tiles(kernel, chunk, how), costs, values, 2, how.policy,
                         claims=how.claims)
                for costs, values in zip(self.costs(which), self.values)
            ]
            for kernel, which in _names(chunk).items()
        }  # fmt: skip

    def paths_of(self, case: Case) -> Paths:
        """Return the paths of the replays behind a case's prediction, which has been made."""
        plan = self.plan(case)
        names = {name: None for chunk in plan for name in _names(chunk).values()}
        return sum((self.paths.get(name, Paths()) for name in names), Paths())

    def calls(self, case: Case) -> list[Call]:
        chunks = self.plan(case)
        runs = [(chunk.count, run) for chunk in chunks for run in self.run(chunk).values()]
        return [
            Call([(count, run[n]) for count, run in runs], self._beside(case, chunks, values))
            for n, values in enumerate(self.values)
        ]

    def _beside(self, case: Case, chunks: Sequence[Chunk], values: Values) -> float:
        """Seconds of the kernels that only read and write."""
        rows = sum(q for q, _ in case.lengths)
        # out and dout read; LSE read, LSE and delta written.
        nbytes = [rows * case.heads * (2 * ROW + 3 * FLOAT_BYTES)]
        # For dK and dV: the parts summed and rounded by one kernel.
        partial = [one for one in chunks if one.partial]
        elements = sum(k for _, k in case.lengths) * case.heads_kv * HEAD_DIM
        if partial and not partial[0].adds:
            sums = (_key_elements(one) * FLOAT_BYTES * one.head_parts for one in partial)
            nbytes.append(2 * (sum(sums) + elements * ELEMENT_BYTES))
        for one in (one for one in partial if one.adds):
            # Summed, then read with what others gave, and written.
            each = _key_elements(one) * FLOAT_BYTES / one.count
            nbytes += [each * (one.head_parts + 1), each * 3] * 2 * one.count
        if partial and partial[0].adds:
            nbytes += [elements * (FLOAT_BYTES + ELEMENT_BYTES)] * 2
        return sum(memory_seconds(n, values) for n in nbytes)


@functools.lru_cache(maxsize=64)
def _tiles(kernel: str, chunk: Chunk, tiling: BackwardTiling) -> Tiles:
    if kernel == "dq":
        return Tiles.of(dq_tiles(chunk.case, tiling))
    tiles_of = {"dkdv": dkdv_tiles, "dv": dv_tiles, "products": product_tiles}[kernel]
    return Tiles.of(tiles_of(chunk.case, tiling, chunk.head_parts, chunk.partial))


def _names(chunk: Chunk) -> dict[str, str]:
    """The kernels that a chunk takes, and what their costs are called."""
    partial = " partial" * chunk.partial
    if chunk.keeps_ds:
        return {"dv": f"dv{partial}", "products": f"products{partial}"}
    return {"dq": "dq", "dkdv": f"dkdv{partial}"}


def _key_elements(chunk: Chunk) -> int:
    """Elements of k, all chunks of this kind."""
    case = chunk.case
    return chunk.count * sum(k for _, k in case.lengths) * case.heads_kv * HEAD_DIM
