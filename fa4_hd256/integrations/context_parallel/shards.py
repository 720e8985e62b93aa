"""Splitting of a sequence into the rows of each rank, and gathering of the whole."""

from __future__ import annotations

from typing import Any

import torch

from .exchange import Ranks
from .gathered import in_order
from .spans import placed

__all__ = ["shard", "unshard"]


def shard(
    tensor: torch.Tensor, *, group: Any = None, order: str = "contiguous", dim: int = 1
) -> torch.Tensor:
    """Return this rank's rows of a tensor that every rank has whole, a copy; differentiable,
    without exchange. dim: that of the sequence, a multiple of the ranks (order "zigzag": of twice
    as many).

    Raises ValueError where the rows do not divide, or for an unknown order.
    """
    ranks = Ranks(group)
    rows = _rows_of_rank(tensor.shape[dim], ranks.count)
    spans = placed(order, ranks.count, rows)[ranks.own]
    return torch.cat([tensor.narrow(dim, span.start, len(span)) for span in spans], dim)


def unshard(
    tensor: torch.Tensor, *, group: Any = None, order: str = "contiguous", dim: int = 1
) -> torch.Tensor:
    """The whole from every rank's rows, on every rank; without gradients."""
    ranks = Ranks(group)
    rows_first = tensor.detach().movedim(dim, 0).unsqueeze(0)
    places = placed(order, ranks.count, rows_first.shape[1])
    with ranks.in_common():
        gathered = ranks.gather(rows_first)
    return in_order(gathered, places).squeeze(0).movedim(0, dim)


def _rows_of_rank(rows: int, count: int) -> int:
    if rows % count:
        raise ValueError(
            f"{rows} rows do not divide among {count} ranks; pad the sequence to a multiple of it"
        )
    return rows // count
