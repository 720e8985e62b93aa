"""A tile of dS (`backward.ds_tiles`) as TMA copies it, and as an operand of tcgen05.mma."""

from __future__ import annotations

import cutlass.cute as cute

from ...backward.ds_tiles import DS_TILE, DS_TILE_ELEMENTS, RUN, RUN_STRIDE
from ...limits import ELEMENT_BYTES
from ..instructions import OperandLayout

__all__ = ["BOX", "BY_KEYS", "BY_QUERIES", "tma_view"]

#: Rows and columns of the box in which TMA copies a tile; its bytes stay in their order.
BOX = (256, 64)

#: Core matrices: of the next 8 keys, and of the next 8 queries.
NEXT_KEYS, NEXT_QUERIES = 8 * RUN * ELEMENT_BYTES, RUN_STRIDE * ELEMENT_BYTES
SLICES = range(DS_TILE // 16)  # of K = 16

#: A tile as an operand that is reduced over queries (K-major), and over keys (MN-major).  Without a
#: swizzle the leading offset is that of the next core matrix along the sum.
BY_QUERIES = OperandLayout(
    NEXT_QUERIES, NEXT_KEYS, tuple(i * 2 * NEXT_QUERIES for i in SLICES), is_swizzled=False
)
BY_KEYS = OperandLayout(
    NEXT_KEYS, NEXT_QUERIES, tuple(i * 2 * NEXT_KEYS for i in SLICES), is_swizzled=False
)


def tma_view(ds: cute.Tensor) -> cute.Tensor:
    """dS, see `backward.ds_tiles`, as (rows, columns, tiles of a query head, heads) of `BOX`."""
    (rows, columns), (heads, units, of_unit, _) = BOX, ds.shape
    layout = cute.make_layout(
        (rows, columns, units * of_unit, heads),
        stride=(columns, 1, DS_TILE_ELEMENTS, ds.stride[0]),
    )
    return cute.make_tensor(ds.iterator, layout)
