"""Whole problems: tiles over all SMs, from the costs of a few tiles that were replayed.

A tile costs a fixed number of clocks and so many for each clock of tensor-core work in it, more of
them in steps that are masked where a kernel has both; these costs are fitted to replays of one
cluster that ran different numbers and sizes of tiles. A discrete-event
run of the scheduler then places the tiles of a problem on the clusters of the machine, so wave
quantisation, causal imbalance and the order of tiles show. Bytes from HBM, where a group of tiles
no longer finds its common operands in L2, and the power limit bound the result from below.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .machine_constants import Values

#: Share of L2 that operands which tiles have in common may take before they drive each other out.
_L2_SHARE = 0.7


@dataclass(frozen=True)
class Tile:
    """One tile of work of a cluster.

    work: clocks of the tensor core of a CTA. group: tiles of one group read the same
    `shared_bytes` (the keys and values of a head, say); own_bytes: what no other tile touches. A
    tile without work and bytes is one past the end of its sequence, which a cluster skips. masked:
    clocks of the work that are spent in masked steps.
    """

    work: float
    group: int = 0
    shared_bytes: float = 0.0
    own_bytes: float = 0.0
    masked: float = 0.0

    @property
    def skipped(self) -> bool:
        return not self.work and not self.own_bytes


@dataclass(frozen=True)
class TileCosts:
    """Clocks of a cluster: `begin` once, then for each tile `each`, `rate` times its work and
    `mask` times its masked work. empty: of a tile that is skipped, which with one tile a cluster
    takes the slot's reuse besides; None: what the policy alone takes."""

    begin: float
    each: float
    rate: float
    mask: float = 0.0
    empty: float | None = None

    def of(self, tile: Tile) -> float:
        """Clocks of a tile among others of the same cluster."""
        return self.each + self.rate * tile.work + self.mask * tile.masked


@dataclass(frozen=True)
class Sample:
    """One replay to fit costs to: tiles that the cluster ran, their work in all, clocks, and the
    masked part of the work."""

    tiles: int
    work: float
    clocks: float
    masked: float = 0.0


def fit(samples: Sequence[Sample], single: bool) -> TileCosts:
    """Costs that reproduce the samples, by least squares of the relative errors.

    single: every sample ran one tile (kernels with one tile a CTA), so that what a cluster costs
    once and what a tile costs are not told apart; all of it then counts as the tile's. Masked work
    has a cost of its own if any sample has some. Raises ValueError if there are too few samples or
    two of the costs cannot be told apart.
    """
    masked = any(s.masked for s in samples)
    columns = [
        [1.0, *([] if single else [s.tiles]), s.work, *([s.masked] if masked else [])]
        for s in samples
    ]
    clocks = np.array([s.clocks for s in samples], float)
    matrix = np.array(columns) / clocks[:, None]
    solution, _, rank, _ = np.linalg.lstsq(matrix, np.ones(len(samples)), rcond=None)
    if rank < matrix.shape[1]:
        raise ValueError(
            f"{len(samples)} samples do not determine {matrix.shape[1]} costs; vary the number of "
            "tiles and their work"
        )
    return TileCosts(*([0.0] if single else []), *map(float, solution))


@dataclass(frozen=True)
class Schedule:
    """A problem on a machine.

    clocks: until the last cluster is done. busy: float64 (clusters,), clocks at work. bounds:
    seconds that "clusters", "HBM" and "power" need each for itself. launch: seconds beside them.
    hbm_bytes: read and written. starts: float64 (tiles,), clocks. cluster_of: int64 (tiles,).
    """

    clocks: float
    busy: np.ndarray
    bounds: dict[str, float]
    launch: float
    hbm_bytes: float
    starts: np.ndarray
    cluster_of: np.ndarray

    @property
    def bound(self) -> str:
        """What decides the time: the name of the largest of `bounds`."""
        return max(self.bounds, key=self.bounds.__getitem__)

    @property
    def seconds(self) -> float:
        """Predicted, launch included."""
        return max(self.bounds.values()) + self.launch

    def seconds_without(self, bound: str) -> float:
        """The same on a machine that does not have the bound of that name.

        Raises KeyError for a name that is not in `bounds`.
        """
        others = dict(self.bounds)
        del others[bound]
        return max(others.values()) + self.launch

    @property
    def balance(self) -> float:
        """Mean share of the time in which a cluster is at work."""
        return float(self.busy.mean() / max(self.clocks, 1.0))


#: How clusters come by tiles. "static": persistent clusters, tile i to cluster i mod n. "dynamic":
#: persistent clusters that ask for the next tile in time (cluster launch control). "single": one
#: tile a cluster, the hardware launches the next where one has ended.
POLICIES = ("static", "dynamic", "single")


@dataclass(frozen=True)
class Room:
    """What of a machine a launch gets.

    held: clusters whose SMs another kernel holds, until clock `until`. grid: clusters of a static
    grid; None for as many as the machine has, whether it may hold them all or not.
    """

    held: int = 0
    until: float = math.inf
    grid: int | None = None

    def slots(self, clusters: int) -> list[tuple[float, int]]:
        """(clock from which it is free, number) of each of the machine's places: a heap. Raises
        ValueError if all are held for ever, or more than there are."""
        free = clusters - self.held
        if free < 0 or free == 0 and self.until == math.inf:
            raise ValueError(f"{self.held} of {clusters} clusters' SMs are held: nothing can run")
        late = [] if self.until == math.inf else [(self.until, n) for n in range(free, clusters)]
        return [(0.0, number) for number in range(free)] + late


#: The machine to itself.
ALONE = Room()


def schedule(
    tiles: Sequence[Tile], costs: TileCosts, values: Values, cluster: int, policy: str,
    room: Room = ALONE,
) -> Schedule:
    """Run a problem's tiles, in their order, over the clusters of a machine.

    cluster: CTAs of a cluster, one an SM. A cluster of a static grid that finds no place starts
    where another has ended. Raises ValueError for an unknown policy or no tile.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy {policy!r}; accepted are {', '.join(POLICIES)}")
    if not tiles:
        raise ValueError("a problem without a tile takes no time to predict")
    clusters = int(values.sms) // cluster
    starts, ends, cluster_of = np.zeros(len(tiles)), np.zeros(len(tiles)), np.zeros(len(tiles), int)
    busy = np.zeros(clusters)
    free = room.slots(clusters)
    used: set[int] = set()
    for mine in _turns(len(tiles), policy, room.grid or clusters):
        clock, place = heapq.heappop(free)
        fresh = policy == "static" or place not in used
        for number in mine:
            tile = tiles[number]
            clocks = costs.of(tile)
            if tile.skipped:
                clocks = _skipped(costs, values, policy)
            else:
                # A cluster of its own, after another one or the first in its place.
                if place in used and (fresh or policy == "single"):
                    clock += values.cta_reuse
                if fresh:
                    clocks += costs.begin
                fresh = False
                used.add(place)
            starts[number], ends[number], cluster_of[number] = clock, clock + clocks, place
            busy[place] += clocks
            clock += clocks
        heapq.heappush(free, (clock, place))
    hbm = hbm_bytes(tiles, starts, values)
    total = float(ends.max())
    work = sum(tile.work for tile in tiles) * cluster
    bounds = {
        "clusters": total / (values.clock_ghz * 1e9),
        "HBM": hbm / (values.hbm_terabytes * 1e12),
        "power": work * 8192 / (values.power_tflops * 1e12),
    }
    launch = values.launch_us * 1e-6
    return Schedule(total, busy, bounds, launch, hbm, starts, cluster_of)


def _turns(tiles: int, policy: str, grid: int) -> Iterable[Sequence[int]]:
    """The tiles that a place is given at once, in the order in which places are asked for: those of
    a static cluster, else one at a time."""
    if policy == "static":
        return (range(cluster, tiles, grid) for cluster in range(min(grid, tiles)))
    return ((number,) for number in range(tiles))


def _skipped(costs: TileCosts, values: Values, policy: str) -> float:
    """Clocks of a tile past the end of its sequence. Without a replay of such: a static scheduler
    counts on; the others have asked for the tile, or launched it."""
    if costs.empty is not None:
        return costs.empty + values.cta_reuse * (policy == "single")
    return {"static": 0.0, "dynamic": values.clc_query, "single": values.cta_reuse}[policy]


def hbm_bytes(tiles: Sequence[Tile], starts: np.ndarray, values: Values) -> float:
    """Bytes between HBM and the chip: each tile's own, and a group's whenever L2 has lost them.

    Tiles that start together share one reading of their group; L2 keeps the groups used last.
    """
    capacity = _L2_SHARE * values.l2_megabytes * 1e6
    kept: OrderedDict[int, float] = OrderedDict()
    total, in_l2 = sum(tile.own_bytes for tile in tiles), 0.0
    for number in np.argsort(starts, kind="stable"):
        tile = tiles[number]
        if tile.skipped:
            continue
        if tile.group in kept:
            kept.move_to_end(tile.group)
            continue
        total += tile.shared_bytes
        kept[tile.group] = tile.shared_bytes
        in_l2 += tile.shared_bytes
        while in_l2 > capacity and len(kept) > 1:
            in_l2 -= kept.popitem(last=False)[1]
    return total
