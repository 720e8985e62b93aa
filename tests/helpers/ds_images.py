"""dS as the kernels of the backward keep it, made from and read back to plain tensors."""

from __future__ import annotations

import math

import torch

from fa4_hd256.kernels.backward_ds_tiles import (
    DS_BLOCK,
    DS_TILE,
    DS_TILE_ELEMENTS,
    DsTiles,
)

RUN = 8  # queries of a key that lie together


def seen_blocks(seen: torch.Tensor, tiles: DsTiles) -> torch.Tensor:
    """bool (blocks of keys, blocks of queries): whether any query of a block sees any key of it.

    seen: bool (queries, keys) of one sequence. tiles: of the call.
    """
    per_block = DS_BLOCK // DS_TILE
    blocks = tiles.kv_tiles // per_block, tiles.q_tiles // per_block
    whole = torch.zeros(blocks[1] * DS_BLOCK, blocks[0] * DS_BLOCK, dtype=torch.bool)
    whole[: seen.shape[0], : seen.shape[1]] = seen
    return whole.view(blocks[1], DS_BLOCK, blocks[0], DS_BLOCK).any(3).any(1).T


def to_tiles(
    ds: list[torch.Tensor], seen: list[torch.Tensor], tiles: DsTiles, dtype: torch.dtype
) -> torch.Tensor:
    """(tiles, elements) of dS, NaN in the tiles that nobody may read.

    ds: (heads, queries, keys) of each sequence; seen: bool (queries, keys) of each.
    """
    nan = torch.full((tiles.count(len(ds)), DS_TILE_ELEMENTS), math.nan, dtype=dtype)
    for sequence, (values, visible) in enumerate(zip(ds, seen, strict=True)):
        whole = torch.zeros(tiles.heads, tiles.q_tiles * DS_TILE, tiles.kv_tiles * DS_TILE)
        whole[:, : visible.shape[0], : visible.shape[1]] = values
        for kv_block, q_block in seen_blocks(visible, tiles).nonzero().tolist():
            for kv_tile in (2 * kv_block, 2 * kv_block + 1):
                for q_tile in (2 * q_block, 2 * q_block + 1):
                    for head in range(tiles.heads):
                        keys = slice(kv_tile * DS_TILE, (kv_tile + 1) * DS_TILE)
                        queries = slice(q_tile * DS_TILE, (q_tile + 1) * DS_TILE)
                        image = whole[head, queries, keys].T.unflatten(1, (-1, RUN))
                        index = tiles.index((sequence, head), kv_tile, q_tile)
                        nan[index] = image.transpose(0, 1).reshape(-1).to(dtype)
    return nan


def from_tiles(stored: torch.Tensor, tiles: DsTiles, sequence: int) -> torch.Tensor:
    """(heads, queries, keys) of one sequence, in whole tiles; NaN where no tile was written."""
    found = torch.empty(tiles.heads, tiles.q_tiles * DS_TILE, tiles.kv_tiles * DS_TILE)
    for head in range(tiles.heads):
        for kv_tile in range(tiles.kv_tiles):
            for q_tile in range(tiles.q_tiles):
                image = stored[tiles.index((sequence, head), kv_tile, q_tile)].float()
                keys = slice(kv_tile * DS_TILE, (kv_tile + 1) * DS_TILE)
                queries = slice(q_tile * DS_TILE, (q_tile + 1) * DS_TILE)
                tile = image.view(DS_TILE // RUN, DS_TILE, RUN).transpose(0, 1)
                found[head, queries, keys] = tile.reshape(DS_TILE, DS_TILE).T
    return found
