"""Packed sequences whose queries see keys that an indexer chose: masked MHA of sparse MLA models.

In prefill such models (GLM-5, DeepSeek-V3.2) expand K and V to heads of their own, and below some
length attend to all keys under a mask of the chosen ones. An engine has it as packed bits, 32 keys
a word, of each layer. A case says it as `masks.MaskedCase` does, by a function of (sequence, head,
query, key), counted in the sequence, and as words: of the packed row, whose rows and keys are those
of the packed tensors, and of each sequence by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch.nn.functional import pad

from bench.suite import MHA_BATCHES, Case
from fa4_hd256 import masks

from .masks import ROWS, MaskedCase, MaskMod

#: Keys that DeepSeek's and GLM's indexers choose of each query; all where there are no more.
CHOSEN = 2048
#: Bits of a word, and 2^32 - 1.
WORD_BITS, WORD = 32, 0xFFFFFFFF
#: Heads of GLM-5, whole and on one of eight GPUs.
GLM_HEADS = (64, 8)


def _scrambled(number: torch.Tensor) -> torch.Tensor:
    """Map int64 to 0 .. 2^32 - 1 as if by chance, the same on every device."""
    for factor, shift in ((0x7FEB352D, 16), (0x846CA68B, 15)):
        number = number & WORD
        number = (number ^ (number >> shift)) * factor
    number = number & WORD
    return number ^ (number >> 16)


@dataclass(frozen=True)
class ChosenKeys:
    """Causal, and of the keys before a query so many, by chance: each is seen with one probability.
    A query that has no more than so many sees them all."""

    keys: int = CHOSEN
    by_entry: ClassVar[bool] = True

    @property
    def text(self) -> str:
        return f"causal, {self.keys} chosen keys"

    def tile_mask(self, batch: int, seqlen: int, device: torch.device) -> masks.TileMask:
        entries, tokens = (torch.arange(count, device=device) for count in (batch, seqlen))
        seen = self.mask_mod(batch, seqlen, device)(
            entries[:, None, None, None], 0, tokens[:, None], tokens
        )
        return masks.from_dense(seen)

    def mask_mod(self, batch: int, seqlen: int, device: torch.device) -> MaskMod:
        def seen(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
            drawn = _scrambled(q * 0x9E3779B1 + k * 0x85EBCA6B + b * 0x27D4EB2F)
            return (k <= q) & (drawn * (q + 1) < self.keys << WORD_BITS)

        return seen


def _words_of(seen: torch.Tensor) -> torch.Tensor:
    """Pack (rows, keys) bool into (rows, words) int32: bit j of word w is key 32 w + j."""
    weights = 1 << torch.arange(WORD_BITS, dtype=torch.int32, device=seen.device)
    bits = pad(seen, (0, -seen.shape[1] % WORD_BITS)).unflatten(1, (-1, WORD_BITS))
    return (bits * weights).sum(-1, dtype=torch.int32)


def seen_in(words: torch.Tensor) -> MaskMod:
    """Return the mask_mod of the packed row that reads its words, as FlexAttention takes it."""

    def seen(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        found: torch.Tensor = ((words[q, k >> 5] >> (k & 31)) & 1) == 1
        return found

    return seen


def seen_in_kernel(batch: Any, head: Any, query: Any, key: Any, tensors: tuple) -> Any:
    """Mask of `seen_in`, in CuTe DSL."""
    (words,) = tensors
    return ((words[query, key >> 5] >> (key & 31)) & 1) != 0


@dataclass(frozen=True)
class PackedMaskedCase(MaskedCase):
    """A packed `Case` whose mask is a pattern in each sequence; of as many queries as keys."""

    def __post_init__(self) -> None:
        Case.__post_init__(self)
        if not self.packed or self.causal or self.bounds != (None, None) or self._is_unequal:
            raise ValueError(
                f"{self.group}: a mask of packed sequences beside causal, a window, or other "
                "lengths of keys, or of sequences that are not packed; accepted: packed ones alone"
            )

    @property
    def plain(self) -> Case:
        """Return the case under the causal mask alone."""
        return Case(self.group, self.lengths, self.heads, self.heads_kv, True, packed=True)

    @property
    def total(self) -> int:
        return sum(count for count, _ in self.lengths)

    @property
    def row(self) -> tuple[int, int]:
        return 1, self.total

    def _sequence(self, number: int, device: torch.device) -> torch.Tensor:
        """Return (seqlen, seqlen) bool: which keys of a sequence its queries see."""
        seen, count = self.mask_mod(device), self.lengths[number][0]
        tokens = torch.arange(count, device=device)
        rows = (tokens[begin : begin + ROWS, None] for begin in range(0, count, ROWS))
        return torch.cat([seen(number, 0, of_rows, tokens) for of_rows in rows])

    def words(self, device: torch.device) -> torch.Tensor:
        """Return (total, ceil(total / 32)) int32, of the packed row."""
        found, begin = [], 0
        for number, (count, _) in enumerate(self.lengths):
            seen = self._sequence(number, device)
            around = begin, self.total - begin - count
            found += [_words_of(pad(rows, around)) for rows in seen.split(ROWS)]
            begin += count
        return torch.cat(found)

    def words_of_sequences(self, device: torch.device, rows: int, keys: int) -> torch.Tensor:
        """Return (sequences, queries, words) int32 of the longest one's queries and keys, rounded
        up to a multiple of `rows` and of `keys`, for kernels that read past the end."""
        count = -(-self.seqlen_q // rows) * rows
        width = -(-self.seqlen_k // keys) * keys // WORD_BITS
        found = torch.zeros(self.batch, count, width, dtype=torch.int32, device=device)
        for number, (length, _) in enumerate(self.lengths):
            words = _words_of(self._sequence(number, device))
            found[number, :length, : words.shape[1]] = words
        return found

    def tile_mask(self, device: torch.device) -> masks.TileMask:
        return self.mask_maker(device)()

    def mask_maker(self, device: torch.device) -> Callable[[], masks.TileMask]:
        """Return what makes a layer's mask of its words and of the batch's sequences, causal, whose
        mask is made once for all layers."""
        lengths = torch.tensor([count for count, _ in self.lengths], device=device)
        numbers = torch.arange(self.batch, device=device).repeat_interleave(lengths)
        return partial(masks.with_words, masks.documents(numbers), self.words(device))

    @cached_property
    def _pairs(self) -> int:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return sum(int(self._sequence(number, device).sum()) for number in range(self.batch))


#: Cases of `python -m bench masks` with packed sequences.
PACKED_CASES = tuple(
    PackedMaskedCase(
        "packed masks", lengths, heads, heads, False, packed=True, pattern=ChosenKeys()
    )
    for lengths in MHA_BATCHES
    for heads in GLM_HEADS
)
