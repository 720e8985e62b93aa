"""Which keys a query row sees, as KV tile ranges of a tile and as a mask on a score tile."""

from __future__ import annotations

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

__all__ = ["Visibility"]


@dataclass(frozen=True)
class Visibility:
    """The visible keys of one (batch, head): row r sees keys [0, limit(r)).

    seqlen_q, seqlen_k: Int32 lengths.  Without a causal mask limit(r) = seqlen_k; with it the
    mask is aligned to the bottom right corner, so that the last row sees every key:
    limit(r) = r + 1 + seqlen_k - seqlen_q, clipped to [0, seqlen_k].
    block_kv: keys of one KV tile.
    """

    seqlen_q: Int32
    seqlen_k: Int32
    is_causal: bool
    block_kv: int

    def limit(self, row: Int32) -> Int32:
        """Number of keys that `row` sees; rows past seqlen_q count as if the mask went on."""
        if cutlass.const_expr(not self.is_causal):
            return self.seqlen_k
        diagonal = row + 1 + self.seqlen_k - self.seqlen_q
        return cutlass.max(cutlass.min(diagonal, self.seqlen_k), 0)

    def num_tiles(self, first_row: Int32, num_rows: int) -> Int32:
        """KV tiles that some existing row of [first_row, first_row + num_rows) sees."""
        last_row = cutlass.min(first_row + num_rows, self.seqlen_q) - 1
        return (self.limit(last_row) + self.block_kv - 1) // self.block_kv

    def num_unmasked_tiles(self, first_row: Int32) -> Int32:
        """Leading KV tiles of which every row from first_row on sees every key."""
        return self.limit(first_row) // self.block_kv

    def apply(self, scores: cute.Tensor, row: Int32, first_key: Int32) -> None:
        """Set the scores of invisible keys to -inf.

        scores: register tensor of one row of a tile, block_kv Float32; first_key: its first key.
        """
        visible = self.limit(row) - first_key
        for column in range(self.block_kv):
            scores[column] = cutlass.select_(
                visible > column, scores[column], Float32(-math.inf)
            )
