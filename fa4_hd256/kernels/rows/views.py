"""Views of a call's tensors, in the order of dimensions in which kernels address them."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from ..limits import HEAD_DIM, WARP_SIZE

__all__ = [
    "LANE_COLUMNS",
    "by_packed_heads",
    "by_sequence",
    "columns_of",
    "lane_columns",
    "load_lane_columns",
]

LANE_COLUMNS = HEAD_DIM // WARP_SIZE  # of a row that a warp works on: 16 bytes of a 16-bit type


def by_sequence(
    tensor: cute.Tensor, alignment: int | None = None, columns: int = HEAD_DIM
) -> cute.Tensor:
    """View (batch, seqlen, heads, 256) as (seqlen, 256, heads, batch).

    columns: 256, or 128 of a 16-bit type for as many bytes.  alignment: in bytes, of the base and
    every stride; by default 8 elements, which is TMA's rule for 16 bits and that of 256-bit stores
    for 32 bits.
    """
    # 8 elements have as many bytes as an element has bits.
    width = tensor.element_type.width
    alignment = alignment or width
    batch, rows, heads, _ = tensor.shape
    strides = [cute.assume(tensor.stride[i], divby=alignment * 8 // width) for i in range(3)]
    layout = cute.make_layout(
        (rows, columns, heads, batch), stride=(strides[1], 1, strides[2], strides[0])
    )
    return cute.make_tensor(tensor.iterator.align(alignment), layout)


def by_packed_heads(tensor: cute.Tensor, packed: int, rows: int) -> cute.Tensor:
    """View (seqlen, 256, heads, batch) as ((packed, seqlen), 256, heads / packed, batch): the
    heads of a group change fastest along the rows, then the queries.

    rows: of a tile that a query takes, `packed` or more: TMA fills those past the heads with zeros.
    """
    s, d, h, b = tensor.shape
    row, column, head, batch = tensor.stride
    # A box larger than a static extent is none to CuTe.
    extent = packed if rows == packed else Int32(packed)
    layout = cute.make_layout(
        ((extent, s), d, h // packed, b), stride=((head, row), column, head * packed, batch)
    )
    return cute.make_tensor(tensor.iterator, layout)


def columns_of(row: cute.Tensor, start: Any, columns: int) -> cute.Tensor:
    """`columns` consecutive elements of a row; start: a multiple of them."""
    return cute.logical_divide(row, cute.make_layout(columns))[None, start // columns]


def lane_columns(row: cute.Tensor, lane: Any) -> cute.Tensor:
    """A lane's columns of a row of 256."""
    return cute.logical_divide(row, cute.make_layout(LANE_COLUMNS))[None, lane]


def load_lane_columns(row: cute.Tensor, lane: Any) -> cute.Tensor:
    """A lane's columns of a row of 256 in global memory, in registers."""
    values = cute.make_rmem_tensor(LANE_COLUMNS, row.element_type)
    cute.autovec_copy(lane_columns(row, lane), values)
    return values
