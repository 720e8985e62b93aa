"""A list of the parts into which the keys of sequences of different lengths are divided.

It lies in global memory as int32: the keys of a part; a word for each part that the grid has room
for; and for each sequence, and behind the last one, the number of its first part.  A word is the
sequence, whether the part is its last one, and the part's number in it; of room that is not used
the number is past all keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from .masking import Part

__all__ = ["LAST_BIT", "SEQUENCE_SHIFT", "UNUSED", "PartList", "list_length"]

#: Of a word: the bit of a sequence's last part, above the part's number, and the bits below the
#: sequence.
LAST_BIT, SEQUENCE_SHIFT = 1 << 7, 8
#: The number of a part that is none: more than `combine_config.MOST_PARTS`, so that no sequence has
#: a key left with it.
UNUSED = LAST_BIT - 1


def list_length(num_parts: int, num_sequences: int) -> int:
    """Words of a list."""
    return 1 + num_parts + num_sequences + 1


class PartList(NamedTuple):
    """words: of the list.  num_parts: that the grid has room for."""

    words: cute.Tensor
    num_parts: Any

    @property
    def num_sequences(self) -> Any:
        return cute.size(self.words) - self.num_parts - 2

    def sequence(self, number: Int32) -> Int32:
        """The sequence that a part belongs to."""
        return self.words[1 + number] >> SEQUENCE_SHIFT

    def part(self, number: Int32) -> Part:
        """Which part of its sequence's keys it is."""
        word = self.words[1 + number]
        is_last = (word & LAST_BIT) != 0
        return Part(word & (LAST_BIT - 1), None, self.words[0], is_last)

    def of_sequence(self, entry: Int32) -> tuple[Int32, Int32]:
        """(the first part of a sequence, of how many)."""
        first = self.words[1 + self.num_parts + entry]
        return first, self.words[2 + self.num_parts + entry] - first
