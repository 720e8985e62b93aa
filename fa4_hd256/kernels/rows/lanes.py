"""Rows of 256 columns that a warp has, a few columns per lane."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute

from ..limits import HEAD_DIM, WARP_SIZE

LANE_COLUMNS = HEAD_DIM // WARP_SIZE  # of a row that a warp works on: 16 bytes of a 16-bit type


def lane_columns(row: cute.Tensor, lane: Any) -> cute.Tensor:
    return cute.logical_divide(row, cute.make_layout(LANE_COLUMNS))[None, lane]


def load_lane_columns(row: cute.Tensor, lane: Any) -> cute.Tensor:
    """A lane's columns of a row of 256 in global memory, in registers."""
    values = cute.make_rmem_tensor(LANE_COLUMNS, row.element_type)
    cute.autovec_copy(lane_columns(row, lane), values)
    return values
