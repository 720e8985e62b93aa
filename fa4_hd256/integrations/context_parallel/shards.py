"""Splitting of a sequence into the rows of each rank, and gathering of the whole."""

from __future__ import annotations

from typing import Any

import torch

from .exchange import Ranks
from .gathered import in_sequence_order
from .spans import spans_by_rank


def shard(
    tensor: torch.Tensor, *, group: Any = None, order: str = "contiguous", dim: int = 1
) -> torch.Tensor:
    """Return a copy of this rank's rows of a tensor that every rank has whole.

    Nothing is exchanged, and autograd differentiates it. dim: the dimension of the sequence, whose
    size is a multiple of the number of ranks, in order "zigzag" of twice that number.

    Raises ValueError if the size is no such multiple, and for an unknown order.
    """
    ranks = Ranks(group)
    rows = _rows_of_rank(tensor.shape[dim], ranks.count)
    spans = spans_by_rank(order, ranks.count, rows)[ranks.rank]
    return torch.cat([tensor.narrow(dim, span.start, len(span)) for span in spans], dim)


def unshard(
    tensor: torch.Tensor, *, group: Any = None, order: str = "contiguous", dim: int = 1
) -> torch.Tensor:
    """Return the whole tensor from the rows of all ranks, on every rank. It has no gradients."""
    ranks = Ranks(group)
    rows_first = tensor.detach().movedim(dim, 0).unsqueeze(0)
    division = spans_by_rank(order, ranks.count, rows_first.shape[1])
    with ranks.failing_together():
        gathered = ranks.gather(rows_first)
    return in_sequence_order(gathered, division).squeeze(0).movedim(0, dim)


def _rows_of_rank(rows: int, count: int) -> int:
    if rows % count:
        raise ValueError(
            f"{rows} rows do not divide among {count} ranks; pad the sequence to a multiple of "
            f"{count}"
        )
    return rows // count
