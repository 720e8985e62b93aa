"""Cases with masks that people train with, each said twice: by its name in `fa4_hd256.masks`, as
ours takes it, and as a mask_mod, as FlexAttention does.

From the mask_mod come the dense mask of SDPA, what results are compared with, and the pairs that
FLOP count. A mask_mod is a function of (batch entry, head, query, key), each a number or tensors
that broadcast, to whether the query sees the key.

Packed cases are the masked MHA of sparse MLA models (GLM-5, DeepSeek-V3.2). In prefill these expand
K and V to heads of their own, and below some length attend to all keys under a mask of those that
an indexer chose. An engine has it as packed bits, 32 keys a word, of each layer. Their mask_mod
counts in the sequence; the words are of the packed row, whose rows and keys are those of the packed
tensors, and of each sequence by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from bench.suite import GEMMA_HEADS, MHA_BATCHES, Case, equal
from fa4_hd256 import masks

#: Rows of a mask that are evaluated at once.
ROWS = 2048
#: Tokens of an image in Gemma 3, and queries and keys of its local layers, the query's own among
#: them (bench/suite.py has its heads).
IMAGE_TOKENS, GEMMA_WINDOW = 256, 1024
#: Tokens from one image to the next, and before the first one: no multiples of a tile.
IMAGE_PERIOD, FIRST_IMAGE = 1000, 300
#: First tokens that a window keeps ("attention sinks", StreamingLLM).
SINKS = 4
#: Keys that DeepSeek's and GLM's indexers choose of each query; all where there are no more.
CHOSEN = 2048
#: Bits of a word, and 2^32 - 1.
WORD_BITS, WORD = 32, 0xFFFFFFFF
#: Heads of GLM-5, whole and on one of eight GPUs.
GLM_HEADS = (64, 8)

MaskMod = Callable[[Any, Any, Any, Any], torch.Tensor]


class Pattern(NamedTuple):
    """A kind of mask. text: its name in tables. mask_mod, tile_mask: from (batch, seqlen, device)
    to the mask as FlexAttention and as our functions take it; packed cases have words in place of
    the latter. by_entry: whether entries of a batch differ."""

    text: str
    mask_mod: Callable[[int, int, torch.device], MaskMod]
    tile_mask: Callable[[int, int, torch.device], masks.TileMask] | None
    by_entry: bool = True


def prefix_lm() -> Pattern:
    """Return prefixes of one to four eighths of a row, one after the other."""

    def prefixes(batch: int, seqlen: int, device: torch.device) -> torch.Tensor:
        return (1 + torch.arange(batch, device=device) % 4) * seqlen // 8

    def mask_mod(batch: int, seqlen: int, device: torch.device) -> MaskMod:
        of = prefixes(batch, seqlen, device)
        return lambda b, h, q, k: (k <= q) | (k < of[b])

    return Pattern(
        "prefix-LM", mask_mod,
        lambda batch, seqlen, device: masks.prefix_lm(prefixes(batch, seqlen, device), seqlen),
    )  # fmt: skip


def document_ids(tokens: int, batch: int, seqlen: int, device: torch.device) -> torch.Tensor:
    """Return (batch, seqlen) int32: the number of each token's document, of rows of packed
    documents, `tokens` long on average, cut at random."""
    generator = torch.Generator().manual_seed(0)
    shape = batch, max(seqlen // tokens - 1, 1)
    # A document begins behind a cut; two cuts at one place are one.
    cuts = torch.randint(1, max(seqlen, 2), shape, generator=generator)
    begins = torch.zeros(batch, seqlen + 1, dtype=torch.int32).scatter_(1, cuts, 1)
    return begins[:, :seqlen].cumsum(1, dtype=torch.int32).to(device)


def documents(tokens: int = 1024) -> Pattern:
    def mask_mod(batch: int, seqlen: int, device: torch.device) -> MaskMod:
        ids = document_ids(tokens, batch, seqlen, device)
        return lambda b, h, q, k: (k <= q) & (ids[b, q] == ids[b, k])

    return Pattern(
        "documents", mask_mod, lambda *of: masks.documents(document_ids(tokens, *of))
    )  # fmt: skip


def images(window: int | None = None) -> Pattern:
    """Return Gemma 3's: causal, or a window of so many keys before a query, and images within it
    that see each other."""

    def blocks(batch: int, seqlen: int, device: torch.device) -> torch.Tensor:
        """Return (batch, seqlen) int32: the number of each token's image, -1 of those of text."""
        shifts = 37 * torch.arange(batch, device=device, dtype=torch.int32)
        tokens = torch.arange(seqlen, device=device, dtype=torch.int32)
        behind = tokens - shifts[:, None] - FIRST_IMAGE
        in_image = (behind >= 0) & (behind % IMAGE_PERIOD < IMAGE_TOKENS)
        return torch.where(in_image, behind // IMAGE_PERIOD, -1)

    def mask_mod(batch: int, seqlen: int, device: torch.device) -> MaskMod:
        of, left = blocks(batch, seqlen, device), seqlen if window is None else window
        return lambda b, h, q, k: (
            ((k <= q) & (q - k <= left)) | ((of[b, q] == of[b, k]) & (of[b, q] >= 0))
        )

    return Pattern(
        "images, causal" if window is None else f"images, window {window}", mask_mod,
        lambda *of: masks.bidirectional_blocks(blocks(*of), window=window),
    )  # fmt: skip


def window(left: int = GEMMA_WINDOW - 1, first: int = SINKS) -> Pattern:
    """Return a window of so many keys before a query, and the first tokens."""
    return Pattern(
        f"window {left}, first {first}",
        lambda *of: lambda b, h, q, k: (k <= q) & ((q - k <= left) | (k < first)),
        lambda batch, seqlen, device: masks.sliding_window(
            left, seqlen, first_tokens=first, device=device
        ),
        by_entry=False,
    )


def chosen_keys(count: int = CHOSEN) -> Pattern:
    """Return a mask that is causal, and of the keys before a query has so many, by chance: each is
    seen with one probability. A query that has no more than so many sees them all."""

    def seen(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        drawn = _scrambled(q * 0x9E3779B1 + k * 0x85EBCA6B + b * 0x27D4EB2F)
        return (k <= q) & (drawn * (q + 1) < count << WORD_BITS)

    return Pattern(f"causal, {count} chosen keys", lambda *of: seen, None)


def _scrambled(number: torch.Tensor) -> torch.Tensor:
    """Map int64 to 0 .. 2^32 - 1 as if by chance, the same on every device."""
    for factor, shift in ((0x7FEB352D, 16), (0x846CA68B, 15)):
        number = number & WORD
        number = (number ^ (number >> shift)) * factor
    number = number & WORD
    return number ^ (number >> 16)


def _words_of(seen: torch.Tensor) -> torch.Tensor:
    """Pack (rows, keys) bool into (rows, words) int32: bit j of word w is key 32 w + j."""
    weights = 1 << torch.arange(WORD_BITS, dtype=torch.int32, device=seen.device)
    bits = pad(seen, (0, -seen.shape[1] % WORD_BITS)).unflatten(1, (-1, WORD_BITS))
    return (bits * weights).sum(-1, dtype=torch.int32)


def seen_in(words: torch.Tensor) -> MaskMod:
    """Return the mask_mod of the packed row that reads its words, as FlexAttention takes it."""
    return lambda b, h, q, k: ((words[q, k >> 5] >> (k & 31)) & 1) == 1


def seen_in_kernel(batch: Any, head: Any, query: Any, key: Any, tensors: tuple) -> Any:
    """Mask of `seen_in`, in CuTe DSL."""
    (words,) = tensors
    return ((words[query, key >> 5] >> (key & 31)) & 1) != 0


@dataclass(frozen=True)
class MaskedCase(Case):
    """A `Case` whose mask is a pattern in each sequence; of as many queries as keys."""

    pattern: Pattern = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.causal or self.bounds != (None, None) or self._is_unequal:
            raise ValueError(
                f"{self.group}: a mask beside causal, a window or other lengths of keys; "
                "accepted: none of them"
            )

    @property
    def mask(self) -> str:
        return self.pattern.text

    @property
    def plain(self) -> Case:
        """Return the case under the causal mask alone."""
        heads = self.heads, self.heads_kv
        return Case(self.group, self.lengths, *heads, True, packed=self.packed)

    @property
    def row(self) -> tuple[int, int]:
        """Return (batch, seqlen) of the call's tensors, dense, and of its `tile_mask`."""
        if self.packed:
            return 1, sum(count for count, _ in self.lengths)
        return self.batch, self.seqlen_q

    def mask_mod(self, device: torch.device) -> MaskMod:
        return self.pattern.mask_mod(self.batch, self.seqlen_q, device)

    def mask_maker(self, device: torch.device) -> Callable[[], masks.TileMask]:
        """Return what makes `tile_mask` of that which a model has before. Of packed sequences it
        makes a layer's mask of its words and of the causal mask of the batch's sequences, which is
        made once for all layers."""
        if not self.packed:
            assert self.pattern.tile_mask is not None
            return partial(self.pattern.tile_mask, self.batch, self.seqlen_q, device)
        lengths = torch.tensor([count for count, _ in self.lengths], device=device)
        numbers = torch.arange(self.batch, device=device).repeat_interleave(lengths)
        return partial(masks.with_words, masks.documents(numbers), self.words(device))

    def tile_mask(self, device: torch.device) -> masks.TileMask:
        return self.mask_maker(device)()

    def sequence(self, number: int, device: torch.device) -> torch.Tensor:
        """Return (seqlen, seqlen) bool: which keys of a sequence its queries see."""
        seen, count = self.mask_mod(device), self.lengths[number][0]
        tokens = torch.arange(count, device=device)
        rows = (tokens[begin : begin + ROWS, None] for begin in range(0, count, ROWS))
        return torch.cat([seen(number, 0, of_rows, tokens) for of_rows in rows])

    def dense(self, device: torch.device) -> torch.Tensor:
        """Return (1 or batch, 1, seqlen, seqlen) bool: True where a query sees a key."""
        entries = range(self.batch if self.pattern.by_entry else 1)
        return torch.stack([self.sequence(number, device) for number in entries])[:, None]

    def words(self, device: torch.device) -> torch.Tensor:
        """Return (total, ceil(total / 32)) int32, of the packed row."""
        found, begin, (_, total) = [], 0, self.row
        for number, (count, _) in enumerate(self.lengths):
            around = begin, total - begin - count
            of_rows = self.sequence(number, device).split(ROWS)
            found += [_words_of(pad(rows, around)) for rows in of_rows]
            begin += count
        return torch.cat(found)

    def words_of_sequences(self, device: torch.device, rows: int, keys: int) -> torch.Tensor:
        """Return (sequences, queries, words) int32 of the longest one's queries and keys, rounded
        up to a multiple of `rows` and of `keys`, for kernels that read past the end."""
        count = -(-self.seqlen_q // rows) * rows
        width = -(-self.seqlen_k // keys) * keys // WORD_BITS
        found = torch.zeros(self.batch, count, width, dtype=torch.int32, device=device)
        for number, (length, _) in enumerate(self.lengths):
            words = _words_of(self.sequence(number, device))
            found[number, :length, : words.shape[1]] = words
        return found

    def seen(self, sequence: int, rows: range, keys: int) -> torch.Tensor:
        """Return (rows, keys) bool, of the first keys."""
        queries = torch.arange(rows.start, rows.stop)[:, None]
        return self._on_cpu(sequence, 0, queries, torch.arange(keys))

    def last_key(self, sequence: int, rows: range) -> int:
        """Return the last one that any of the rows sees."""
        return int(self.seen(sequence, rows, self.lengths[sequence][1]).any(0).nonzero().max())

    @cached_property
    def _on_cpu(self) -> MaskMod:
        return self.mask_mod(torch.device("cpu"))

    @cached_property
    def _pairs(self) -> int:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        entries = range(self.batch if self.pattern.by_entry else 1)
        found = sum(int(self.sequence(number, device).sum()) for number in entries)
        return found if self.pattern.by_entry else found * self.batch

    @property
    def pairs(self) -> float:
        return float(self._pairs)


#: Cases of `python -m bench masks`, and those with packed sequences.
CASES = tuple(
    MaskedCase("masks", equal(batch, seqlen), *heads, False, pattern=pattern)
    for pattern, batch, seqlen, heads in (
        (prefix_lm(), 4, 4096, (16, 16)),
        (documents(), 1, 16384, (16, 16)),
        (images(), 4, 4096, GEMMA_HEADS),
        (images(GEMMA_WINDOW - 1), 1, 16384, GEMMA_HEADS),
        (window(), 1, 16384, (16, 16)),
    )
)
PACKED_CASES = tuple(
    MaskedCase("packed masks", lengths, heads, heads, False, packed=True, pattern=chosen_keys())
    for lengths in MHA_BATCHES
    for heads in GLM_HEADS
)
