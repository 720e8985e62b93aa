"""The tiles of our backward where dS is stored: those of dV, and those of the products of dS.

A tile of dV is 256 keys of a part of a KV head's query heads, with a step for 128 queries of each
that see any of them; every step writes its dS. Tiles of the products are 256 rows of dK, of such a
part, or of dQ, of one query head; every step reads 256 x 128 elements of dS. In mxfp8 these are a
byte each, and their scales are stored twice, of which each result reads its own.
"""

from __future__ import annotations

import functools

from bench.suite import Case
from fa4_hd256.gpus.devices import Gpu
from fa4_hd256.kernels.backward.gemm_tiles import GemmOrder
from fa4_hd256.kernels.mask.masking import MaskKind
from lab.model.tiles import (
    PARTIAL_ROW,
    ROW,
    BackwardTiling,
    grouped,
    indices,
    key_steps,
    shared_by,
    tiles_of_keys,
)
from lab.whole.problem import Tile

#: Rows of a tile, and of a step.
ROWS, STEP = 256, 128
#: Tensor-core clocks of a step in a CTA pair: S, dP and dV; one product of dS.
DV, PRODUCT = 3 * 1024.0, 1024.0
#: Bytes of dS in a step; in mxfp8 those of the codes, and of the scales of either result.
DS = 2.0 * ROWS * STEP
CODES, SCALES = 1.0 * ROWS * STEP, ROWS * STEP / 32

Lengths = tuple[int, int]


def dv_steps(block: int, lengths: Lengths, bounds: tuple) -> tuple[int, int]:
    """Return (steps, masked ones) of a tile of keys and one query head; the mask of the transposed
    scores is the same one with its sides exchanged."""
    (seqlen_q, seqlen_k), (left, right) = lengths, bounds
    tile = block * ROWS, min(block * ROWS + ROWS, seqlen_k)
    return key_steps(*tile, (seqlen_k, seqlen_q), (right, left), STEP)


def dv_tiles(
    case: Case, tiling: BackwardTiling, head_parts: int, partial: bool | None = None
) -> list[Tile]:
    """The tiles of dV in order. head_parts: parts of each group of query heads. partial: dV is
    written in float32, by default where there are such parts."""
    partial = head_parts > 1 if partial is None else partial
    # K and V are read, dV and dS written.
    result = PARTIAL_ROW if partial else ROW
    masks, size = case.window[0] is not None or tiling.diagonal, tiling.element_bytes / 2

    @functools.cache
    def of(block: int, query_heads: int, lengths: Lengths) -> Tile:
        rows = min(lengths[1] - block * ROWS, ROWS)
        if rows <= 0:
            return Tile(0.0)
        steps, masked = (count * query_heads for count in dv_steps(block, lengths, case.bounds))
        reads, writes = 2 * ROW * size * rows, result * rows
        own = reads + writes + (DS if size == 1 else CODES + 2 * SCALES) * steps
        return Tile(DV * size * steps, 0, 0.0, own, DV * size * masked * masks, reads, writes)

    return tiles_of_keys(case, tiling, ROWS, head_parts, of)


def product_order(case: Case, head_parts: int) -> GemmOrder:
    part = -(-case.heads // case.heads_kv // head_parts)
    left, right = case.bounds
    mask = MaskKind(left is not None, right is not None)
    return GemmOrder.of(case.seqlen_k, case.seqlen_q, part, mask)


def read_again(order: GemmOrder, gpu: Gpu, element_bytes: int = 2) -> float:
    """Share of dS that the tiles of dQ read from the GPU's HBM although those of dK have, or the
    other way.

    Both pass the same place of dS at the same time, if they run at the same time: as many of either
    kind do as half of the CTA pairs. Where a head's dS fits into L2 that does not matter.
    """
    if order.blocks_k * order.blocks_q * ROWS * ROWS * element_bytes <= gpu.l2_bytes_for_tiles:
        return 0.0
    return max(0.0, 1 - gpu.pairs / 2 / order.blocks_k)


def product_tiles(
    case: Case, tiling: BackwardTiling, head_parts: int, partial: bool | None = None
) -> list[Tile]:
    """The tiles of the products in order; arguments as for `dv_tiles`, of dK."""
    ratio, heads = case.heads // case.heads_kv, case.heads_kv * head_parts
    order = product_order(case, head_parts)
    part, grid = order.heads, (order.num_tiles, heads, case.batch)
    partial = head_parts > 1 if partial is None else partial
    of_dk, size = PARTIAL_ROW if partial else ROW, tiling.element_bytes / 2
    again = read_again(order, tiling.gpu, tiling.element_bytes)
    ds, scales = (DS, 0.0) if size == 1 else (CODES, SCALES)

    @functools.cache
    def of(number: int, query_heads: int, lengths: Lengths) -> Tile:
        of_keys, block, nth = order.tile(number)
        rows = min(lengths[of_keys] - block * ROWS, ROWS)
        if rows <= 0 or not of_keys and nth >= query_heads:
            return Tile(0.0)
        if of_keys:
            steps, writes = dv_steps(block, lengths, case.bounds)[0] * query_heads, of_dk * rows
            read = (ds + scales) * steps
        else:
            begin = block * ROWS
            steps = key_steps(begin, begin + rows, lengths, case.bounds, STEP)[0]
            writes, read = ROW * rows, (ds * again + scales) * steps
        return Tile(PRODUCT * size * steps, 0, 0.0, writes + read, 0.0, 0.0, writes)

    found = []
    section = order.parts_at_once(tiling.gpu.pairs)
    last = order.parts_at_last(tiling.gpu.pairs)
    for number, head, batch in indices(grid, section, False, last=last):
        lengths, query_heads = case.lengths[batch], min(part, ratio - head % head_parts * part)
        # Beside dS: those of dK read Q of the part's heads and no K, those of dQ K and no Q.
        of_keys, block, _ = order.tile(number)
        sides, bounds = lengths, case.bounds
        if of_keys:
            sides, bounds = lengths[::-1], bounds[::-1]
        others = shared_by(block * ROWS, ROWS, sides, bounds)
        of_row = ROW * size * (query_heads if of_keys else 1)
        group = 2 * (batch * heads + head) + of_keys
        found.append(grouped(of(number, query_heads, lengths), group, others, of_row))
    return found
