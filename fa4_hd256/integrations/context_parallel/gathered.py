"""Attention over the keys and values of all ranks, gathered on every rank.

This suits few key/value heads, whose rows have few bytes: one exchange, one or two kernel calls,
and memory for all keys. In the backward each rank sends dK and dV of all keys, in float32, to the
ranks that own the keys. These sum them in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .exchange import Ranks
from .local import Attended, KeysValues, LocalResults, Settings, add_gradients
from .spans import Rows, parts_of, spans_by_rank


def in_sequence_order(gathered: torch.Tensor, division: Sequence[Rows]) -> torch.Tensor:
    """Return (batch, all rows, ...) in the sequence's order, from (ranks, batch, rows, ...)."""
    batch, *others = gathered.shape[1], *gathered.shape[3:]
    pieces = {}
    for of_rank, spans in zip(gathered, division, strict=True):
        for span, piece in zip(spans, of_rank.split([*map(len, spans)], dim=1), strict=True):
            pieces[span.start] = piece
    if batch == 1 and all(len(spans) == 1 for spans in division):
        return gathered.reshape(1, -1, *others)
    return torch.cat([pieces[start] for start in sorted(pieces)], dim=1)


def split_by_rank(whole: torch.Tensor, division: Sequence[Rows]) -> torch.Tensor:
    """Return (ranks, batch, rows, ...) from (batch, all rows, ...) in the sequence's order."""
    return torch.stack(
        [torch.cat([whole[:, s.start : s.stop] for s in spans], dim=1) for spans in division]
    )


class Gathered:
    """All-gather attention of one rank."""

    def __init__(self, ranks: Ranks, rows: int, settings: Settings) -> None:
        self.ranks, self.settings = ranks, settings
        self.division = spans_by_rank(settings.order, ranks.count, rows)
        everything = (range(settings.rows),)
        self.parts = parts_of(self.division[ranks.rank], everything, settings.mask)

    def attend(self, q: torch.Tensor, kv: KeysValues) -> Attended:
        """Return out and lse of this rank's queries over all keys. kv: k and v of this rank."""
        attended = Attended(q)
        attended.add(q, self._all(kv), self.parts, self.settings)
        return attended

    def _all(self, kv: KeysValues) -> KeysValues:
        k, v = (in_sequence_order(self.ranks.gather(tensor), self.division) for tensor in kv)
        return k, v

    def gradients(self, local: LocalResults, kv: KeysValues) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 (dq, dkv) of this rank's rows; dkv: (2, batch, rows, heads_kv, 256)."""
        k, v = self._all(kv)
        dq = torch.zeros(local.q.shape, dtype=torch.float32, device=k.device)
        dkv = torch.zeros(2, *k.shape, dtype=torch.float32, device=k.device)
        add_gradients(local, (k, v), (dq, dkv), self.parts, self.settings)
        by_rank = torch.stack([split_by_rank(tensor, self.division) for tensor in dkv], dim=1)
        total, *others = self.ranks.exchange(by_rank)
        for other in others:
            total = total + other
        return dq, total
