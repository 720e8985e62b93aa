"""Operand tiles in shared memory, as TMA writes them and the tensor core reads them.

Every tile has the 128-byte swizzle and lies as blocks of 64 columns: a row of a block is 128
bytes, 8 rows are an atom of 1024 (PTX ISA 9.7.16.4, canonical layouts).  The same bytes serve as a
K-major operand (the columns are reduced over) or an MN-major one (the rows are).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, tcgen05

from fa4_hd256.kernels.limits import HEAD_DIM
from fa4_hd256.kernels.sequences import tma_tile

from .instructions import OperandLayout

__all__ = [
    "TmaTensor",
    "k_major_operand",
    "load_tile",
    "mn_major_operand",
    "smem_layout",
]

BLOCK_COLUMNS = 64
ROW_BYTES = 128  # of a block: 64 16-bit elements
SLICE = 16  # elements of one instruction's K


class TmaTensor(NamedTuple):
    """A TMA descriptor's copy atom and the coordinate tensor that goes with it."""

    atom: Any
    tensor: Any


def smem_layout(dtype: Any, rows: int, columns: int, stages: int) -> Any:
    """rows x columns x stages of a 16-bit `dtype`: the layout of the module's docstring."""
    atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, dtype)
    return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))


def k_major_operand(rows: int, columns: int = HEAD_DIM) -> OperandLayout:
    """A tile of rows x columns, reduced over its columns."""
    slices_per_block = BLOCK_COLUMNS // SLICE
    block_bytes = rows * ROW_BYTES
    steps = tuple(
        k // slices_per_block * block_bytes + k % slices_per_block * (2 * SLICE)
        for k in range(columns // SLICE)
    )
    return OperandLayout(leading_bytes=16, stride_bytes=8 * ROW_BYTES, step_bytes=steps)


def mn_major_operand(rows: int) -> OperandLayout:
    """A tile of `rows` rows, reduced over its rows."""
    steps = tuple(k * SLICE * ROW_BYTES for k in range(rows // SLICE))
    return OperandLayout(
        leading_bytes=rows * ROW_BYTES, stride_bytes=8 * ROW_BYTES, step_bytes=steps
    )


def load_tile(
    source: TmaTensor, smem: cute.Tensor, place: tuple, barrier: cute.Pointer, stage: Any,
    packed: int = 1,
) -> None:
    """One TMA load into `smem[.., .., stage]`, of the tile at `place` (see `tma_tile`)."""
    shape = (cute.size(smem, mode=[0]), cute.size(smem, mode=[1]))
    tile = tma_tile(source.tensor, shape, place, packed, least=1)
    to_smem, from_global = cpasync.tma_partition(
        source.atom, 0, cute.make_layout(1),
        cute.group_modes(smem, 0, 2), cute.group_modes(tile, 0, 2),
    )  # fmt: skip
    cute.copy(source.atom, from_global, to_smem[None, stage], tma_bar_ptr=barrier)
