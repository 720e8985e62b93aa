"""Coordinates of cluster tiles by their linear index, in the order of `order`."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from .order import PackedBlocks, TileOrder, select
from .protocol import WorkTile


def make_work_tile(index: Int32, is_valid: Boolean, order: TileOrder) -> WorkTile:
    """The work tile with this linear index (any index where `is_valid` is False)."""
    block, head, batch = tile_coordinates(index, order)
    return WorkTile(Int32(block), Int32(head), Int32(batch), Boolean(is_valid))


def tile_coordinates(index: Any, order: TileOrder) -> tuple[Any, Any, Any]:
    """Return (block, head, batch) of the cluster tile with this linear index. `index` must be in
    [0, order.num_tiles). The same statements run on Python integers and on Int32 values; a
    bijection for every order."""
    section, in_section = divmod(index, order.per_section)
    in_last = index >= order.last_tile
    first = select(in_last, order.last_pair, section * order.section_heads)
    in_section = select(in_last, index - order.last_tile, in_section)
    rank, in_block = divmod(in_section, order.per_block)
    last_rank, last_in_block = divmod(in_section, order.per_block_of_last_section)
    rank = select(in_last, last_rank, rank)
    in_block = select(in_last, last_in_block, in_block)
    batch, head = divmod(first + in_block, order.per_batch)
    block = order.num_blocks - 1 - rank if order.later_blocks_first else rank
    if order.packed is not None:
        block, batch = _of_row(block, batch, order.packed)
    return block, head, batch


def _of_row(block: Any, batch: Any, packed: PackedBlocks) -> tuple[Any, Any]:
    """Return (block, batch) where blocks may be in a row."""
    if isinstance(block, int):
        return packed.locate(block) if packed.is_used else (block, batch)
    return _of_row_on_device(Int32(block), Int32(batch), packed)


@cute.jit
def _of_row_on_device(block: Int32, batch: Int32, packed: PackedBlocks) -> tuple[Int32, Int32]:
    if packed.is_used != 0:
        block, batch = packed.locate(block)
        # Offsets that do not ascend may put a sequence's first number behind this one.
        block = cutlass.max(block, 0)
    return block, batch
