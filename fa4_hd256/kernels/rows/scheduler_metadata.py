"""Scheduler metadata: a list of the KV splits of sequences of different lengths.

It lies in global memory as int32: a header; a word for each split that the grid has room for; and
for each sequence, and behind the last one, the number of its first split.  A word is the sequence,
whether the split is its last one, and the split's number in it; of room that is not used the number
is past all keys.

NOTE [header of scheduler metadata].  The header holds the keys of a split, then what the list was
made for: splits that it has room for, sequences, query heads.  Copies keep it, and the host reads
none of it.  The combining kernel compares it with the call and writes NaN if they differ.  The
forward reads any other memory in place of a list without leaving its tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ..mask.masking import KvSplit

#: Words of the header.
HEADER = 4
#: Keys of a split at most, so that products with the number of a split stay in 32 bits.
MOST_KEYS = 1 << 23

#: Bits of a word: that of a sequence's last split, above the split's number, and the bits below the
#: sequence.
LAST_BIT, SEQUENCE_SHIFT = 1 << 7, 8
#: The number of a split that is none: more than `combine_config.MOST_PARTS`, so that no sequence
#: has a key left with it.
UNUSED = LAST_BIT - 1


def list_length(num_splits: int, num_sequences: int) -> int:
    return HEADER + num_splits + num_sequences + 1


class SchedulerMetadata(NamedTuple):
    """The list as kernels read it."""

    words: cute.Tensor
    #: Splits that the grid has room for.
    num_splits: Any

    @property
    def num_sequences(self) -> Any:
        return cute.size(self.words) - self.num_splits - (HEADER + 1)

    def is_for(self, heads: Any) -> Boolean:
        """Return True if the list is for this call: NOTE [header of scheduler metadata]."""
        words, (splits, sequences) = self.words, (self.num_splits, self.num_sequences)
        return (words[1] == splits) & (words[2] == sequences) & (words[3] == heads)

    def sequence(self, number: Int32) -> Int32:
        sequence = self.words[HEADER + number] >> SEQUENCE_SHIFT
        return cutlass.max(cutlass.min(sequence, self.num_sequences - 1), 0)

    def part(self, number: Int32) -> KvSplit:
        word = self.words[HEADER + number]
        is_last = (word & LAST_BIT) != 0
        keys = cutlass.max(cutlass.min(self.words[0], MOST_KEYS), 1)
        return KvSplit(word & (LAST_BIT - 1), None, keys, is_last)

    def of_sequence(self, entry: Int32) -> tuple[Int32, Int32]:
        """Return (the first split of a sequence, of how many)."""
        begin = HEADER + self.num_splits + entry
        first = self.words[begin]
        return first, self.words[begin + 1] - first
