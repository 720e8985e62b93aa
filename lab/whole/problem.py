"""Whole problems: tiles over all SMs, from the costs of a few tiles that were replayed.

A tile costs a fixed number of clocks and so many for each clock of tensor-core work in it, more of
them in steps that are masked where a kernel has both; these costs are fitted to replays of one
cluster that ran different numbers and sizes of tiles. A discrete-event run of the scheduler
(`placement.py`) then places the tiles of a problem on the clusters of the machine, so wave
quantisation, causal imbalance and the order of tiles show, and so do own bytes of tiles that start
together: they share HBM, while a replay has them at the rate of one SM's interface. Bytes from HBM,
where a group of tiles no longer finds its common operands in L2, bound the result from below, and
leave own bytes less of HBM.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from sm100_sim.timing import Values, l2_share

from . import placement

#: Share of L2 that operands which tiles have in common may take before they drive each other out.
_L2_SHARE = 0.7


@dataclass(frozen=True)
class Tile:
    """One tile of work of a cluster.

    work: clocks of the tensor core of a CTA. group: tiles of one group read the same bytes (the
    keys and values of a head, say), each the first `shared_bytes` of them, in a window from
    `shared_from` on, which is -1 elsewhere; own_bytes: what no other tile touches. A tile without
    work and bytes is one past the end of its sequence, which a cluster skips. masked: clocks of the
    work that are spent in masked steps. reads, writes: those of its own bytes without which it
    cannot begin, and those that leave at its end.
    """

    work: float
    group: int = 0
    shared_bytes: float = 0.0
    own_bytes: float = 0.0
    masked: float = 0.0
    reads: float = 0.0
    writes: float = 0.0
    shared_from: float = -1.0

    @property
    def skipped(self) -> bool:
        return not self.work and not self.own_bytes


@dataclass(frozen=True, eq=False)
class Tiles:
    """The tiles of a problem in order, as arrays by the fields of `Tile`: float64, group int64."""

    work: np.ndarray
    group: np.ndarray
    shared_bytes: np.ndarray
    own_bytes: np.ndarray
    masked: np.ndarray
    reads: np.ndarray
    writes: np.ndarray
    shared_from: np.ndarray

    @classmethod
    def of(cls, tiles: Sequence[Tile]) -> Tiles:
        columns = {f.name: [getattr(tile, f.name) for tile in tiles] for f in fields(cls)}
        return cls(
            **{k: np.array(v, np.int64 if k == "group" else float) for k, v in columns.items()}
        )

    def __len__(self) -> int:
        return len(self.work)

    @property
    def skipped(self) -> np.ndarray:
        """bool, as `Tile.skipped`."""
        return (self.work == 0) & (self.own_bytes == 0)


#: Bytes of a window's keys and values that L2 keeps or loses as a whole: a step's, of 128 keys.
L2_BLOCK = 128 * 1024.0

#: Runs until the part of HBM that own bytes have changes by no more than this part of all.
MOST_RUNS, SETTLED = 4, 0.01

#: Tiles of a persistent cluster that overlap: two buffers of what stays for a tile.
IN_FLIGHT = 2


@dataclass(frozen=True)
class TileCosts:
    """Clocks of a cluster: `begin` once, then for each tile `each`, `rate` times its work and
    `mask` times its masked work. empty: of a tile that is skipped, which with one tile a cluster
    takes the slot's reuse besides; None: what the policy alone takes. least: between the ends of
    two tiles of a persistent cluster, however short: a tile's chain from its first load to its last
    store, over the two that are in flight."""

    begin: float
    each: float
    rate: float
    mask: float = 0.0
    empty: float | None = None
    least: float = 0.0

    def of(self, tile: Tile) -> float:
        """Clocks of a tile among others of the same cluster; of `Tiles`, those of each."""
        return np.maximum(self._linear(tile), self.least)

    def _linear(self, tile: Tile) -> float:
        return self.each + self.rate * tile.work + self.mask * tile.masked

    def begin_of(self, tiles: Tiles, clusters: int) -> float:
        """`begin` of each of so many clusters with such tiles: those in flight at first wait for
        none before."""
        linear: Any = self._linear(tiles)  # type: ignore[arg-type]
        waits = np.maximum(self.least - linear, 0.0)[~tiles.skipped]
        first = min(IN_FLIGHT, max(1.0, len(waits) / clusters))
        spared = first * float(waits.mean()) if len(waits) else 0.0
        return self.begin - min(spared, max(self.begin, 0.0))


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

    single: every sample ran one tile (kernels with one tile per CTA), so that what a cluster costs
    once and what a tile costs are not told apart; all of it then counts as the tile's. Masked work
    has a cost of its own if any sample has some. Raises ValueError if there are too few samples or
    two of the costs cannot be told apart.

    Work is clocks of the tensor core, so no rate is below 1, nor is what a tile takes beside below
    0: samples of short tiles, which overlap, would otherwise make long ones faster than that.
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
    # Bounds of begin, each, rate and mask; replays decide the others.
    lowest = np.array([-np.inf, 0.0, 1.0, -np.inf])[int(single) : int(single) + len(solution)]
    held = np.zeros(len(solution), bool)
    while (solution < lowest).any():
        held |= solution < lowest
        rest = 1.0 - matrix[:, held] @ lowest[held]
        solution[held] = lowest[held]
        solution[~held] = np.linalg.lstsq(matrix[:, ~held], rest, rcond=None)[0]
    return TileCosts(*([0.0] if single else []), *map(float, solution))


@dataclass(frozen=True)
class Schedule:
    """A problem on a machine.

    clocks: until the last cluster is done. busy: float64 (clusters,), clocks at work or waiting
    for own operands. bounds: seconds that "clusters" and "HBM" need each for itself. launch:
    seconds beside them, on the GPU. hbm_bytes: read and written. starts: float64 (tiles,), clocks.
    cluster_of: int64 (tiles,). work: clocks of the tensor cores of all CTAs together.
    """

    clocks: float
    busy: np.ndarray
    bounds: dict[str, float]
    launch: float
    hbm_bytes: float
    starts: np.ndarray
    cluster_of: np.ndarray
    work: float

    @property
    def bound(self) -> str:
        """Return what decides the time: the name of the largest of `bounds`."""
        return max(self.bounds, key=self.bounds.__getitem__)

    @property
    def seconds(self) -> float:
        """Predicted of the GPU at the machine's clock, launch included."""
        return self.seconds_at(1.0)

    def seconds_at(self, share: float) -> float:
        """Return the seconds at a share of the machine's clock, which HBM and launches do not
        follow."""
        return max(self.bounds["clusters"] / share, self.bounds["HBM"]) + self.launch

    @property
    def balance(self) -> float:
        """Mean share of the time in which a cluster is at work."""
        return float(self.busy.mean() / max(self.clocks, 1.0))


#: Distribution of tiles to clusters. "static": persistent clusters, tile i to cluster i mod n.
#: "dynamic": persistent clusters that claim tiles ahead of the one that they work on (cluster
#: launch control). "single": one tile per cluster, the hardware launches the next where one has
#: ended.
POLICIES = ("static", "dynamic", "single")


class Late(NamedTuple):
    """A dynamic cluster claims its next tile when so much of the work of one is left: tensor-core
    clocks as `Tile.work`, more than 0. Shorter tiles claim at their start."""

    work: float


def schedule(
    tiles: Sequence[Tile] | Tiles,
    costs: TileCosts,
    values: Values,
    cluster: int,
    policy: str,
    prefetches: bool = False,
    claims: int | Late | None = None,
) -> Schedule:
    """Run a problem's tiles, in their order, over the clusters of a machine.

    cluster: CTAs of a cluster, one per SM. prefetches: a tile's own operands are loaded when the
    tile before it begins, so that it waits for what is not there by then; otherwise when it begins
    itself, and what a replay has of that, its bytes at an SM's share of L2, is in `costs`. claims:
    tiles that a dynamic cluster has claimed beside the one that it works on, one by default; it
    requests the next when it begins one, or as `Late` says, and then for its operands, too. Raises
    ValueError for an unknown policy, no tile, a prefetch with one tile a cluster, or claims without
    a dynamic scheduler or more than two.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy {policy!r}; accepted are {', '.join(POLICIES)}")
    if prefetches and policy == "single":
        raise ValueError("a cluster of one tile cannot ask for the next one's operands")
    if claims is None:
        claims = int(policy == "dynamic")
    lead = math.inf
    if isinstance(claims, Late):
        lead = claims.work * costs.rate
        claims = 1
    if claims and policy != "dynamic" or not 0 <= claims <= placement.MOST_CLAIMS:
        raise ValueError(
            f"{claims} tiles claimed ahead under {policy!r}; accepted are 0 to "
            f"{placement.MOST_CLAIMS}, other than 0 under 'dynamic' alone"
        )
    given = tiles if isinstance(tiles, Tiles) else Tiles.of(tiles)
    if not len(given):
        raise ValueError("a problem without a tile takes no time to predict")
    clusters = int(values.sms) // cluster
    rule = np.zeros(placement.RULES)
    rule[placement.BEGIN], rule[placement.REUSE] = costs.begin_of(given, clusters), values.cta_reuse
    rule[placement.LINK] = l2_share(values) * cluster
    rule[placement.STATIC], rule[placement.SINGLE] = policy == "static", policy == "single"
    rule[placement.PREFETCHES], rule[placement.UNEVEN] = prefetches, values.uneven_shares
    rule[placement.CLAIMS], rule[placement.QUERY] = claims, values.clc_query
    rule[placement.LEAD] = lead
    clocks = _clocks(given, costs, values, policy)
    tables, hbm = _placed(given, clocks, rule, clusters, values)
    total = float(tables.ends.max())
    bounds = {
        "clusters": total / (values.clock_ghz * 1e9),
        "HBM": hbm / (values.hbm_terabytes * 1e12),
    }
    work = float(given.work.sum()) * cluster
    return Schedule(
        total, tables.busy, bounds, values.launch_us * 1e-6, hbm, tables.starts,
        tables.cluster_of, work,
    )  # fmt: skip


def _placed(
    tiles: Tiles, clocks: np.ndarray, rule: np.ndarray, places: int, values: Values
) -> tuple[placement.Tables, float]:
    """The tables of a run, and `hbm_bytes` of it.

    What groups share comes from HBM beside tiles' own bytes, which have what it leaves: all in the
    first run, then all but its mean rate in the run before; never less than their part of all
    bytes.
    """
    own = float(tiles.own_bytes.sum())
    memory = rule[placement.MEMORY] = values.hbm_terabytes * 1e3 / values.clock_ghz
    for run in range(MOST_RUNS):
        tables = _tables(tiles, clocks, rule, places)
        tables.counts[placement.PLACES] = places
        tables.free_place[:places] = range(places)
        placement.run(tables)
        hbm = hbm_bytes(tiles, tables.starts, values)
        shared = (hbm - own) / float(tables.ends.max())
        left = max(memory - shared, memory * own / hbm if own else memory)
        if abs(left - rule[placement.MEMORY]) < SETTLED * memory:
            break
        # The less is left the longer it takes, and so more is: half way after the first step.
        rule[placement.MEMORY] = (left + rule[placement.MEMORY]) / 2 if run else left
    return tables, hbm


def _clocks(tiles: Tiles, costs: TileCosts, values: Values, policy: str) -> np.ndarray:
    """float64 (tiles,), without what a cluster costs once."""
    skipped = _skipped(costs, values, policy)
    return np.where(tiles.skipped, skipped, costs.of(tiles))  # type: ignore[arg-type]


def _tables(tiles: Tiles, clocks: np.ndarray, rule: np.ndarray, places: int) -> placement.Tables:
    number = len(tiles)
    place = np.zeros((places, placement.COLUMNS))
    place[:, placement.TILE], place[:, placement.NEXT] = -1, range(places)
    place[:, placement.FRESH] = 1
    # A place has one flow that it waits for, and each tile may leave one behind.
    flows = number + places + 1
    events = (2 * placement.MOST_CLAIMS + 1) * places + 1
    return placement.Tables(
        clocks=clocks, reads=tiles.reads, writes=tiles.writes,
        skips=tiles.skipped.astype(np.int64), rule=rule,
        free=np.zeros(events), free_place=np.zeros(events, np.int64),
        flow=np.zeros(flows), flow_place=np.zeros(flows, np.int64), place=place,
        starts=np.zeros(number), ends=np.zeros(number), cluster_of=np.zeros(number, np.int64),
        busy=np.zeros(places), counts=np.zeros(placement.COUNTS, np.int64),
        server=np.zeros(placement.SERVER),
    )  # fmt: skip


def _skipped(costs: TileCosts, values: Values, policy: str) -> float:
    """Clocks of a tile past the end of its sequence. Without a replay of such: a static scheduler
    counts on; the others have requested the tile, or launched it."""
    if costs.empty is not None:
        return costs.empty + values.cta_reuse * (policy == "single")
    return {"static": 0.0, "dynamic": values.clc_query, "single": values.cta_reuse}[policy]


def hbm_bytes(tiles: Sequence[Tile] | Tiles, starts: np.ndarray, values: Values) -> float:
    """Bytes between HBM and the chip: each tile's own, and of a group's what L2 lacks: all that the
    tile shares, once L2 has lost the group, else what it shares beyond those before it.

    L2 keeps what was used last: groups, each as a whole; of groups of a window blocks, since their
    tiles leave behind what they have passed.
    """
    given = tiles if isinstance(tiles, Tiles) else Tiles.of(tiles)
    capacity = _L2_SHARE * values.l2_megabytes * 1e6
    kept: OrderedDict[tuple[int, int], float] = OrderedDict()
    total, in_l2 = float(given.own_bytes.sum()), 0.0
    order = np.argsort(starts, kind="stable")
    columns = given.group, given.shared_from, given.shared_bytes, given.skipped
    for group, begin, end, skipped in zip(*(column[order].tolist() for column in columns)):
        if skipped:
            continue
        for key, size in _parts(group, begin, end):
            missing = max(size - kept.get(key, 0.0), 0.0)
            kept[key] = kept.pop(key, 0.0) + missing
            total += missing
            in_l2 += missing
        while in_l2 > capacity and len(kept) > 1:
            in_l2 -= kept.popitem(last=False)[1]
    return total


def _parts(group: int, begin: float, end: float) -> list[tuple[tuple[int, int], float]]:
    """Split the bytes that a tile shares into what L2 keeps or loses as a whole: (name, bytes)."""
    if begin < 0:
        return [((group, -1), end)]
    first, limit = int(begin // L2_BLOCK), math.ceil(end / L2_BLOCK)
    return [((group, n), min(L2_BLOCK, end - n * L2_BLOCK)) for n in range(first, limit)]
