"""Rows of a batch or of packed sequences: whose they are, and at which positions, where a check
looks at these."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["NewRows"]


@dataclass(frozen=True)
class NewRows:
    """Sequence and index of each row of a tensor: int64, shaped like its dimensions before the
    heads.

    sequence: in the batch. index: among the rows of that sequence.
    """

    sequence: torch.Tensor
    index: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor, offsets: torch.Tensor | None) -> NewRows:
        """rows: (batch, length, heads, 256), or (total, heads, 256) with offsets, (batch + 1,)
        int32 that ascend from 0 to the total."""
        count = torch.arange(rows.shape[0], device=rows.device)
        if offsets is None:
            index = torch.arange(rows.shape[1], device=rows.device)
            shape = rows.shape[:2]
            return cls(count[:, None].expand(shape), index.expand(shape))
        # Of equal offsets, those of empty sequences, the last one begins the sequence of the row.
        sequence = torch.searchsorted(offsets, count.int(), right=True) - 1
        return cls(sequence, count - offsets[sequence])

    def positions(self, first: torch.Tensor) -> torch.Tensor:
        """Return the position of each row in its sequence; first: (batch,) positions of the rows of
        index 0."""
        return first[self.sequence] + self.index
