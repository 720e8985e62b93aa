"""Sizes and plans shared by the configurations of all kernels of a CTA pair."""

from __future__ import annotations

from dataclasses import replace

from ...schedulers.protocol import CLC_SMEM_BYTES, CLUSTER_SIZE
from ..plan import budgets
from ..plan.budgets import SmemRegion
from ..plan.edges import Edge, EdgeTable, Signal

CTAS = CLUSTER_SIZE  # that share a tile and its MMAs
BLOCK_Q = 128  # query rows of one CTA in a tile of queries
TILE_Q = CTAS * BLOCK_Q  # query rows of such a tile
BLOCK_KV = 128  # keys of one step of a tile of queries; keys of a tile of the dK/dV kernel


def common_regions(edges: EdgeTable) -> tuple[SmemRegion, ...]:
    """Return the regions that every kernel has at the end of its shared memory."""
    barriers, scheduler = budgets.common_regions(edges, CLC_SMEM_BYTES)
    address = SmemRegion("tmem_address", 1, 4, 4, "written by tcgen05.alloc")
    return barriers, address, scheduler


def with_scale_bytes(edges: EdgeTable, pair_bytes: int) -> list[Edge]:
    """Return the edges, with `pair_bytes` more on those of loads of both CTAs: the bytes of block
    scales, which come with the operands of a stage."""
    return [
        replace(edge, transaction_bytes=edge.transaction_bytes + pair_bytes)
        if edge.signal is Signal.TMA_PAIR
        else edge
        for edge in edges.edges
    ]


def check_ring(name: str, stages: int) -> None:
    """Raises ValueError for a ring of operands with too few stages."""
    if stages < 3:
        raise ValueError(
            f"{name} is {stages}; at least 3 are needed: the tile in use and the two loaded ahead"
        )
