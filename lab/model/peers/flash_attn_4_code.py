"""flash-attn-4's versions, an empty call of its backward, and its rule of KV splits."""

from __future__ import annotations

import importlib.metadata

import torch

from bench.peers.flash_attn_4 import PACKAGE
from fa4_hd256.kernels.limits import HEAD_DIM

#: Its rule of KV splits: steps that are never split, and the splits it stops at.
_FEWEST_STEPS, _MOST_SPLITS = 4, 128

#: Rows of a tile of its kernel of one CTA.
SINGLE_ROWS = 128


def versions() -> tuple[str, ...]:
    """Return the versions that its compiled kernels depend on."""
    names = (PACKAGE, "nvidia-cutlass-dsl", "quack-kernels")
    return tuple(importlib.metadata.version(name) for name in names)


def backward_of_an_empty_sequence(rows: int, causal: bool) -> None:
    """Run its backward of one sequence without queries and keys, said to have at most `rows`."""
    from flash_attn.cute.interface import _flash_attn_bwd

    tensor = torch.zeros(rows, 1, HEAD_DIM, dtype=torch.bfloat16)
    offsets = torch.zeros(2, dtype=torch.int32)
    _flash_attn_bwd(
        *[tensor] * 5, torch.zeros(1, rows), causal=causal, cu_seqlens_q=offsets,
        cu_seqlens_k=offsets, max_seqlen_q=rows, max_seqlen_k=rows,
    )  # fmt: skip


def split_numbers(tiles: int, steps: int, sms: int) -> range:
    """KV splits above 1 that its rule may choose; the last is what num_splits=0 takes.

    tiles: of 128 packed rows, over all KV heads and sequences. steps: of 128 keys that the longest
    one has. Any number up to 256 can be requested (its second kernel adds up no more); above 1 a
    call takes the path of one CTA per tile, whatever it takes else.
    """
    if steps <= _FEWEST_STEPS or not tiles:
        return range(2, 2)
    return range(2, min(sms // tiles, _MOST_SPLITS, steps) + 1)
