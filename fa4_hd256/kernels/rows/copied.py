"""Rows that warps copy to shared memory, 16 bytes per lane."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64

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
