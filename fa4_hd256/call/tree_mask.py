"""Masks of trees of drafted tokens: from what users give to a word of bits for each query."""

from __future__ import annotations

from typing import Any

import torch

from fa4_hd256.kernels.masking import WORD_BITS

__all__ = ["check_apart", "check_words", "tree_words"]

#: Queries of a sequence, so many as a word has bits.
MOST_NODES = WORD_BITS
_FORMS = (
    "a bool tensor (seqlen_q, seqlen_q) or (batch, seqlen_q, seqlen_q), True where a query sees "
    f"the key of a node, of up to {MOST_NODES} queries; or the int32 words of "
    "fa4_hd256.masks.tree_words"
)


def tree_words(tree_mask: Any) -> torch.Tensor:
    """(1 or batch, nodes) int32, bit j of the word of a node: whether it sees node j.

    tree_mask: such words, or (nodes,) of them, taken as they are; else a bool tensor (nodes, nodes)
    or (batch, nodes, nodes), packed by operations on its device, for which nothing waits. nodes: 1
    to 32. Raises TypeError for another kind or dtype, ValueError for another shape.
    """
    if not isinstance(tree_mask, torch.Tensor):
        raise TypeError(f"tree_mask is {type(tree_mask).__name__}; accepted: None, or {_FORMS}")
    if tree_mask.dtype not in (torch.bool, torch.int32):
        raise TypeError(f"tree_mask has dtype {tree_mask.dtype}; accepted: {_FORMS}")
    if tree_mask.is_nested or tree_mask.layout != torch.strided:
        raise ValueError(f"tree_mask is nested or of layout {tree_mask.layout}; accepted: {_FORMS}")
    is_packed, shape = tree_mask.dtype == torch.int32, tuple(tree_mask.shape)
    is_square = is_packed or (len(shape) > 1 and shape[-1] == shape[-2])
    dimensions = len(shape) + is_packed
    fits = 0 not in shape and shape[-1:] <= (MOST_NODES,)
    if dimensions not in (2, 3) or not is_square or not fits:
        raise ValueError(f"tree_mask has shape {shape}; accepted: {_FORMS}")
    words = tree_mask
    if not is_packed:
        bits = torch.arange(shape[-1], dtype=torch.int32, device=tree_mask.device)
        words = (tree_mask.to(torch.int32) << bits).sum(-1, dtype=torch.int32)
    words = words if words.ndim == 2 else words.unsqueeze(0)
    return words if words.stride(1) == 1 else words.contiguous()


def check_words(words: torch.Tensor | None, sequences: int, longest: int) -> None:
    """Words, if there are any, are of as many sequences as a call has, or of one, and of all its
    queries. longest: of a sequence. Raises ValueError."""
    if words is None:
        return
    batch, nodes = words.shape
    if batch not in (1, sequences):
        raise ValueError(
            f"tree_mask is of {batch} sequences; accepted: {sequences}, as the call has, or one "
            "mask for all, (seqlen_q, seqlen_q)"
        )
    if nodes < longest:
        raise ValueError(
            f"tree_mask is of {nodes} nodes, and sequences have up to {longest} queries; accepted: "
            f"a node for each query, up to {MOST_NODES}"
        )


def check_apart(tree_mask: Any, block_mask: Any) -> None:
    """Raise ValueError where both are given."""
    if tree_mask is not None and block_mask is not None:
        raise ValueError(
            "tree_mask and block_mask are both given; accepted: one of them: a block mask can say "
            "both, `fa4_hd256.masks.from_dense`"
        )
