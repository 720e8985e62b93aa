"""Attention over keys and values of all ranks, which every rank gathers before it begins.

For few key/value heads, whose rows are few bytes beside the queries': one exchange, one or two
calls of a kernel, and memory for all keys. In the backward dK and dV of all keys go to their ranks
in float32, which sum them in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .exchange import Ranks
from .local import Attended, Held, OwnRows, Settings, add_gradients
from .spans import Rows, SpanPart, parts_of, placed

__all__ = ["Gathered", "in_order", "of_ranks"]


def in_order(gathered: torch.Tensor, places: Sequence[Rows]) -> torch.Tensor:
    """Return (batch, all rows, ...) in the sequence's order from (ranks, batch, rows, ...)."""
    batch, *others = gathered.shape[1], *gathered.shape[3:]
    pieces = {}
    for of_rank, spans in zip(gathered, places, strict=True):
        for span, piece in zip(spans, of_rank.split([*map(len, spans)], dim=1), strict=True):
            pieces[span.start] = piece
    if batch == 1 and all(len(spans) == 1 for spans in places):
        return gathered.reshape(1, -1, *others)
    return torch.cat([pieces[start] for start in sorted(pieces)], dim=1)


def of_ranks(whole: torch.Tensor, places: Sequence[Rows]) -> torch.Tensor:
    """Return (ranks, batch, rows, ...) from (batch, all rows, ...) in the sequence's order."""
    return torch.stack(
        [torch.cat([whole[:, s.start : s.stop] for s in spans], dim=1) for spans in places]
    )


class Gathered:
    """One rank's part of such a call."""

    def __init__(self, ranks: Ranks, order: str, rows: int, settings: Settings) -> None:
        self.ranks, self.places = ranks, placed(order, ranks.count, rows)
        everything = (range(ranks.count * rows),)
        self.parts: tuple[SpanPart, ...] = parts_of(
            self.places[ranks.own], everything, settings.mask
        )

    def attend(self, q: torch.Tensor, kv: Held, settings: Settings) -> Attended:
        """Return out and lse of this rank's queries over all keys. kv: k and v of this rank."""
        attended = Attended(q)
        attended.add(q, self._all(kv), self.parts, settings)
        return attended

    def _all(self, kv: Held) -> Held:
        k, v = (in_order(self.ranks.gather(tensor), self.places) for tensor in kv)
        return k, v

    def gradients(
        self, own: OwnRows, kv: Held, settings: Settings
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 (dq, dkv) of this rank's rows; dkv: (2, batch, rows, heads_kv, 256)."""
        k, v = self._all(kv)
        dq = torch.zeros(own.q.shape, dtype=torch.float32, device=k.device)
        dkv = torch.zeros(2, *k.shape, dtype=torch.float32, device=k.device)
        add_gradients(own, (k, v), (dq, dkv), self.parts, settings)
        by_rank = torch.stack([of_ranks(tensor, self.places) for tensor in dkv], dim=1)
        found = self.ranks.exchange(by_rank)
        total = found[0]
        for other in found[1:]:
            total = total + other
        return dq, total
