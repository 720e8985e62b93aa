"""dS in global memory, between the kernel that makes it and the products that read it.

A sequence of tiles of 128 keys x 128 queries, contiguous, each as the tensor core reads it without
a swizzle: core matrices of 8 rows of 16 bytes (PTX ISA 9.7.15.5.1.2 and 9.7.16.4, canonical
layouts).  Element
(k, q) of a tile lies at byte q // 8 * 2048 + k * 16 + q % 8 * 2.  Reduced over queries a tile is a
K-major operand, reduced over keys an MN-major one: the same image, another descriptor.

A thread that holds consecutive queries of one key writes 16 bytes for every 8 of them, a warp 512
consecutive bytes.

NOTE [blocks of dS].  The products read tiles in pairs: 256 keys of a CTA pair for dK, 256 queries
for dQ.  So a block of 256 keys x 256 queries in which any query sees any key is written as a whole,
with zeros where nothing is seen and beyond the ends of the sequences; no other block is written, or
read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute

from .edges import SharedByReference
from .limits import ELEMENT_BYTES

__all__ = [
    "DS_BLOCK",
    "DS_TILE",
    "DS_TILE_BYTES",
    "DS_TILE_ELEMENTS",
    "RUN",
    "RUN_STRIDE",
    "DsTiles",
    "count_tiles",
    "tile_of",
    "tile_strides",
]

DS_TILE = 128  # keys, and queries, of a tile
DS_BLOCK = 2 * DS_TILE  # keys, and queries, of a block: NOTE [blocks of dS]
DS_TILE_ELEMENTS = DS_TILE * DS_TILE
DS_TILE_BYTES = DS_TILE_ELEMENTS * ELEMENT_BYTES

#: Consecutive queries of a key, and the elements from one such run to the next.
RUN = 16 // ELEMENT_BYTES
RUN_STRIDE = DS_TILE * RUN


def tile_strides() -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """(shape, strides) in elements of a tile as (key, run of 8 queries, query in the run)."""
    return (DS_TILE, DS_TILE // RUN, RUN), (RUN, RUN_STRIDE, 1)


def count_tiles(length: Any) -> Any:
    """Tiles of the longest sequence on one side, in whole blocks; of an int or an Int32."""
    return (length + (DS_BLOCK - 1)) // DS_BLOCK * (DS_BLOCK // DS_TILE)


@dataclass(frozen=True)
class DsTiles(SharedByReference):
    """Where the tiles of each sequence and query head lie.

    heads: query heads.  kv_tiles, q_tiles: see `count_tiles`.  ints, or Int32 on the device.
    """

    heads: Any
    kv_tiles: Any
    q_tiles: Any

    @classmethod
    def of(cls, heads: Any, max_seqlen_q: Any, max_seqlen_k: Any) -> DsTiles:
        """Of a call, on the device the launch, with so many query heads."""
        return cls(heads, count_tiles(max_seqlen_k), count_tiles(max_seqlen_q))

    def count(self, sequences: Any) -> Any:
        """Tiles of all sequences and heads."""
        return sequences * self.heads * self.kv_tiles * self.q_tiles

    def index(self, plane: tuple[Any, Any], kv_tile: Any, q_tile: Any) -> Any:
        """The number of a tile.  plane: (sequence, query head)."""
        sequence, head = plane
        return ((sequence * self.heads + head) * self.kv_tiles + kv_tile) * self.q_tiles + q_tile


def tile_of(ds: cute.Tensor, index: Any) -> cute.Tensor:
    """One tile of dS, (tiles, elements), as (key, run of 8 queries, query in the run)."""
    shape, strides = tile_strides()
    return cute.make_tensor(ds[index, None].iterator, cute.make_layout(shape, stride=strides))
