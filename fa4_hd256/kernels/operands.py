"""Operand tiles in shared memory, as TMA writes them and the tensor cores read them.

Every tile has the 128-byte swizzle and lies as blocks of 64 columns: a row of a block is 128
bytes, 8 rows are an atom of 1024 (PTX ISA 9.7.15.5.1.2 and 9.7.16.4, canonical layouts).  The same
bytes serve as a K-major operand (the columns are reduced over) or an MN-major one (the rows are).

NOTE [address by symbol].  CuTe DSL reads the address of dynamic shared memory and broadcasts it to
the warp.  ptxas does not repeat a broadcast, so it keeps the result in a uniform register through
all roles, and where these run out it spills it to the stack (ptxas 13.0 and 13.5, the decode kernel
of 64 rows: 62 loads from the stack, some of them in the steps).  An address that is read by the
symbol's name alone is made again wherever it is used.  Where CuTe DSL calls the symbol otherwise,
ptxas refuses the kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from .limits import SWIZZLE_ALIGNMENT
from .rows.sequences import TilePlace, tma_tile

BLOCK_COLUMNS = 64
ROW_BYTES = 128  # of a block: 64 16-bit elements
ATOM_ROWS = 8
#: Result of createpolicy.fractional.L2::evict_last for all of an access (PTX ISA 9.7.9.18), as
#: ptxas makes it.
EVICT_LAST = 0x14F0000000000000


class TmaTensor(NamedTuple):
    """A TMA atom and its coordinates. from_start: of tiles clipped there, None for none."""

    atom: Any
    tensor: Any
    from_start: Any = None


def smem_layout(rows: int, columns: int, stages: int) -> Any:
    """rows x columns x stages of a 16-bit type: the layout of the module's docstring."""
    # Bits 4 to 6 of an address, which of a row's 8 pieces of 16 bytes, are exchanged by the row's.
    swizzle = cute.make_swizzle(3 if columns >= BLOCK_COLUMNS else 0, 4, 3)
    of_atom = min(columns, BLOCK_COLUMNS)  # rows of fewer lie one behind the other
    rows_of_atom = cute.make_layout((ATOM_ROWS, of_atom), stride=(of_atom, 1))
    atom = cute.make_composed_layout(swizzle, 0, rows_of_atom)
    return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))


#: Target of a load: (barrier that its bytes complete on, number of the buffer).
LoadTarget = tuple[cute.Pointer, Any]


class SharedMemory:
    """The regions of a SMEM plan at their addresses; made by all threads of the CTA."""

    def __init__(
        self, allocator: SmemAllocator, plan: Any, dtype: Any, by_symbol: bool = False
    ) -> None:
        """by_symbol: NOTE [address by symbol]."""
        # The scheduler's set-up allocates the region "scheduler", the last one, itself.
        self._offsets = plan.offsets()
        self._base = allocator.allocate(self._offsets["scheduler"], SWIZZLE_ALIGNMENT)
        if by_symbol:
            self._base = _by_symbol(self._base)
        self._dtype = dtype

    def region(self, name: str, element_type: Any, alignment: int) -> cute.Pointer:
        """The first element of a region."""
        pointer = (self._base + self._offsets[name]).align(alignment)
        return cute.recast_ptr(pointer, dtype=element_type)

    def operand(
        self, name: str, rows: int, columns: int, stages: int, dtype: Any = None
    ) -> cute.Tensor:
        """A region as rows x columns x stages of an operand (`smem_layout`).  dtype: of 16 bits,
        None for that of the call."""
        layout, dtype = smem_layout(rows, columns, stages), dtype or self._dtype
        pointer = cute.recast_ptr(
            self.region(name, dtype, SWIZZLE_ALIGNMENT), layout.inner, dtype=dtype
        )
        return cute.make_tensor(pointer, layout.outer)


def _by_symbol(base: cute.Pointer) -> cute.Pointer:
    """The beginning of dynamic shared memory. base: the same, as CuTe DSL has it; a kernel that
    does not use it lacks the symbol."""
    address = cute.arch.inline_ptx(
        "{.reg .b32 used;\nmov.b32 used, {$r0};\nmov.b32 {$w0}, __dynamic_shmem__0;}",
        write_only_types=[Int32],
        read_only_args=[Int32(base.toint())],
    )
    return cute.make_ptr(Uint8, address, cute.AddressSpace.smem, assumed_align=SWIZZLE_ALIGNMENT)


def load_tile(
    source: TmaTensor,
    smem: cute.Tensor,
    place: TilePlace,
    barrier: cute.Pointer,
    stage: Any,
    packed: int = 1,
    **options: Any,
) -> None:
    """One TMA load into `smem[.., .., stage]` of `tma_tile`(`place`).  options: of `load_box`."""
    shape = (cute.size(smem, mode=[0]), cute.size(smem, mode=[1]))
    tile = tma_tile(source.tensor, shape, place, packed, least=1)
    load_box(source, smem, tile, barrier, stage, **options)


def load_box(
    source: TmaTensor,
    smem: cute.Tensor,
    tile: cute.Tensor,
    barrier: cute.Pointer,
    stage: Any,
    multicast: Any = None,
    evict_last: bool = False,
) -> None:
    """Load a tile, by its coordinates; otherwise as `load_tile`.

    multicast: a bit for each CTA of the cluster that gets it, at the same address and on the same
    barrier of its own, for an operation that can; None for this CTA alone.  evict_last: L2 gives it
    up after what else it has (evict_last, PTX ISA 9.7.9.2).
    """
    to_smem, from_global = _partition(source, smem, tile)
    options = {} if multicast is None else {"mcast_mask": multicast}
    if evict_last:
        options["cache_policy"] = Int64(EVICT_LAST)
    cute.copy(source.atom, from_global, to_smem[None, stage], tma_bar_ptr=barrier, **options)


def prefetch_tile(source: TmaTensor, smem: cute.Tensor, place: TilePlace, packed: int = 1) -> None:
    """Prefetch into L2 a tile of `place` (`tma_tile`): cp.async.bulk.prefetch.tensor (9.7.9.27)."""
    shape = (cute.size(smem, mode=[0]), cute.size(smem, mode=[1]))
    tile = tma_tile(source.tensor, shape, place, packed, least=1)
    cute.prefetch(source.atom, _partition(source, smem, tile)[1])


def _partition(source: TmaTensor, smem: cute.Tensor, tile: cute.Tensor) -> tuple[Any, Any]:
    return cpasync.tma_partition(
        source.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(smem, 0, 2),
        cute.group_modes(tile, 0, 2),
    )
