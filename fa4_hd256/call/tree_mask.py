"""Pack tree masks (speculative decoding) into one word of bits for each query."""

from __future__ import annotations

from typing import Any

import torch

from ..kernels.mask.masking import WORD_BITS
from ..kernels.mask.windows import Window

#: Dtype of words -> the most nodes of a tree whose words have that dtype.
WORD_NODES = {torch.int32: WORD_BITS, torch.int64: 2 * WORD_BITS}
#: The most queries of a sequence with a tree mask.
MOST_NODES = max(WORD_NODES.values())
_FORMS = (
    "a bool tensor (seqlen_q, seqlen_q) or (batch, seqlen_q, seqlen_q), True where a query sees "
    f"the key of a node, of up to {MOST_NODES} queries; or the words of "
    "fa4_hd256.masks.tree_words, int32 of up to 32 nodes, or int64"
)


def tree_words(tree_mask: Any) -> torch.Tensor:
    """Return (1 or batch, nodes) words: bit j of a node's word says whether it sees node j.

    tree_mask: a bool tensor (nodes, nodes) or (batch, nodes, nodes). It is packed on its device,
    without a synchronisation, into int32 words for up to 32 nodes and int64 words for up to 64.
    Such words, or (nodes,) of them, are taken as they are.

    Raises TypeError for another kind or dtype, ValueError for another shape or more nodes.
    """
    if not isinstance(tree_mask, torch.Tensor):
        raise TypeError(f"tree_mask is {type(tree_mask).__name__}; accepted: None, or {_FORMS}")
    if tree_mask.dtype != torch.bool and tree_mask.dtype not in WORD_NODES:
        raise TypeError(f"tree_mask has dtype {tree_mask.dtype}; accepted: {_FORMS}")
    if tree_mask.is_nested or tree_mask.layout != torch.strided:
        raise ValueError(f"tree_mask is nested or of layout {tree_mask.layout}; accepted: {_FORMS}")
    is_packed, shape = tree_mask.dtype != torch.bool, tuple(tree_mask.shape)
    is_square = is_packed or (len(shape) > 1 and shape[-1] == shape[-2])
    dimensions = len(shape) + is_packed
    fits = 0 not in shape and shape[-1:] <= (WORD_NODES.get(tree_mask.dtype, MOST_NODES),)
    if dimensions not in (2, 3) or not is_square or not fits:
        raise ValueError(f"tree_mask has shape {shape}; accepted: {_FORMS}")
    words = tree_mask
    if not is_packed:
        dtype = next(dtype for dtype, most in WORD_NODES.items() if shape[-1] <= most)
        bits = torch.arange(shape[-1], dtype=dtype, device=tree_mask.device)
        words = (tree_mask.to(dtype) << bits).sum(-1, dtype=dtype)
    words = words if words.ndim == 2 else words.unsqueeze(0)
    return words if words.stride(1) == 1 else words.contiguous()


def is_wide(words: torch.Tensor | None) -> bool:
    return words is not None and words.dtype == torch.int64


def check_words(words: torch.Tensor | None, sequences: int, longest: int, window: Window) -> None:
    """Raise ValueError unless words fit the sequences and the queries of a call, and the window.
    sequences: of the call. longest: the most queries of a sequence. window: no bound of it may hide
    a node."""
    if words is None:
        return
    if any(side is not None and side < 0 for side in window):
        raise ValueError(
            f"window_size is {window} with tree_mask; accepted: 0 or more, None or -1 for "
            "unbounded, since a negative bound hides nodes of the tree"
        )
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
