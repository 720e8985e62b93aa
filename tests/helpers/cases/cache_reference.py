"""Reference of calls over a cache: pages, new rows, rotary embedding, trees."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def seen_by_nodes(nodes: torch.Tensor, seqlen_k: int) -> torch.Tensor:
    """Return the mask of a tree, bool (batch, 1, seqlen_q, seqlen_k).

    nodes: bool (seqlen_q, seqlen_q) or (batch, seqlen_q, seqlen_q): True where a query sees the key
    of another query. These are the last seqlen_q keys. Every query sees all keys before them.
    """
    nodes = nodes.cpu() if nodes.ndim == 3 else nodes.cpu()[None]
    batch, seqlen_q, _ = nodes.shape
    own = min(seqlen_q, seqlen_k)
    before = torch.ones(batch, seqlen_q, seqlen_k - own, dtype=torch.bool)
    return torch.cat((before, nodes[:, :, seqlen_q - own :]), dim=2)[:, None]


def gathered(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """Return the keys, or the values, of one sequence in pages: (length, heads_kv, dim).

    cache: (pages, page_size, heads_kv, dim). pages: the sequence's row of page_table.
    """
    count = -(-length // cache.shape[1])
    return cache[pages[:count].long()].flatten(0, 1)[:length]


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding of new rows, as `flash_attn_with_kvcache` takes it.

    cos, sin: (positions, rotary_dim / 2). first: position of each sequence's first new row; None:
    the number of rows in use.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = True
    first: list[int] | None = None

    def rotated(self, rows: torch.Tensor, positions: list[int]) -> torch.Tensor:
        """Return rows (length, heads, dim) in float64: complex numbers times e^(i angle)."""
        pairs = self.cos.shape[1]
        result = rows.cpu().double().clone()
        one, two = (slice(0, pairs), slice(pairs, 2 * pairs))
        if self.interleaved:
            one, two = (slice(start, 2 * pairs, 2) for start in (0, 1))
        for row, position in enumerate(positions):
            turn = torch.complex(self.cos[position].double(), self.sin[position].double()).cpu()
            number = torch.complex(result[row, :, one], result[row, :, two]) * turn
            result[row, :, one], result[row, :, two] = number.real, number.imag
        return result


@dataclass(frozen=True)
class KvCache:
    """Cache of keys and values.

    k, v: (batch, rows, heads_kv, dim), or with table (pages, page_size, heads_kv, dim). table: page
    numbers of each sequence. lengths: rows in use of each sequence, with its padding. leftpad: rows
    of padding before each sequence's first key; None for 0.
    """

    k: torch.Tensor
    v: torch.Tensor
    lengths: list[int]
    table: list[list[int]] | None = None
    leftpad: list[int] | None = None

    def address(self, sequence: int, row: int) -> tuple[int, int]:
        """Return (entry of the cache, row in the entry) of a row of a sequence."""
        if self.table is None:
            return sequence, row
        page, row = divmod(row, self.k.shape[1])
        return self.table[sequence][page], row

    def appended(
        self,
        queries: list[torch.Tensor],
        new: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
        rotary: Rotary | None = None,
        ordered: bool = True,
    ) -> tuple[KvCache, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
        """Return the cache after new rows, and each sequence's q, k, v to attend with, all in
        float64.

        queries: (seqlen_q, heads, dim) of each sequence. new: k and v of each sequence,
        (seqlen_new, heads_kv, dim). ordered: queries have consecutive positions (causal, or a
        window), else that of the first new row.
        """
        k, v = (tensor.cpu().double().clone() for tensor in (self.k, self.v))
        after, rows = list(self.lengths), []
        for b, q in enumerate(queries):
            q, start = q.cpu().double(), self.lengths[b]
            keys, values = (k[:0, 0], v[:0, 0]) if new is None else new[b]
            if rotary is not None:
                first = start if rotary.first is None else rotary.first[b]
                q = rotary.rotated(q, [first + i * ordered for i in range(len(q))])
                keys = rotary.rotated(keys, [first + i for i in range(len(keys))])
            for i in range(len(keys)):
                row = self.address(b, start + i)
                k[row], v[row] = keys[i].cpu().double(), values[i].cpu().double()
            after[b] += len(keys)
            padding = 0 if self.leftpad is None else self.leftpad[b]
            seen = [self.address(b, row) for row in range(padding, after[b])]
            keys, values = (
                torch.stack([t[row] for row in seen]) if seen else t[:0, 0] for t in (k, v)
            )
            rows.append((q, keys, values))
        return KvCache(k, v, after, self.table, self.leftpad), rows
