"""The tiles of the backward's kernels: any mask, lengths equal, unequal or packed.

dQ has a tile for 256 queries of a query head, with a unit of work for every 128 keys that some of
them see; dK/dV one for 128 keys of a KV head, or of a part of its query heads, with a unit for 256
queries of each of those heads.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from bench.suite import Case
from fa4_hd256.call.portions import visible_keys
from fa4_hd256.kernels.blackwell.forward.config import HEAD_DIM
from schedulers import TileProblem, section_heads_for, tile_coordinates
from sm100_sim.timing.problem import Tile

from .forward import B200
from .workload import key_steps

KEYS = 128
#: Tensor-core clocks of 256 queries x 128 keys in a CTA pair, by products: dQ 3, or 1 from dS that
#: is kept, dK/dV 4.
UNIT_Q = 256
DQ, DQ_PRODUCT, DKDV = 3 * 1024.0, 1024.0, 4 * 1024.0
#: Bytes of dS in such a unit.
DS = 2.0 * UNIT_Q * KEYS
#: Bytes of a row of q, k, v, out or a gradient, and of a gradient summed in parts.
ROW, PARTIAL_ROW = 2.0 * HEAD_DIM, 4.0 * HEAD_DIM


@dataclass(frozen=True)
class Order:
    """How a project orders tiles and shares them out.

    policy: see `sm100_sim.timing.problem.POLICIES`. sections: heads take turns so that they share
    L2, the longest tiles first; else one head after the other, blocks ascending. splits: groups of
    query heads are split where there are few KV heads. rows: of queries, what a dK/dV tile ends at
    a multiple of; each begins at one of 256, in flash-attn-4, too (`get_Q_block_min_max`; the
    tcgen05.mma that it executes in the simulator are as many).
    """

    policy: str
    sections: bool
    splits: bool
    rows: int


def dq_units(
    block: int, lengths: tuple[int, int], bounds: tuple[int | None, int | None]
) -> tuple[int, int]:
    """(units, masked ones) of a tile of queries of a sequence."""
    begin = block * UNIT_Q
    return key_steps(begin, min(begin + UNIT_Q, lengths[0]), lengths, bounds)


def dkdv_units(
    block: int, lengths: tuple[int, int], bounds: tuple[int | None, int | None], rows: int
) -> tuple[float, float]:
    """(units, masked ones) of a tile of keys and one query head. rows: see `Order`; masked ones
    are counted as a kernel with 256 has them.

    The mask of the transposed scores is the same one with its sides exchanged.
    """
    begin, (seqlen_q, seqlen_k), (left, right) = block * KEYS, lengths, bounds
    tile, sides = (begin, min(begin + KEYS, seqlen_k), (seqlen_k, seqlen_q)), (right, left)
    units, masked = key_steps(*tile, sides, UNIT_Q)
    # Past the last of its own steps a finer kernel leaves the rest of the unit out.
    last = visible_keys(*tile, sides).stop
    return units - (-last % UNIT_Q // rows * rows / UNIT_Q if units else 0), masked


def dq_tiles(case: Case, order: Order, keeps_ds: bool = False) -> list[Tile]:
    """The tiles of dQ in order. keeps_ds: from a dS that is kept."""
    ratio, work = case.heads // case.heads_kv, DQ_PRODUCT if keeps_ds else DQ
    rows_k = sum(k for _, k in case.lengths) if case.packed else case.seqlen_k
    grid = -(-case.seqlen_q // UNIT_Q), case.heads, case.batch
    # K and V are shared; Q, dO and dQ are not. With dS: K, and dQ beside what each unit reads.
    shared, own = (ROW if keeps_ds else 2 * ROW), (ROW if keeps_ds else 3 * ROW)
    masks = case.window[0] is not None

    @functools.cache
    def of(block: int, lengths: tuple[int, int]) -> tuple[float, float, float]:
        rows = min(lengths[0] - block * UNIT_Q, UNIT_Q)
        if rows <= 0:
            return 0.0, 0.0, 0.0
        units, masked = dq_units(block, lengths, case.bounds)
        read = 2.0 * UNIT_Q * min(units * KEYS, lengths[1]) * keeps_ds
        return work * units, own * rows + read, work * masked * masks

    found = []
    # As the kernels count them, both alike: K and V.
    section = _section(case, order, grid, ratio, 2 * ROW * rows_k)
    later_first = case.bounds[1] is not None
    for block, head, batch in _indices(order, grid, section, later_first):
        lengths = case.lengths[batch]
        clocks, nbytes, masked = of(block, lengths)
        group = batch * case.heads_kv + head // ratio
        found.append(Tile(clocks, group, shared * lengths[1], nbytes, masked))
    return found


def dkdv_tiles(
    case: Case, order: Order, splits: int, keeps_ds: bool = False, partial: bool | None = None
) -> list[Tile]:
    """The tiles of dK/dV in order. splits: parts of each group of query heads. keeps_ds: dS is
    written. partial: dK and dV are written in float32, by default where there are such parts."""
    ratio, heads = case.heads // case.heads_kv, case.heads_kv * splits
    part = -(-ratio // splits)
    rows_q = sum(q for q, _ in case.lengths) if case.packed else case.seqlen_q
    grid = -(-case.seqlen_k // KEYS), heads, case.batch
    # K and V are read, dK and dV written; Q and dO are shared.
    partial = splits > 1 if partial is None else partial
    own, shared = 2 * ROW + 2 * (PARTIAL_ROW if partial else ROW), 2 * ROW * part
    masks = case.window[0] is not None

    @functools.cache
    def of(block: int, query_heads: int, lengths: tuple[int, int]) -> tuple[float, float, float]:
        begin = block * KEYS
        rows = min(lengths[1] - begin, KEYS)
        if rows <= 0:
            return 0.0, 0.0, 0.0
        units, masked = (
            count * query_heads for count in dkdv_units(block, lengths, case.bounds, order.rows)
        )
        written = 2.0 * UNIT_Q * min(KEYS, case.seqlen_k - begin) * units * keeps_ds
        return DKDV * units, own * rows + written, DKDV * masked * masks

    found = []
    section = _section(case, order, grid, 1, shared * rows_q)
    later_first = case.bounds[0] is not None
    for block, head, batch in _indices(order, grid, section, later_first):
        lengths, query_heads = case.lengths[batch], min(part, ratio - head % splits * part)
        clocks, nbytes, masked = of(block, query_heads, lengths)
        found.append(Tile(clocks, batch * heads + head, shared * lengths[0], nbytes, masked))
    return found


def _section(
    case: Case, order: Order, grid: tuple[int, int, int], group: int, nbytes: float
) -> int | None:
    """Pairs of head and batch that take turns, None where none do. grid: (blocks, heads, batch);
    nbytes: of what the tiles of a pair share."""
    if not order.sections:
        return None
    return section_heads_for(
        num_heads_per_kv=group, num_pairs=grid[1] * grid[2], kv_bytes_per_head=int(nbytes),
        l2_bytes=B200.l2_bytes_for_tiles,
        unequal_lengths=case.packed or case.bounds != (None, None),
    )  # fmt: skip


def _indices(
    order: Order, grid: tuple[int, int, int], section: int | None, later_first: bool
) -> Iterator[tuple[int, int, int]]:
    """(block, head, batch) of every tile of the grid in order. later_first: whether later blocks
    come first."""
    blocks, heads, batch = grid
    if section is None:
        for index in range(blocks * heads * batch):
            yield index % blocks, index // blocks % heads, index // blocks // heads
        return
    places = TileProblem(*grid, section, later_first).order()
    for index in range(places.num_tiles):
        yield tile_coordinates(index, places)
