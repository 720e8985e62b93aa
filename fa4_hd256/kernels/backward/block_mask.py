"""Lists of the dS tiles of a call with a block mask, and bits by keys.

NOTE [listed blocks].  dS is written and read in blocks of 256 keys x 256 queries
(`backward.ds_tiles`, NOTE [blocks of dS]); those in which a query of any head sees a key are listed
in global memory.  A row for each block of keys names the tiles of 128 queries of its blocks, in
rising order, with the tile of bits of either half of its keys for each head; a row for each block
of queries, behind those, names tiles of 128 keys, in falling order.  The words before the first
entry are how many these are: of all, for the kernel that writes whole blocks, and of those that
exist, for the GEMMs. NOTE [numbers of listed tiles].  Tiles of dS that no list names have no room,
and no number.  All others lie one after the other as the kernel of dV writes them: by blocks of
keys, their halves, then by places in the list.  A list of a block of keys says, behind how many
tiles there are, the number of its first one; its other half's follow those that are written of the
first.  A list of a block of queries says for each tile of keys the number of the first of its two.

NOTE [long lists].  Some keys may be seen by all queries where others are seen by a window's: their
tile takes as long as dozens of others, and one that begins late ends last.  So the heads of a
section, whose tiles of the first keys come first, are at least so many that few of them are at work
on one head (`TILES_OF_A_HEAD`); what L2 holds is counted by all queries; lists are a part of these.

Bits are those of `block_mask` with queries and keys exchanged: rows of keys, bits of queries.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ..mask.block_mask import FULL, NOTHING
from ..mask.masking import WORD_BITS
from ..plan.edges import SharedByReference

#: Tiles of one head at work at once, at most: NOTE [long lists].
TILES_OF_A_HEAD = 4
#: Words of a list's first entry: how many tiles are written, and how many are read; of a block of
#: keys the number of its first tile of dS.
WRITTEN, READ, FIRST = 0, 1, 2
#: Word of an entry of a block of queries: NOTE [numbers of listed tiles].
NUMBER = 1


def least_section(problem_class: Any, clusters: Any) -> Any:
    """Heads of a section, at least, on so many CTA pairs: NOTE [long lists]."""
    return clusters // TILES_OF_A_HEAD if problem_class.lists_steps else 1


class BlockList(SharedByReference):
    """The list of one block of keys or of queries. entries: (1 or heads, 1 + most tiles,
    STEP_WORDS) int32; bits: (tiles, MASK_TILE, BIT_WORDS) int32, by keys, None where there are
    none."""

    def __init__(self, entries: cute.Tensor, bits: Any) -> None:
        self._entries, self._bits = entries, bits

    @classmethod
    def of(cls, tensors: Any, batch: Int32, row: Int32) -> BlockList:
        table = tensors.mask_blocks
        batch = cutlass.min(batch, Int32(cute.size(table, mode=[0])) - 1)
        return cls(table[batch, None, row, None, None], tensors.mask_key_bits)

    @property
    def written(self) -> Int32:
        return self._entries[0, 0, WRITTEN]

    @property
    def read(self) -> Int32:
        return self._entries[0, 0, READ]

    def tile(self, place: Int32) -> Int32:
        """The number of a tile of queries, or of keys."""
        return self._entries[0, place + 1, 0]

    def ds_row(self, half: Int32) -> Int32:
        """Return the offset from a list entry to its dS tile number, in a block of keys.  half: of
        its keys, that of a CTA."""
        return self._entries[0, 0, FIRST] + half * self.written

    def ds_column(self, place: Int32) -> Int32:
        """Return the offset from a half of the queries to its dS tile number."""
        return self._entries[0, place + 1, NUMBER]

    def steps_tile(self, step: Int32, parts: int) -> Int32:
        """Return the tile of a step, counted in steps; each tile has `parts` steps."""
        if parts == 1:
            return self.tile(step)
        return self.tile(step // parts) * parts + step % parts

    def bit_tile(self, place: tuple[Int32, Int32], half: Int32) -> Int32:
        """The number of a tile of bits.  place: (query head, place in the list); half: of the
        block's keys, that of a CTA."""
        head, number = place
        head = cutlass.min(head, Int32(cute.size(self._entries, mode=[0])) - 1)
        return self._entries[head, number + 1, half + 1]

    def key_bits(
        self, place: tuple[Int32, Int32], half: Int32, keys: list[Int32], words: tuple[Int32, Int32]
    ) -> tuple[Boolean, tuple[Int32, ...]]:
        """Return (whether there may be a query that does not see a key, words of bits of queries).
        place, half: see `bit_tile`; keys: in the half. words: (the first of two words of each key,
        by how many bits they are moved down)."""
        bit_tile = self.bit_tile(place, half)
        first, shift = words
        rows = self._bits[cutlass.max(bit_tile, NOTHING), None, None]
        bits = [rows[key, first + word] >> shift for key in keys for word in range(WORD_PAIR)]
        return bit_tile != FULL, tuple(bits)


#: Words of 64 queries: those that a warpgroup has of a step.
WORD_PAIR = 64 // WORD_BITS
