"""The tiles of the GEMMs of dS: which is one of dK, which one of dQ, and in which order.

One rule for the host and the device; its integers are Python's, or Int32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Boolean

from ...schedulers.order import select
from ..mask.masking import MaskKind
from ..plan.edges import SharedByReference
from .ds_tiles import count_blocks


@dataclass(frozen=True)
class GemmOrder(SharedByReference):
    """The tiles of a part of a KV head's query heads. blocks_k, blocks_q: of 256 rows, of the
    longest sequence. heads: query heads of a part."""

    blocks_k: Any
    blocks_q: Any
    heads: Any
    mask: MaskKind

    @classmethod
    def of(cls, max_seqlen_k: Any, max_seqlen_q: Any, heads: Any, mask: MaskKind) -> GemmOrder:
        return cls(count_blocks(max_seqlen_k), count_blocks(max_seqlen_q), heads, mask)

    @property
    def num_tiles(self) -> Any:
        return self.blocks_k + self.heads * self.blocks_q

    @property
    def _both(self) -> Any:
        """Return the number of tiles of dK that alternate with as many of dQ."""
        of_queries = self.heads * self.blocks_q
        return select(self.blocks_k < of_queries, self.blocks_k, of_queries)

    def parts_at_once(self, clusters: Any) -> Any:
        """Parts whose tiles are interleaved, on so many CTA pairs: as many as are at work at once
        with all that are interleaved.  With more, tiles of a part would begin when others of it are
        done, and what both read of dS came from HBM twice.  A tile of dK may be as long as several
        of dQ; with fewer parts the last ones' would begin late.  With one query head per part all
        tiles are interleaved, and those of a part begin closest together by themselves.
        """
        of_part = 2 * self._both
        of_all = select(of_part < clusters, clusters, of_part)
        return select(self.heads == 1, of_part, of_all) // of_part

    def parts_at_last(self, clusters: Any) -> Any:
        """Parts that end together, at least: every CTA pair has one of the interleaved tiles, or
        the long ones of the last part would be waited for."""
        of_part = 2 * self._both
        return (clusters + of_part - 1) // of_part

    def tile(self, number: Any) -> tuple[Any, Any, Any]:
        """Return (whether it is of dK, block of its rows, if it is of dQ which query head of the
        part). Tiles of the two kinds alternate as far as there are both; of either the longest come
        first."""
        both = self._both
        takes_turns = number < 2 * both
        of_keys = select(takes_turns, number % 2 == 0, self.blocks_k > both)
        rank = select(takes_turns, number // 2, number - both)
        key_block, head, query_block = rank, rank // self.blocks_q, rank % self.blocks_q
        if self.mask.bounded_right:
            query_block = self.blocks_q - 1 - query_block
        elif self.mask.bounded_left:
            key_block = self.blocks_k - 1 - key_block
        if not isinstance(of_keys, bool):
            of_keys = Boolean(of_keys)
        return of_keys, select(of_keys, key_block, query_block), head
