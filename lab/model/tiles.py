"""The tiles that kernels cut a case into, in the order in which they are worked on.

Any mask, lengths equal, unequal or packed. A tile of the forward is 256 rows of queries with a step
for every 128 keys that some of them see. dQ has a tile for 256 queries of a query head, with a unit
of work for every 128 keys that some of them see; dK/dV one for 128 keys of a KV head, or of a part
of its query heads, with a unit for 256 queries of each of those heads.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from bench.suite import SM100_FLOP_PER_CLOCK, Case
from fa4_hd256.call.chunks import visible_keys
from fa4_hd256.gpus.devices import Gpu
from fa4_hd256.kernels.limits import HEAD_DIM
from fa4_hd256.schedulers import (
    PackedBlocks,
    TileOrder,
    TileProblem,
    section_heads_for,
    tile_coordinates,
)
from lab.model.machines import B200
from lab.whole.problem import Late, Tile

#: Keys of a step, and of a unit of the backward; queries of a tile and of a unit.
KEYS, ROWS = 128, 256
#: Clocks of the tensor core in a step, of each CTA of a pair.
STEP_WORK = 4 * ROWS * KEYS * HEAD_DIM / SM100_FLOP_PER_CLOCK / 2
#: Tensor-core clocks of 256 queries x 128 keys in a CTA pair, by products: dQ 3, dK/dV 4.
DQ, DKDV = 3 * 1024.0, 4 * 1024.0
#: Bytes of a row of q, k, v, out or a gradient, and of a gradient summed in parts.
ROW, PARTIAL_ROW = 2.0 * HEAD_DIM, 4.0 * HEAD_DIM

Bounds = tuple[int | None, int | None]
#: (block, head, batch) of a tile.
Place = tuple[int, int, int]


def interleaved(case: Case, gpu: Gpu, heads: int, pairs: int, nbytes: float) -> int:
    """Return the interleaved pairs of head and batch, of so many. heads: of a KV head; nbytes: of
    what the tiles of a KV head share."""
    return section_heads_for(
        num_heads_per_kv=heads, num_pairs=pairs, kv_bytes_per_head=int(nbytes),
        l2_bytes=gpu.l2_bytes_for_tiles,
        unequal_lengths=case.packed or case.bounds != (None, None),
    )  # fmt: skip


@dataclass(frozen=True)
class ForwardTiling:
    """Tiling of a case by a forward kernel, and the distribution of its tiles.

    head_dim; rows: queries of a cluster's tile; cluster: CTAs; keys: of a step. warpgroups: of a
    CTA that each leave out steps that their own rows do not see. policy: see
    `lab.whole.problem.POLICIES`. ordered: the longest first, heads grouped for L2. packs_heads:
    whether a tile's rows are those of all query heads of a KV head, see `tile_of_queries`; costs
    stay those of replays with one query head. exact_grid: whether the grid of packed sequences
    follows their queries; otherwise each has blocks for the longest one, or, `in_a_row`, they may
    be numbered as `fa4_hd256.schedulers.order.PackedBlocks` says. num_splits: KV splits of a tile;
    equal_parts: of equal size but for the last ones, which may be empty, else as even as can be;
    dependent: what makes one result of them is launched as a dependent. kv_bytes: of an element of
    K or V. operand_bytes: of an element of what the tensor core multiplies, which takes as long for
    a byte whatever the type. prefetches: whether the queries of the next tile are loaded while a
    tile is worked on, claims: how many tiles a cluster has claimed ahead, both as
    `lab.whole.problem.schedule` takes them; O leaves behind the tile in any case. gpu: whose L2 the
    order is made for.
    """

    policy: str
    head_dim: int = HEAD_DIM
    rows: int = ROWS
    cluster: int = 2
    keys: int = KEYS
    warpgroups: int = 1
    ordered: bool = True
    packs_heads: bool = False
    exact_grid: bool = False
    in_a_row: bool = False
    num_splits: int = 1
    equal_parts: bool = False
    dependent: bool = False
    kv_bytes: float = 2.0
    operand_bytes: float = 2.0
    prefetches: bool = False
    claims: int | Late | None = None
    gpu: Gpu = B200

    @property
    def key_bytes(self) -> float:
        return 2 * self.kv_bytes * self.head_dim

    def tile_of_queries(self, heads: int, heads_kv: int) -> tuple[int, int]:
        """Return (queries of a tile, heads that have tiles of their own). Heads are packed where a
        CTA's rows are a multiple of the ratio, in ours
        (`fa4_hd256.call.forward_problem.packed_heads`) and in flash-attn-4."""
        ratio = heads // heads_kv
        if self.packs_heads and (self.rows // self.cluster) % ratio == 0:
            return self.rows // ratio, heads_kv
        return self.rows, heads

    def places(self, case: Case) -> Iterator[Place]:
        """Return (block of queries, head, batch and KV split) of each tile in order; this order is
        ours, another kernel's class has its own."""
        order = _forward_order(case, self)
        return (tile_coordinates(index, order) for index in range(order.num_tiles))


@dataclass(frozen=True)
class BackwardTiling:
    """Tiling of a project's backward: the order of tiles and their distribution.

    policy: as `ForwardTiling`'s. sections: heads are interleaved so that they share L2, the longest
    tiles first; else one head after the other, blocks ascending. divides_heads: groups of query
    heads are split where there are few KV heads. rows: of queries, what a dK/dV tile ends at a
    multiple of; each begins at one of 256, in flash-attn-4, too (`get_Q_block_min_max`; the
    tcgen05.mma that it executes in the simulator are as many). claims: as `ForwardTiling`'s, of the
    operands that stay for a tile. gpu: whose L2 and CTA pairs the order and the splitting of a call
    are made for. element_bytes: of an operand; of 1 the MMAs take half as long. diagonal: whether
    masked steps of dV have a cost of their own in a causal call without a window, too.
    """

    policy: str
    sections: bool
    divides_heads: bool
    rows: int
    claims: int | Late | None = None
    gpu: Gpu = B200
    element_bytes: int = 2
    diagonal: bool = False


class Parts(NamedTuple):
    """KV split: which part of how many; equal: see `ForwardTiling.equal_parts`."""

    which: int = 0
    count: int = 1  # type: ignore[assignment]  # hides tuple.count, which nobody needs of parts
    equal: bool = False

    def of(self, first: int, limit: int) -> tuple[int, int]:
        """Return, of the KV tiles first .. limit - 1, the split's first and the one behind its
        last."""
        whole = limit - first
        if self.equal:
            each = -(-whole // self.count)
            begin, end = (min(n * each, whole) for n in (self.which, self.which + 1))
        else:
            begin, end = (whole * n // self.count for n in (self.which, self.which + 1))
        return first + begin, first + end


WHOLE = Parts()


def key_steps(
    begin: int,
    end: int,
    lengths: tuple[int, int],
    bounds: Bounds,
    keys: int = KEYS,
    parts: Parts = WHOLE,
) -> tuple[int, int]:
    """Return (KV tiles that the rows begin .. end - 1 see any key of, those of them with a key that
    not all of these rows see); the mask is bottom-right aligned. keys: of a KV tile. parts: of
    these KV tiles."""
    seen = visible_keys(begin, end, lengths, bounds)
    if not seen:
        return 0, 0
    seqlen_q, seqlen_k = lengths
    left, right = bounds
    offset = seqlen_k - seqlen_q
    # Keys that every row sees.
    common_first = 0 if left is None else max(0, end - 1 + offset - left)
    common_limit = seqlen_k if right is None else min(seqlen_k, begin + 1 + offset + right)
    first, limit = seen.start // keys, -(-seen.stop // keys)
    first, limit = parts.of(first, limit)
    unmasked = min(common_limit // keys, limit) - max(-(-common_first // keys), first)
    return limit - first, limit - first - max(0, unmasked)


@functools.lru_cache(maxsize=1 << 16)
def shared_by(begin: int, rows: int, lengths: tuple[int, int], bounds: Bounds) -> tuple[int, int]:
    """Return (first, limit) of the rows of the other side that the tile of so many rows that begins
    there shares with others: those that its own rows see, the first of them -1 but in a window,
    which bounds both sides, for elsewhere a tile that sees more sees those before them, too.
    lengths, bounds: the tile's own side first."""
    end = min(begin + rows, lengths[0])
    seen = visible_keys(begin, end, lengths, bounds) if begin < end else range(0)
    return (-1, len(seen)) if None in bounds else (seen.start, seen.stop)


def forward_tiles(case: Case, tiling: ForwardTiling) -> list[Tile]:
    """The tiles of a forward in order, those skipped included."""
    queries, heads = tiling.tile_of_queries(case.heads, case.heads_kv)
    ratio, splits = heads // case.heads_kv, tiling.num_splits

    @functools.cache
    def of(block: int, lengths: tuple[int, int], part: int) -> Tile:
        return _forward_tile(case, tiling, block, lengths, part)

    found = []
    for block, head, entry in tiling.places(case):
        batch, part = divmod(entry, splits)
        lengths = case.lengths[batch]
        if tiling.exact_grid and case.packed and block * queries >= lengths[0]:
            continue
        keys = shared_by(block * queries, queries, lengths, case.bounds)
        group = entry * case.heads_kv + head // ratio
        found.append(grouped(of(block, lengths, part), group, keys, tiling.key_bytes / splits))
    return found


def grouped(tile: Tile, group: int, rows: tuple[int, int], of_row: float) -> Tile:
    """The tile as one of a group that shares these rows (`shared_by`), of so many bytes each."""
    first, limit = rows
    return Tile(
        tile.work, group, limit * of_row, tile.own_bytes, tile.masked, tile.reads, tile.writes,
        -1.0 if first < 0 else first * of_row,
    )  # fmt: skip


def _forward_order(case: Case, tiling: ForwardTiling) -> TileOrder:
    queries, heads = tiling.tile_of_queries(case.heads, case.heads_kv)
    blocks = -(-case.seqlen_q // queries)
    entries, section = case.batch * tiling.num_splits, 1
    if tiling.ordered:
        nbytes = tiling.key_bytes * case.seqlen_k
        section = interleaved(case, tiling.gpu, heads // case.heads_kv, entries * heads, nbytes)
    later_first = tiling.ordered and case.bounds[1] is not None
    problem = TileProblem(blocks, heads, entries, section, later_first)
    packed = _blocks_of(case, 0, queries)
    if tiling.in_a_row and packed is not None and tiling.num_splits == 1:
        problem = problem.in_a_row(packed, packed.offsets[-1])
    return problem.order()


def _forward_tile(
    case: Case, tiling: ForwardTiling, block: int, lengths: tuple[int, int], part: int
) -> Tile:
    """A block of queries, or a part of its keys, but for its group; without a window masked work is
    not told apart (`samples.forward_work`)."""
    queries, _ = tiling.tile_of_queries(case.heads, case.heads_kv)
    begin, end = block * queries, min((block + 1) * queries, lengths[0])
    if begin >= lengths[0]:
        return Tile(0.0)
    parts = Parts(part, tiling.num_splits, tiling.equal_parts)
    each = queries // tiling.warpgroups
    found = [
        key_steps(first, min(first + each, end), lengths, case.bounds, tiling.keys, parts)
        for first in range(begin, end, each)
    ]
    steps, masked = (sum(counts) / tiling.warpgroups for counts in zip(*found))
    flop = 4 * tiling.rows * tiling.keys * tiling.head_dim
    step = flop / SM100_FLOP_PER_CLOCK / tiling.cluster * tiling.operand_bytes / 2
    # Q is read, O written; parts of it in float32. Rows past the last query are neither.
    elements = (end - begin) * (tiling.rows // queries) * tiling.head_dim
    reads, writes = (
        tiling.operand_bytes * elements,
        (2.0 if tiling.num_splits == 1 else 4.0) * elements,
    )
    return Tile(
        step * steps, own_bytes=reads + writes, reads=reads, writes=writes,
        masked=step * masked * (case.bounds[0] is not None),
    )  # fmt: skip


def dq_units(block: int, lengths: tuple[int, int], bounds: Bounds) -> tuple[int, int]:
    """Return (units, masked ones) of a tile of queries of a sequence."""
    begin = block * ROWS
    return key_steps(begin, min(begin + ROWS, lengths[0]), lengths, bounds)


def dkdv_units(
    block: int, lengths: tuple[int, int], bounds: Bounds, rows: int
) -> tuple[float, float]:
    """Return (units, masked ones) of a tile of keys and one query head. rows: see `BackwardTiling`;
    masked ones are counted as a kernel with 256 has them. The mask of the transposed scores is the
    same one with its sides exchanged."""
    begin, (seqlen_q, seqlen_k), (left, right) = block * KEYS, lengths, bounds
    tile, sides = (begin, min(begin + KEYS, seqlen_k), (seqlen_k, seqlen_q)), (right, left)
    units, masked = key_steps(*tile, sides, ROWS)
    # Past the last of its own steps a finer kernel leaves the rest of the unit out.
    last = visible_keys(*tile, sides).stop
    return units - (-last % ROWS // rows * rows / ROWS if units else 0), masked


def dq_tiles(case: Case, tiling: BackwardTiling) -> list[Tile]:
    ratio = case.heads // case.heads_kv
    grid = -(-case.seqlen_q // ROWS), case.heads, case.batch
    # K and V are shared; Q, dO and dQ are not.
    shared = stays = 2 * ROW
    masks = case.window[0] is not None

    @functools.cache
    def of(block: int, lengths: tuple[int, int]) -> Tile:
        rows = min(lengths[0] - block * ROWS, ROWS)
        if rows <= 0:
            return Tile(0.0)
        units, masked = dq_units(block, lengths, case.bounds)
        reads, writes = stays * rows, ROW * rows
        return Tile(DQ * units, 0, 0.0, reads + writes, DQ * masked * masks, reads, writes)

    found = []
    # Kernels count K and V alike.
    section = section_of(case, tiling, grid, ratio, 2 * ROW * case.seqlen_k)
    later_first = case.bounds[1] is not None
    for block, head, batch in indices(grid, section, later_first, _blocks_of(case, 0, ROWS)):
        lengths = case.lengths[batch]
        keys = shared_by(block * ROWS, ROWS, lengths, case.bounds)
        group = batch * case.heads_kv + head // ratio
        found.append(grouped(of(block, lengths), group, keys, shared))
    return found


def dkdv_tiles(
    case: Case, tiling: BackwardTiling, head_parts: int, partial: bool | None = None
) -> list[Tile]:
    """The tiles of dK/dV in order. head_parts: parts of each group of query heads. partial: dK and
    dV are written in float32, by default where there are such parts."""
    # K and V are read, dK and dV written.
    partial = head_parts > 1 if partial is None else partial
    results = 2 * (PARTIAL_ROW if partial else ROW)
    masks = case.window[0] is not None

    @functools.cache
    def of(block: int, query_heads: int, lengths: tuple[int, int]) -> Tile:
        begin = block * KEYS
        rows = min(lengths[1] - begin, KEYS)
        if rows <= 0:
            return Tile(0.0)
        units, masked = (
            count * query_heads for count in dkdv_units(block, lengths, case.bounds, tiling.rows)
        )
        reads, writes = 2 * ROW * rows, results * rows
        return Tile(DKDV * units, 0, 0.0, reads + writes, DKDV * masked * masks, reads, writes)

    return tiles_of_keys(case, tiling, KEYS, head_parts, of, _blocks_of(case, 1, KEYS))


def tiles_of_keys(
    case: Case,
    tiling: BackwardTiling,
    rows: int,
    head_parts: int,
    of: Callable[[int, int, tuple[int, int]], Tile],
    packed: PackedBlocks | None = None,
) -> list[Tile]:
    """Tiles of so many keys of each part of a KV head's query heads, in order; they share Q and dO.
    of: (block, query heads of the part, lengths) -> the tile, without its group. packed: as
    `indices` takes it."""
    ratio, heads = case.heads // case.heads_kv, case.heads_kv * head_parts
    part = -(-ratio // head_parts)
    grid, shared = (-(-case.seqlen_k // rows), heads, case.batch), 2 * ROW * part
    found = []
    section = section_of(case, tiling, grid, 1, shared * case.seqlen_q)
    later_first = case.bounds[0] is not None
    for block, head, batch in indices(grid, section, later_first, packed):
        lengths, query_heads = case.lengths[batch], min(part, ratio - head % head_parts * part)
        tile = of(block, query_heads, lengths)
        sides = lengths[::-1], case.bounds[::-1]
        queries = shared_by(block * rows, rows, *sides)
        found.append(grouped(tile, batch * heads + head, queries, shared))
    return found


def section_of(
    case: Case, tiling: BackwardTiling, grid: tuple[int, int, int], group: int, nbytes: float
) -> int | None:
    """Interleaved pairs of head and batch, None where there are none. grid: (blocks, heads, batch);
    nbytes: of what the tiles of a pair share."""
    if not tiling.sections:
        return None
    return interleaved(case, tiling.gpu, group, grid[1] * grid[2], nbytes)


def _blocks_of(case: Case, side: int, rows: int) -> PackedBlocks | None:
    """Return the blocks of packed sequences, of so many queries (side 0) or keys (1); None for
    others."""
    if not case.packed:
        return None
    return PackedBlocks([0, *itertools.accumulate(lengths[side] for lengths in case.lengths)], rows)


def indices(
    grid: tuple[int, int, int],
    section: int | None,
    later_first: bool,
    packed: PackedBlocks | None = None,
    last: int = 1,
) -> Iterator[tuple[int, int, int]]:
    """Yield (block, head, batch) of every tile of the grid in order. later_first: whether later
    blocks come first. packed: what may be numbered in a row, where there are sections. last: pairs
    of the last section, at least."""
    blocks, heads, batch = grid
    if section is None:
        for index in range(blocks * heads * batch):
            yield index % blocks, index // blocks % heads, index // blocks // heads
        return
    problem = TileProblem(*grid, section, later_first, last_heads=last)
    if packed is not None:
        problem = problem.in_a_row(packed, packed.offsets[-1])
    places = problem.order()
    for index in range(places.num_tiles):
        yield tile_coordinates(index, places)
