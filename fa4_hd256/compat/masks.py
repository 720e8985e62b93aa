"""flash-attn-4's block-sparse tensors as masks of tiles."""

from __future__ import annotations

from typing import Any

import torch

from ..call.tile_mask import PARTIAL, WHOLE, TileMask, count_mask_tiles
from ..kernels.mask.block_mask import MASK_TILE
from ..kernels.mask.windows import Window
from ..masks import kinds_of_blocks
from .windows import seen_in_window


def translate_blocks(
    blocks: Any, lengths: tuple[int, int], device: torch.device, has_mask_mod: bool, window: Window
) -> TileMask:
    """Return the mask of a call with block_sparse_tensors, or with a mask_mod alone.

    blocks: block_sparse_tensors, or None. lengths: (seqlen_q, seqlen_k). With a mask_mod the mask
    has no bits; without one all keys of a listed block are seen, within the window (left, right).

    Raises NotImplementedError for blocks of packed sequences and for a block_size that is no pair
    of multiples of 128.
    """
    if blocks is None:
        tiles = tuple(map(count_mask_tiles, lengths))
        kinds = torch.full((1, 1, *tiles), PARTIAL, dtype=torch.int8, device=device)
        return TileMask.of_kinds(lengths, kinds)
    kinds = _kinds(blocks, lengths)
    if has_mask_mod:
        return TileMask.of_kinds(lengths, kinds)
    if window == (None, None):
        kinds = torch.where(kinds == PARTIAL, WHOLE, kinds)
    else:
        kinds = kinds.clamp(max=PARTIAL)

    def evaluate(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return seen_in_window(key - query - (lengths[1] - lengths[0]), window)

    return TileMask.of(lengths, kinds.to(torch.int8), evaluate)


def _kinds(blocks: Any, lengths: tuple[int, int]) -> torch.Tensor:
    for name in ("cu_total_m_blocks", "cu_block_idx_offsets"):
        if getattr(blocks, name, None) is not None:
            raise NotImplementedError(
                f"block_sparse_tensors has {name}, of packed sequences; accepted: None. Use "
                "block_mask of fa4_hd256.flash_attn_varlen_func"
            )
    size = blocks.block_size
    if size is None or len(size) != 2 or any(side % MASK_TILE for side in size):
        raise NotImplementedError(
            f"block_sparse_tensors has block_size {size}; accepted: a pair of multiples of "
            f"{MASK_TILE}, (queries, keys)"
        )
    full = blocks.full_block_cnt, blocks.full_block_idx
    return kinds_of_blocks(
        (blocks.mask_block_cnt, blocks.mask_block_idx),
        None if full[0] is None else full,
        tuple(size),
        lengths,
    )
