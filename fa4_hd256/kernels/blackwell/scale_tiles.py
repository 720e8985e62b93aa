"""Scales of blocks in global memory, by tiles of 128 rows, and on their way to shared memory.

NOTE [tiles of packed sequences].  Each sequence begins with an atom of its own: before it there are
ceil(length / 128) tiles for each one.  The load warp counts them once a tile, a lane a sequence.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync, tcgen05

from ...schedulers.protocol import WorkTile
from ..block_scales import ATOM_BYTES, ATOM_ROWS, ATOMS, SCALE_ALIGNMENT
from ..limits import FLOAT_BYTES, WARP_SIZE
from ..operands import LoadTarget, SharedMemory, TmaTensor, load_box

#: Words of an atom, and bytes that the buffers of scales are aligned to.
ATOM_WORDS = ATOM_BYTES // FLOAT_BYTES


class ScaleTiles:
    """Base of a context: the numbers of the tiles of scales. first_tiles: of one tile, those of its
    sequence among the packed ones, of queries and of keys; None until they are counted
    (`counted`)."""

    first_tiles: tuple[Int32, Int32] | None
    sequences: Any
    batch: Any

    def counted(self, work: WorkTile) -> tuple[Int32, Int32]:
        """Return `first_tiles` of a tile."""
        return self._first_tile("q", work), self._first_tile("k", work)

    def scale_tile(self, side: str, work: WorkTile, row: Int32) -> Int32:
        if self.first_tiles is None:
            first = self._first_tile(side, work)
        else:
            first = self.first_tiles[side != "q"]
        return first + row // ATOM_ROWS

    def _first_tile(self, side: str, work: WorkTile) -> Int32:
        """NOTE [tiles of packed sequences]."""
        tensors = self.sequences.tensors
        offsets = tensors.cu_seqlens_q if side == "q" else tensors.cu_seqlens_k
        if offsets is None:
            return Int32(0)
        return tiles_before(offsets, self.batch(work))


@cute.jit
def tiles_before(offsets: cute.Tensor, batch: Int32) -> Int32:
    """Return the tiles of all sequences before one; by all lanes of a warp."""
    tiles = Int32(0)
    for first in cutlass.range(0, batch, WARP_SIZE, unroll=1):
        sequence = first + cute.arch.lane_idx()
        if sequence < batch:
            length = offsets[sequence + 1] - offsets[sequence]
            tiles += (length + ATOM_ROWS - 1) // ATOM_ROWS
    return cute.arch.warp_redux_sync(tiles, "add")


def scale_tensor(tensor: cute.Tensor) -> TmaTensor:
    """The TMA tensor of scales, (batch, heads, tiles, 2, 128) words: a box is two atoms."""
    layout = cute.make_layout((1, 1, 1, ATOMS, ATOM_WORDS), stride=(0, 0, 0, ATOM_WORDS, 1))
    operation = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)
    box = (1, 1, 1, ATOMS, ATOM_WORDS)
    info = cpasync.make_tiled_tma_atom(operation, tensor, layout, box)
    return TmaTensor(info[0], info[1])


def scale_buffers(memory: SharedMemory, name: str, stages: int) -> cute.Tensor:
    """Return a region of so many buffers of two atoms, (2, 128, stages) words."""
    region = memory.region(name, Int32, SCALE_ALIGNMENT)
    strides = ATOM_WORDS, 1, ATOMS * ATOM_WORDS
    return cute.make_tensor(region, cute.make_layout((ATOMS, ATOM_WORDS, stages), stride=strides))


def load_scales(
    source: TmaTensor, smem: cute.Tensor, place: tuple[Int32, Int32, Int32], target: LoadTarget
) -> None:
    """Load the scales of a tile.  place: (batch entry, head, number of the tile)."""
    batch, head, tile = place
    atoms = source.tensor[batch, head, tile, None, None]
    box = cute.local_tile(atoms, (ATOMS, ATOM_WORDS), (0, 0))
    load_box(source, smem, box, *target)
