"""Cases with masks that people train with, each said twice: by its name in `fa4_hd256.masks`, as
ours takes it, and as a mask_mod, as FlexAttention does.

From the mask_mod come the dense mask of SDPA, what results are compared with, and the pairs that
FLOP count. A mask_mod is a function of (batch entry, head, query, key), each a number or tensors
that broadcast, to whether the query sees the key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, Protocol

import torch

from bench.suite import GEMMA_HEADS, Case
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

MaskMod = Callable[[Any, Any, Any, Any], torch.Tensor]


class Pattern(Protocol):
    """A kind of mask. by_entry: whether entries of a batch differ."""

    by_entry: ClassVar[bool]

    @property
    def text(self) -> str:
        """Return the name in tables."""

    def tile_mask(self, batch: int, seqlen: int, device: torch.device) -> masks.TileMask:
        """Return the mask as our functions take it."""

    def mask_mod(self, batch: int, seqlen: int, device: torch.device) -> MaskMod:
        """Return the mask as FlexAttention takes it."""


@dataclass(frozen=True)
class PrefixLm:
    """Prefixes of one to four eighths of a row, one after the other."""

    by_entry: ClassVar[bool] = True

    @property
    def text(self) -> str:
        return "prefix-LM"

    def _prefixes(self, batch: int, seqlen: int, device: torch.device) -> torch.Tensor:
        return (1 + torch.arange(batch, device=device) % 4) * seqlen // 8

    def tile_mask(self, batch: int, seqlen: int, device: torch.device) -> masks.TileMask:
        return masks.prefix_lm(self._prefixes(batch, seqlen, device), seqlen)

    def mask_mod(self, batch: int, seqlen: int, device: torch.device) -> MaskMod:
        prefixes = self._prefixes(batch, seqlen, device)
        return lambda b, h, q, k: (k <= q) | (k < prefixes[b])


@dataclass(frozen=True)
class Documents:
    """Rows of packed documents, `tokens` long on average, cut at random."""

    tokens: int = 1024
    by_entry: ClassVar[bool] = True

    @property
    def text(self) -> str:
        return "documents"

    def ids(self, batch: int, seqlen: int, device: torch.device) -> torch.Tensor:
        """Return (batch, seqlen) int32: the number of each token's document."""
        generator = torch.Generator().manual_seed(0)
        shape = batch, max(seqlen // self.tokens - 1, 1)
        # A document begins behind a cut; two cuts at one place are one.
        cuts = torch.randint(1, max(seqlen, 2), shape, generator=generator)
        begins = torch.zeros(batch, seqlen + 1, dtype=torch.int32).scatter_(1, cuts, 1)
        return begins[:, :seqlen].cumsum(1, dtype=torch.int32).to(device)

    def tile_mask(self, batch: int, seqlen: int, device: torch.device) -> masks.TileMask:
        return masks.documents(self.ids(batch, seqlen, device))

    def mask_mod(self, batch: int, seqlen: int, device: torch.device) -> MaskMod:
        ids = self.ids(batch, seqlen, device)
        return lambda b, h, q, k: (k <= q) & (ids[b, q] == ids[b, k])


@dataclass(frozen=True)
class Images:
    """Gemma 3's: causal, or a window of so many keys before a query, and images within it."""

    window: int | None = None
    by_entry: ClassVar[bool] = True

    @property
    def text(self) -> str:
        return "images, causal" if self.window is None else f"images, window {self.window}"

    def blocks(self, batch: int, seqlen: int, device: torch.device) -> torch.Tensor:
        """Return (batch, seqlen) int32: the number of each token's image, -1 of those of text."""
        shifts = 37 * torch.arange(batch, device=device, dtype=torch.int32)
        tokens = torch.arange(seqlen, device=device, dtype=torch.int32)
        behind = tokens - shifts[:, None] - FIRST_IMAGE
        in_image = (behind >= 0) & (behind % IMAGE_PERIOD < IMAGE_TOKENS)
        return torch.where(in_image, behind // IMAGE_PERIOD, -1)

    def tile_mask(self, batch: int, seqlen: int, device: torch.device) -> masks.TileMask:
        blocks = self.blocks(batch, seqlen, device)
        return masks.bidirectional_blocks(blocks, window=self.window)

    def mask_mod(self, batch: int, seqlen: int, device: torch.device) -> MaskMod:
        blocks = self.blocks(batch, seqlen, device)
        window = seqlen if self.window is None else self.window
        return lambda b, h, q, k: (
            ((k <= q) & (q - k <= window)) | ((blocks[b, q] == blocks[b, k]) & (blocks[b, q] >= 0))
        )


@dataclass(frozen=True)
class Window:
    """A window of so many keys before a query, and the first tokens."""

    window: int = GEMMA_WINDOW - 1
    first_tokens: int = SINKS
    by_entry: ClassVar[bool] = False

    @property
    def text(self) -> str:
        return f"window {self.window}, first {self.first_tokens}"

    def tile_mask(self, batch: int, seqlen: int, device: torch.device) -> masks.TileMask:
        return masks.sliding_window(
            self.window, seqlen, first_tokens=self.first_tokens, device=device
        )

    def mask_mod(self, batch: int, seqlen: int, device: torch.device) -> MaskMod:
        window, first = self.window, self.first_tokens
        return lambda b, h, q, k: (k <= q) & ((q - k <= window) | (k < first))


@dataclass(frozen=True)
class MaskedCase(Case):
    """A `Case` whose mask is a pattern; of as many queries as keys, not packed."""

    pattern: Pattern = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packed or self.causal or self.bounds != (None, None) or self._is_unequal:
            raise ValueError(
                f"{self.group}: a mask beside causal, a window, packed sequences or other lengths "
                "of keys; accepted: none of them"
            )

    @property
    def mask(self) -> str:
        return self.pattern.text

    @property
    def plain(self) -> Case:
        """Return the case under the causal mask alone."""
        return Case(self.group, self.lengths, self.heads, self.heads_kv, True)

    @property
    def row(self) -> tuple[int, int]:
        """Return (batch, seqlen) of the call's tensors, dense, and of its `tile_mask`."""
        return self.batch, self.seqlen_q

    def mask_maker(self, device: torch.device) -> Callable[[], masks.TileMask]:
        """Return what makes `tile_mask` of that which a model has before."""
        return partial(self.tile_mask, device)

    def mask_mod(self, device: torch.device) -> MaskMod:
        return self.pattern.mask_mod(self.batch, self.seqlen_q, device)

    def tile_mask(self, device: torch.device) -> masks.TileMask:
        return self.pattern.tile_mask(self.batch, self.seqlen_q, device)

    def dense(self, device: torch.device) -> torch.Tensor:
        """Return (1 or batch, 1, seqlen, seqlen) bool: True where a query sees a key."""
        return torch.cat(list(self._rows(device)), dim=2)

    def _rows(self, device: torch.device) -> Iterator[torch.Tensor]:
        """`dense`, some rows at once."""
        mask_mod, seqlen = self.mask_mod(device), self.seqlen_q
        entries = torch.arange(self.batch if self.pattern.by_entry else 1, device=device)
        tokens = torch.arange(seqlen, device=device)
        for start in range(0, seqlen, ROWS):
            rows = tokens[start : start + ROWS, None]
            seen = mask_mod(entries[:, None, None], 0, rows, tokens)
            yield seen.expand(len(entries), len(rows), seqlen)[:, None]

    def seen(self, sequence: int, rows: range, keys: int) -> torch.Tensor:
        """Return (rows, keys) bool, of the first keys."""
        queries = torch.arange(rows.start, rows.stop)[:, None]
        return self._on_cpu(sequence, 0, queries, torch.arange(keys))

    def last_key(self, sequence: int, rows: range) -> int:
        """The last one that any of the rows sees."""
        return int(self.seen(sequence, rows, self.seqlen_k).any(0).nonzero().max())

    @cached_property
    def _on_cpu(self) -> MaskMod:
        return self.mask_mod(torch.device("cpu"))

    @cached_property
    def _pairs(self) -> int:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        found = sum(int(rows.sum()) for rows in self._rows(device))
        return found if self.pattern.by_entry else found * self.batch

    @property
    def pairs(self) -> float:
        return float(self._pairs)


def _cases() -> Iterator[MaskedCase]:
    def case(
        pattern: Pattern, batch: int, seqlen: int, heads: tuple[int, int] = (16, 16)
    ) -> MaskedCase:
        lengths = ((seqlen, seqlen),) * batch
        return MaskedCase("masks", lengths, *heads, False, pattern=pattern)

    yield case(PrefixLm(), 4, 4096)
    yield case(Documents(), 1, 16384)
    yield case(Images(), 4, 4096, GEMMA_HEADS)
    yield case(Images(GEMMA_WINDOW - 1), 1, 16384, GEMMA_HEADS)
    yield case(Window(), 1, 16384)


#: Cases of `python -m bench masks`.
CASES = tuple(_cases())
