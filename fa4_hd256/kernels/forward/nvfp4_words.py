"""K and V in NVFP4 in shared memory: loads of their words, and of the block scales beside them.

A row of codes is 128 bytes, one row of the swizzle, and its scales are 16 bytes; the scales of a
tile's rows lie one behind the other.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from ..limits import HEAD_DIM, WARP_SIZE
from ..nvfp4_format import BLOCK_SCALES, NVFP4_BLOCK
from ..operands import ROW_BYTES
from ..rows.lanes import PIECE_BYTES, copy_row
from ..rows.sequences import by_sequence
from .context import ForwardKernelTensors
from .gathered import NO_PAGE

#: Words of codes and of scales in a row.
ROW_WORDS, SCALE_WORDS = ROW_BYTES // 4, HEAD_DIM // NVFP4_BLOCK // 4
#: Columns of a row of codes, and of its scales, as 16-bit elements.
CODE_COLUMNS, SCALE_COLUMNS = HEAD_DIM // 4, HEAD_DIM // NVFP4_BLOCK // 2


def with_block_scales(
    kernel: Any, tensors: ForwardKernelTensors, load: Any, rows: int
) -> ForwardKernelTensors:
    """Return the tensors with the block scales as the kernel loads them.  rows: of a tile."""
    scales = tensors.optional.k_block_scale, tensors.optional.v_block_scale
    found = [by_sequence(one, columns=SCALE_COLUMNS) for one in scales]
    if not kernel.gathers:
        box = load, rows, SCALE_COLUMNS
        found = [kernel.tma_tensor(name, view, box) for name, view in zip("kv", found, strict=True)]
    loaded = dict(zip(BLOCK_SCALES, found, strict=True))
    return tensors._replace(optional=tensors.optional._replace(**loaded))


def copy_scales(source: cute.Tensor, buffer: cute.Pointer, tile: Any, head: Int32) -> None:
    """Copy the scales of a warp's rows of a `GatheredTile`, each lane those of its own."""
    for number, (page, row) in enumerate(tile.pairs):
        origin = source[row, None, head, cutlass.max(page, 0)].iterator.toint()
        place = tile.first_row + number * WARP_SIZE + cute.arch.lane_idx()
        size = cutlass.select_(page == NO_PAGE, Int32(0), Int32(PIECE_BYTES))
        copy_row(buffer.toint() + place * PIECE_BYTES, origin, size, 1, 0)


def load_words(tiles: cute.Tensor, start: Int32, count: int) -> cute.Tensor:
    """Some elements of the buffers, from a multiple of their number on."""
    words = cute.make_rmem_tensor(count, tiles.element_type)
    place = (tiles.iterator + start).align(count * tiles.element_type.width // 8)
    cute.autovec_copy(cute.make_tensor(place, cute.make_layout(count)), words)
    return words


def select_bytes(first: Any, second: Any, selector: Any) -> Any:
    """Four of the eight bytes of two words: prmt.b32 (PTX ISA 9.7.9.7)."""
    return cute.arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Uint32],
        read_only_args=[first, second, selector],
    )


def scale_pair(word: Any) -> Any:
    """Two e4m3 in the low half of a word as f16x2: cvt.rn.f16x2.e4m3x2 (PTX ISA 9.7.9.22)."""
    return cute.arch.inline_ptx(
        "{.reg .b16 low, high;\nmov.b32 {low, high}, {$r0};\ncvt.rn.f16x2.e4m3x2 {$w0}, low;}",
        write_only_types=[Uint32],
        read_only_args=[word],
    )
