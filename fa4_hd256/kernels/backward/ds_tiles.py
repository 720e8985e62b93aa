"""dS in global memory, between the kernel that makes it and the GEMMs that read it.

Tiles of 128 keys x 128 queries, contiguous, each as the tensor core reads it without a swizzle:
core matrices of 8 rows of 16 bytes (PTX ISA 9.7.15.5.1.2 and 9.7.16.4, canonical layouts).  Element
(k, q) of a tile lies at byte q // 8 * 2048 + k * 16 + q % 8 * 2.  Reduced over queries a tile is a
K-major operand, reduced over keys an MN-major one: the same image, another descriptor.

A thread that holds consecutive queries of one key writes 16 bytes for every 8 of them, a warp 512
consecutive bytes.

NOTE [blocks of dS]. The GEMMs read tiles in pairs: 256 keys of a CTA pair for dK, 256 queries for
dQ.  So a block of 256 keys x 256 queries in which any query sees any key is written as a whole,
with zeros where nothing is seen and beyond the ends of the sequences; no other block is written, or
read.

NOTE [numbers of tiles].  Only tiles of those blocks have room, one after the other in the order in
which the kernel of dV writes them: by tiles of keys, then by tiles of queries.  Those of a block
mask have numbers in its lists (`backward.block_mask`).  Any other mask has slope 1
and blocks are square, so that block b of the keys meets the blocks of queries
max(b + first, 0) .. min(b + limit, blocks) - 1, and how many there are before it is a difference of
sums of arithmetic progressions.

NOTE [units of dS].  Sequences of a length share one count of tiles.  The host does not know other
lengths, so memory is split into units of a block of keys each, all of a size that the tiles of any
sequence's blocks of keys have room in, together; a sequence begins at a unit that follows of its
place among the packed keys.  The whole is (query heads, units, tiles of a unit, elements of a
tile); of sequences of a length each is a unit.  Where the host has read the lengths
(`get_backward_metadata`), it says at which tile each begins, and all are one unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...schedulers.order import maximum, minimum
from ..limits import ELEMENT_BYTES
from ..mask.masking import MaskKind
from ..mask.windows import Reach
from ..plan.edges import SharedByReference
from .common import BackwardContext

DS_TILE = 128  # keys, and queries, of a tile
BLOCK_TILES = 2  # tiles of a block, either way
DS_BLOCK = BLOCK_TILES * DS_TILE  # keys, and queries, of a block: NOTE [blocks of dS]
DS_TILE_ELEMENTS = DS_TILE * DS_TILE
DS_TILE_BYTES = DS_TILE_ELEMENTS * ELEMENT_BYTES

#: Consecutive queries of a key, and the elements from one such run to the next.
RUN = 16 // ELEMENT_BYTES
RUN_STRIDE = DS_TILE * RUN

#: Shifts round down, below 0 too, and on the device in one instruction.
BLOCK_BITS = DS_BLOCK.bit_length() - 1


def tile_strides() -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return (shape, strides) in elements of a tile as (key, run of 8 queries, query in it)."""
    return (DS_TILE, DS_TILE // RUN, RUN), (RUN, RUN_STRIDE, 1)


def count_blocks(length: Any) -> Any:
    """Blocks of so many rows; the last may be short; of an int or an Int32."""
    return (length + (DS_BLOCK - 1)) >> BLOCK_BITS


@dataclass(frozen=True)
class DsTiles(SharedByReference):
    """The tiles of a query head in a sequence and their numbers: NOTE [numbers of tiles].

    blocks_q: of queries.  first, limit: see the note; None where the mask has no such bound.  ints,
    or Int32 on the device.
    """

    blocks_q: Any
    first: Any
    limit: Any

    @classmethod
    def of(cls, lengths: tuple[Any, Any], kind: MaskKind, window: tuple[Any, Any]) -> DsTiles:
        """Return the dS tiles of a sequence of so many queries and keys, without hidden ones.
        window: (left, right) as in `Visibility`."""
        (queries, keys), (left, right) = lengths, window
        blocks_q, first, limit = count_blocks(queries), None, None
        # Key j is seen by the queries j + queries - keys - right .. j + queries - keys + left.
        if kind.bounded_right:
            first = (queries - keys - right) >> BLOCK_BITS
        if kind.bounded_left:
            # Beyond the last block nothing changes, and products with it stay in 32 bits.
            limit = minimum(1 + count_blocks(queries - keys + left), blocks_q)
        return cls(blocks_q, first, limit)

    def count(self, keys: int) -> int:
        blocks = count_blocks(keys)
        begins = self._begins(blocks, 0) - self._begin(blocks)
        return BLOCK_TILES * (self._ends(blocks, 0) - begins)

    def row(self, kv_tile: Any) -> Any:
        """Return the offset from a query tile's number to the number of its dS tile."""
        block, half = kv_tile >> 1, kv_tile & 1
        return BLOCK_TILES * (self._ends(block, half) - self._begins(block, half))

    def _begin(self, block: Any) -> Any:
        return 0 if self.first is None else maximum(block + self.first, 0)

    def _begins(self, block: Any, half: Any) -> Any:
        """Sum of the first blocks of queries of all tiles of keys up to this one."""
        if self.first is None:
            return 0
        begin, start = self._begin(block), maximum(self.first, 0)
        return begin * (begin + half) - start * (start - 1)

    def _ends(self, block: Any, half: Any) -> Any:
        """Sum of one past the last blocks of queries of all tiles of keys before this one."""
        if self.limit is None:
            return (BLOCK_TILES * block + half) * self.blocks_q
        limit, start = block + self.limit, maximum(self.limit, 0)
        end = minimum(limit, self.blocks_q)
        beyond, end = limit - end, maximum(end, 0)
        rising = end * (end - 1 + half) - start * (start - 1)
        return rising + BLOCK_TILES * beyond * self.blocks_q


def count_tiles(lengths: tuple[int, int], window: tuple[int | None, int | None]) -> int:
    """Tiles of a query head in a sequence of so many queries and keys.  window: (left, right) of
    either sign, None for unbounded."""
    reach = Reach.of(window)
    (left, right), lengths = reach.window, reach.lengths(*lengths)
    tiles = DsTiles.of(lengths, MaskKind(left is not None, right is not None), reach.window)
    return tiles.count(lengths[1])


def ds_units(
    longest: tuple[int, int],
    window: tuple[int | None, int | None],
    sequences: int,
    packed: int | None,
) -> tuple[int, int]:
    """Return (units, tiles of each) of a query head, for sequences of unequal lengths: NOTE [units
    of dS].

    longest: queries and keys that no sequence has more of.  window: (left, right), None for
    unbounded.  packed: keys of all sequences where they are packed, None where they are padded.
    """
    (queries, keys), (left, right) = map(count_blocks, longest), Reach.of(window).window
    # Blocks of queries that a block of keys meets, twice, on average over those of a sequence.
    widths = [2 * queries]
    if right is not None:
        # Block b of n meets those that begin at keys beyond b, n - b and one that the sequences'
        # ends may cut.
        widths.append(keys + 3 + 2 * count_blocks(right))
        if left is not None:
            widths.append(2 * (count_blocks(left + right) + 2))
    return first_unit(sequences, keys, packed), BLOCK_TILES * min(widths)


def first_unit(sequence: Any, blocks: Any, offset: Any) -> Any:
    """The unit in which a sequence's tiles begin; behind the last one how many units there are.

    blocks: of keys of the longest sequence.  offset: keys before it where they are packed, else
    None.  The smaller of two places, both large enough: a sequence's blocks of keys are no more
    than the longest one's, nor than those between packed sequences of which each has one more.
    """
    padded = sequence * blocks
    return padded if offset is None else minimum(padded, (offset >> BLOCK_BITS) + sequence)


@dataclass(frozen=True)
class StoredDs(SharedByReference):
    """dS of a sequence in memory.  first: number of its first tile, in every query head."""

    tiles: DsTiles
    first: Int32

    @classmethod
    def of(cls, context: BackwardContext, work: Any) -> StoredDs:
        seen, sequences = context.visibility(work, DS_TILE), context.sequences
        window = seen.window_left, seen.window_right
        tiles = DsTiles.of((seen.seqlen_q, seen.seqlen_k), seen.kind, window)
        unit = context.batch(work)
        begins = sequences.tensors.ds_begins
        if cutlass.const_expr(begins is not None):
            return cls(tiles, begins[unit])
        if cutlass.const_expr(sequences.tensors.are_unequal):
            blocks = count_blocks(context.scalars.max_seqlen_k)
            offset = sequences.tensors.cu_seqlens_k
            unit = first_unit(unit, blocks, None if offset is None else offset[unit])
        return cls(tiles, unit * context.tensors.ds.shape[2])

    def row(self, kv_tile: Int32) -> Int32:
        return self.first + self.tiles.row(kv_tile)


def tiles_of_head(ds: cute.Tensor) -> Int32:
    _, units, of_unit, _ = ds.shape
    return units * of_unit


def within_head(ds: cute.Tensor, number: Int32, tensors: Any) -> Int32:
    """A tile's number in its query head, brought into the room of one where sequences have lengths
    of their own: these may contradict what the room was made for (`tail_rows`, NOTE [wrong
    lengths]).  tensors: `SequenceTensors`."""
    if not tensors.are_unequal:
        return number
    return cutlass.max(cutlass.min(number, tiles_of_head(ds) - 1), 0)


def tile_of(ds: cute.Tensor, number: Int32) -> cute.Tensor:
    """A tile of dS by its number among all, as (key, run of 8 queries, query in the run)."""
    shape, strides = tile_strides()
    # Heads and units lie one behind the other, so the number may go beyond the first ones'.
    first = ds[0, 0, number, None].iterator.align(16)
    return cute.make_tensor(first, cute.make_layout(shape, stride=strides))
