"""cuDNN's FROST backward on the timing model: a main kernel, two products, and what runs beside.

The main kernel has a tile for 128 keys of a query head: it recomputes P and dP, keeps dV in tensor
memory and writes dS, keys by queries. Two products over dS make dK and dQ, with a tile for 256
rows. All three take tiles over by cluster launch control, in the order of their grids. dK and dV of
the query heads of a group are summed at the end. As many heads go at once as memory for their dS
allows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.suite import Case
from fa4_hd256.kernels.limits import HEAD_DIM
from lab.model.backward import GradientCalls
from lab.model.machines import memory_seconds
from lab.model.peers import frost_code
from lab.model.tiles import KEYS, ROW, ROWS
from lab.paths import Paths
from lab.whole.conditions import Call
from lab.whole.problem import Tile, TileCosts, Tiles, schedule
from sm100_sim.timing import Values

#: Its kernels on tensor cores, as launched one behind the other.
KERNELS = ("main", "dk", "dq")
#: Queries of a unit of the main kernel, which is 128 x 128; rows of the sum of a product's step.
UNIT, STEP = 128, 64
#: Clocks of the tensor core of a CTA: the three products of a unit, and a step of a product.
UNIT_WORK, STEP_WORK = 3 * 512.0, 512.0
#: Bytes of an element of dS.
_DS = 2.0


@dataclass(frozen=True)
class Geometry:
    """A launch: one length of all sequences. offset: of the diagonal, keys less queries; None
    without a mask."""

    batch: int
    heads: int
    ratio: int
    lengths: tuple[int, int]
    offset: int | None

    @property
    def padded(self) -> tuple[int, int]:
        queries, keys = self.lengths
        return (-(-queries // frost_code.QUERY_PAD) * frost_code.QUERY_PAD,
                -(-keys // frost_code.KEY_PAD) * frost_code.KEY_PAD)  # fmt: skip

    def queries_of(self, keys: int) -> tuple[int, int]:
        """First and last of the queries that 256 keys from there on are worked on with; the two
        tiles of 128 keys among them have the same."""
        last = self.padded[0]
        if self.offset is None:
            return 0, last
        return min(max((keys - self.offset) // ROWS * ROWS, 0), last - UNIT), last

    def keys_of(self, queries: int) -> int:
        """Return how many keys the GEMM for dQ sums over for 256 queries from there on."""
        if self.offset is None:
            return self.lengths[1]
        seen = -(-(queries + ROWS + self.offset) // ROWS) * ROWS
        return min(max(seen, 0), self.lengths[1])


def main_tiles(geometry: Geometry) -> Iterator[Tile]:
    """Yield the tiles of the main kernel: Q and dO of a head are shared; K, V, dV and dS are a
    tile's own."""
    reads, writes = 2 * ROW * KEYS, ROW * KEYS
    blocks = []
    for begin in range(0, geometry.padded[1], KEYS):
        first, limit = geometry.queries_of(begin // ROWS * ROWS)
        units = -(-(limit - first) // UNIT)
        own = reads + writes + _DS * UNIT * KEYS * units
        shared = 2 * ROW * max(min(limit, geometry.lengths[0]) - first, 0)
        blocks.append((UNIT_WORK * units, shared, own))
    for head in range(geometry.batch * geometry.heads):
        for work, shared, own in blocks:
            yield Tile(work, head, shared, own, 0.0, reads, writes)


def product_tiles(geometry: Geometry, is_dq: bool) -> Iterator[Tile]:
    """Yield the tiles of a GEMM over dS: Q of a head, or K of a group of heads, is shared."""
    rows = geometry.lengths[not is_dq]
    blocks = []
    for begin in range(0, rows, ROWS):
        if is_dq:
            summed = geometry.keys_of(begin)
        else:
            first, limit = geometry.queries_of(begin)
            summed = min(limit, geometry.lengths[0]) - first
        steps, height = -(-summed // STEP), min(ROWS, rows - begin)
        writes = ROW * height
        blocks.append((STEP_WORK * steps, ROW * summed, _DS * height * summed + writes, writes))
    for head in range(geometry.batch * geometry.heads):
        group = head // geometry.ratio if is_dq else head
        for work, shared, own, writes in blocks:
            yield Tile(work, group, shared, own, 0.0, 0.0, writes)


@functools.lru_cache(maxsize=64)
def tiles_of(kernel: str, geometry: Geometry) -> Tiles:
    if kernel == "main":
        return Tiles.of(list(main_tiles(geometry)))
    return Tiles.of(list(product_tiles(geometry, kernel == "dq")))


@dataclass(frozen=True)
class FrostBackward(GradientCalls):
    """FROST's whole backward, with the methods of `backward.Backward`. costs: kernel -> tile costs
    for each of the drawn machines. paths: of the replays of each kernel that was requested."""

    name: str
    values: list[Values]
    costs: Callable[[str], list[TileCosts]]
    paths: dict[str, Paths] = field(default_factory=dict)

    def plan(self, case: Case) -> tuple[int, Geometry]:
        """Return (how often the three kernels are launched, on what)."""
        lengths = case.lengths[0]
        batch, heads = frost_code.backward_chunks(case.batch, case.heads, case.heads_kv, lengths)
        offset = None if case.bounds[1] is None else lengths[1] - lengths[0]
        ratio = case.heads // case.heads_kv
        times = case.batch // batch * (case.heads // heads)
        return times, Geometry(batch, heads, ratio, lengths, offset)

    def calls(self, case: Case) -> list[Call]:
        times, geometry = self.plan(case)
        found = []
        for n, values in enumerate(self.values):
            schedules: list[Any] = []
            for kernel in KERNELS:
                tiles, costs = tiles_of(kernel, geometry), self.costs(kernel)[n]
                schedules.append((times, schedule(tiles, costs, values, 2, "dynamic")))
            found.append(Call(schedules, _beside(case, geometry, values)))
        return found

    def paths_of(self, case: Case) -> Paths:
        """Return the paths of the replays behind a case's prediction, which has been made."""
        return sum((self.paths.get(name, Paths()) for name in KERNELS), Paths())


def _beside(case: Case, geometry: Geometry, values: Values) -> float:
    """Seconds of the kernels that only read and write: the product of O and dO of each row, and a
    length for each sequence; padded copies; dK and dV of a group summed."""
    (queries, keys), (padded_q, padded_k) = geometry.lengths, geometry.padded
    rows = case.batch * case.heads * queries
    nbytes = [rows * (2 * ROW + 4.0), 4.0 * case.batch]
    if padded_q != queries:
        nbytes += [case.batch * case.heads * (queries + padded_q) * ROW] * 2
    if padded_k != keys:
        nbytes += [case.batch * case.heads_kv * (keys + padded_k) * ROW] * 2
    if case.heads != case.heads_kv:
        elements = case.batch * padded_k * (case.heads + case.heads_kv) * HEAD_DIM
        nbytes += [2 * 2.0 * elements]
    return sum(memory_seconds(n, values) for n in nbytes)
