"""New rows of a cache of keys and values: whose they are, and their rotary embedding.

All of it is PyTorch's own operations on the tensors' device: nothing is read back, so that a CUDA
graph can hold it. Positions count from the first row of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["NewRows", "Rotary"]


@dataclass(frozen=True)
class NewRows:
    """Whose and which each row of a tensor is: int64, shaped like its dimensions before the heads.

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
        """Of each row in its sequence; first: (batch,) positions of the rows of index 0."""
        return first[self.sequence] + self.index


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding of the first 2 * columns of cos elements of a row, the others as they are.

    cos, sin: (positions, columns). interleaved: whether pairs are neighbours (elements 2i and
    2i + 1) or halves (i and i + columns).
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool

    def __call__(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """rows: (..., heads, 256); positions: int64 of the dimensions before the heads. Computed in
        float32, the result typed like rows."""
        columns = self.cos.shape[1]
        cos, sin = (table[positions].float()[..., None, :] for table in (self.cos, self.sin))
        turned, rest = rows[..., : 2 * columns], rows[..., 2 * columns :]
        pairs = turned.float()
        # The two of a pair, as the last but one dimension or the last.
        pairs = pairs.unflatten(-1, (columns, 2) if self.interleaved else (2, columns))
        of_pair = -1 if self.interleaved else -2
        one, two = pairs.unbind(of_pair)
        pairs = torch.stack((one * cos - two * sin, two * cos + one * sin), dim=of_pair)
        return torch.cat((pairs.flatten(-2).to(rows.dtype), rest), dim=-1)
