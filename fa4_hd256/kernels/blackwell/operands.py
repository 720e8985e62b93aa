"""Operand tiles as tcgen05 reads them: where the slices of a tile lie (`kernels.operands`)."""

from __future__ import annotations

from ..limits import HEAD_DIM
from ..operands import BLOCK_COLUMNS, ROW_BYTES
from .instructions import OperandLayout

__all__ = ["E4M3_SLICE", "k_major_operand", "mn_major_operand"]

SLICE = 16  # elements of one instruction's K
E4M3_SLICE = 32  # the same of e4m3; a tile of them counts here as one of half as many columns


def k_major_operand(rows: int, columns: int = HEAD_DIM) -> OperandLayout:
    """A tile of rows x columns, reduced over its columns."""
    slices_per_block = BLOCK_COLUMNS // SLICE
    block_bytes = rows * ROW_BYTES
    steps = tuple(
        k // slices_per_block * block_bytes + k % slices_per_block * (2 * SLICE)
        for k in range(columns // SLICE)
    )
    return OperandLayout(leading_bytes=16, stride_bytes=8 * ROW_BYTES, step_bytes=steps)


def mn_major_operand(rows: int, slice_rows: int = SLICE, block: int = 0) -> OperandLayout:
    """A tile of `rows` rows, reduced over its rows.  slice_rows: of one instruction.  block: of
    columns with which it begins."""
    first = block * rows * ROW_BYTES
    steps = tuple(first + k * slice_rows * ROW_BYTES for k in range(rows // slice_rows))
    return OperandLayout(
        leading_bytes=rows * ROW_BYTES, stride_bytes=8 * ROW_BYTES, step_bytes=steps
    )
