"""O of the forward kernel on its way from tensor memory to `out`.

NOTE [O leaves through Q].  The O of a tile is staged in the tile's own Q buffer: when PV(last) has
completed, so have all QK before it, and nobody reads that Q again.  The other Q buffer already
receives the next tile's Q, so the two never wait for each other; q_free is signalled once the TMA
store has read the staged O.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from ...limits import HEAD_DIM
from ...operands import TmaTensor
from ...ranges import traced
from ...rows.sequences import TilePlace, tma_tile
from ..instructions import fence_after_thread_sync, fence_before_thread_sync
from ..tmem import multiply, tmem_load, tmem_store
from .scores import LOAD_COLUMNS


def load_columns(address: Int32, columns: int) -> cute.Tensor:
    values = cute.make_rmem_tensor(columns, Float32)
    tmem_load(address, values, LOAD_COLUMNS)
    cute.arch.fence_view_async_tmem_load()
    return values


@traced("rescale O")
def rescale(address: Int32, factor: Float32) -> None:
    """O *= factor, this thread's row, in slices of columns.  address: of O in the warp's rows."""
    fence_after_thread_sync()
    for start in range(0, HEAD_DIM, LOAD_COLUMNS):
        values = load_columns(address + start, LOAD_COLUMNS)
        multiply(values, factor)
        tmem_store(values, address + start)
    cute.arch.fence_view_async_tmem_store()
    fence_before_thread_sync()


def store_rounded(values: cute.Tensor, row: cute.Tensor, columns: int) -> None:
    """Store a thread's columns of O to a row in shared memory, so many rounded at a time."""
    own, to = (cute.logical_divide(one, cute.make_layout(columns)) for one in (values, row))
    for part in range(cute.size(values) // columns):
        rounded = cute.make_rmem_tensor(columns, row.element_type)
        rounded.store(own[None, part].load().to(row.element_type))
        cute.autovec_copy(rounded, to[None, part])


@cute.jit
def store_zeros(row: cute.Tensor):
    zeros = cute.make_rmem_tensor(8, row.element_type)
    zeros.fill(0.0)
    chunks = cute.logical_divide(row, cute.make_layout(8))
    for chunk in cutlass.range(HEAD_DIM // 8, unroll=1):
        cute.autovec_copy(zeros, chunks[None, chunk])


def output_slices(
    o: TmaTensor, staged: cute.Tensor, buffer: Int32, place: TilePlace, columns: int, packed: int
) -> tuple[cute.Tensor, cute.Tensor]:
    """Return staged O and its targets by slices of columns, as TMA stores take them."""
    shape = (cute.size(staged, mode=[0]), columns)
    tiles = tma_tile(o.tensor, shape, place, packed)
    slices = cute.local_tile(staged[None, None, buffer], shape, (0, None))
    return cpasync.tma_partition(
        o.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(slices, 0, 2),
        cute.group_modes(tiles, 0, 2),
    )
