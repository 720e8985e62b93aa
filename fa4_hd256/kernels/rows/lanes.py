"""Rows of 256 columns that a warp has, a few columns per lane."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64

from ..limits import HEAD_DIM, WARP_SIZE

LANE_COLUMNS = HEAD_DIM // WARP_SIZE  # of a row that a warp works on: 16 bytes of a 16-bit type


def lane_columns(row: cute.Tensor, lane: Any) -> cute.Tensor:
    return cute.logical_divide(row, cute.make_layout(LANE_COLUMNS))[None, lane]


def load_lane_columns(row: cute.Tensor, lane: Any) -> cute.Tensor:
    """A lane's columns of a row of 256 in global memory, in registers."""
    values = cute.make_rmem_tensor(LANE_COLUMNS, row.element_type)
    cute.autovec_copy(lane_columns(row, lane), values)
    return values


PIECE_BYTES = 16  # of a lane's copy
BLOCK_BYTES = 128  # of a row in a block of columns


def copy_row(to: Int32, origin: Int64, size: Int32, blocks: int, stride: int) -> None:
    """Copy 16 bytes of each block of 128 bytes of a row in global memory, by cp.async (PTX ISA
    9.7.9.25.3.1). to, origin: of the first, in shared and in global memory. stride: between blocks
    in shared memory. size: bytes that are read, 16, or 0 where zeros are written."""
    for block in range(blocks):
        cute.arch.inline_ptx(
            f"cp.async.cg.shared.global [{{$r0}}+{block * stride}], "
            f"[{{$r1}}+{block * BLOCK_BYTES}], {PIECE_BYTES}, {{$r2}};",
            read_only_args=[to, origin, size],
        )
