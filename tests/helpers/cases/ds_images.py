"""dS as the kernels of the backward keep it, made from and read back to plain tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from fa4_hd256.call.backward_problem import BackwardProblem
from fa4_hd256.kernels.backward.ds_tiles import DS_BLOCK, DS_TILE, DS_TILE_ELEMENTS

RUN = 8  # queries of a key that lie together


def seen_blocks(seen: torch.Tensor) -> torch.Tensor:
    """bool (blocks of keys, blocks of queries): whether any query of a block sees any key of it.

    seen: bool (queries, keys) of one sequence.
    """
    blocks = [-(-length // DS_BLOCK) for length in seen.shape]
    whole = torch.zeros([count * DS_BLOCK for count in blocks], dtype=torch.bool)
    whole[: seen.shape[0], : seen.shape[1]] = seen
    return whole.view(blocks[0], DS_BLOCK, blocks[1], DS_BLOCK).any(3).any(1).T


def in_order(seen: torch.Tensor) -> list[tuple[int, int]]:
    """Return (tile of keys, tile of queries) of all blocks that are seen, in the order of their
    tiles."""
    found = []
    for block, row in enumerate(seen_blocks(seen)):
        columns = [2 * column + half for column in row.nonzero().flatten().tolist()
                   for half in range(2)]  # fmt: skip
        found += [(2 * block + half, column) for half in range(2) for column in columns]
    return found


def tile_numbers(
    problem: BackwardProblem, seen: list[torch.Tensor], heads: Iterable[int] | None = None
) -> list[dict[tuple[int, int, int], int]]:
    """Return, for each sequence, (query head, tile of keys, tile of queries) -> number, counted one
    by one.

    seen: bool (queries, keys) of each sequence. heads: all, if none are given.
    """
    shape, ragged = problem.ds_shape, problem.forward.ragged
    longest, before, found = -(-problem.forward.max_seqlen_k // DS_BLOCK), 0, []
    for sequence, visible in enumerate(seen):
        unit = sequence
        if ragged:
            unit = sequence * longest
            if "cu_seqlens_k" in ragged:
                unit = min(unit, before // DS_BLOCK + sequence)
        before += visible.shape[1]
        found.append(
            {
                (head, *tile): (head * shape[1] + unit) * shape[2] + number
                for head in (range(shape[0]) if heads is None else heads)
                for number, tile in enumerate(in_order(visible))
            }
        )
    return found


def to_tiles(
    ds: list[torch.Tensor], seen: list[torch.Tensor], problem: BackwardProblem
) -> torch.Tensor:
    """`BackwardProblem.ds_shape` of dS, NaN in the tiles that nobody may read.

    ds: (heads, queries, keys) of each sequence; seen: bool (queries, keys) of each.
    """
    stored = torch.full(problem.ds_shape, math.nan, dtype=problem.forward.dtype)
    tiles = stored.view(-1, DS_TILE_ELEMENTS)
    for values, visible, numbers in zip(ds, seen, tile_numbers(problem, seen), strict=True):
        queries, keys = (-(-length // DS_BLOCK) * DS_BLOCK for length in visible.shape)
        whole = torch.zeros(len(values), queries, keys)
        whole[:, : visible.shape[0], : visible.shape[1]] = values
        for place, number in numbers.items():
            image = _of_tile(whole, place).T.unflatten(1, (-1, RUN)).transpose(0, 1)
            tiles[number] = image.reshape(-1).to(stored.dtype)
    return stored


def from_tiles(
    stored: torch.Tensor, numbers: dict[tuple[int, int, int], int], lengths: tuple[int, int]
) -> torch.Tensor:
    """Return (heads, queries, keys) of one sequence, in whole blocks; NaN where there is no tile.

    numbers: `tile_numbers` of it. lengths: of its queries and keys.
    """
    tiles = stored.reshape(-1, DS_TILE_ELEMENTS).float()
    queries, keys = (-(-length // DS_BLOCK) * DS_BLOCK for length in lengths)
    found = torch.full((stored.shape[0], queries, keys), math.nan)
    for place, number in numbers.items():
        image = tiles[number].view(DS_TILE // RUN, DS_TILE, RUN).transpose(0, 1)
        _of_tile(found, place).copy_(image.reshape(DS_TILE, DS_TILE).T)
    return found


def _of_tile(whole: torch.Tensor, place: tuple[int, int, int]) -> torch.Tensor:
    """The view of a tile of (heads, queries, keys)."""
    head, kv_tile, q_tile = place
    return whole[head].unfold(0, DS_TILE, DS_TILE).unfold(1, DS_TILE, DS_TILE)[q_tile, kv_tile]
