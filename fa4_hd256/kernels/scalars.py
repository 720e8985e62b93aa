"""The scalars of a call: what its kernels get by value beside the tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

from cutlass import Float32, Int32

__all__ = ["CallScalars"]


class CallScalars(NamedTuple):
    """Scalars of one call.

    scale_log2: factor of the scores in the exponent of 2: |softmax_scale| * log2(e), or with a
    softcap softcap * log2(e), with a score_mod log2(e).  cap_scale: |softmax_scale| / softcap, with
    a score_mod |softmax_scale|.  softmax_scale: with its sign. window_left, window_right: 0 or
    more; 0 on an unbounded side.  unseen_queries, unseen_keys: rows that a negative bound hides at
    each sequence's end (`windows`).  max_seqlen_q, max_seqlen_k: the longest query and key
    sequence, or more.  head_parts: parts into which the query heads of a KV head are split.
    clusters: of a static grid.  l2_bytes: of L2, for what the tiles of a section share.

    softmax_scale and head_parts are the backward's, and None in the forward, whose kernels have no
    max_seqlen_k.
    part_keys: of each part of a sequence's keys, where parts are fixed; None for others.
    tile_counter: (1,) int32 tensor of the dynamic scheduler that counts in memory; None for others.
    score_origin: `score_change.ScoreOrigin` of the backward with a score_mod or mask_mod; None for
    others.
    """

    scale_log2: Float32
    cap_scale: Float32
    softmax_scale: Float32 | None
    window_left: Int32
    window_right: Int32
    unseen_queries: Int32
    unseen_keys: Int32
    max_seqlen_q: Int32
    max_seqlen_k: Int32 | None
    head_parts: Int32 | None
    clusters: Int32
    l2_bytes: Int32
    part_keys: Int32 | None = None
    tile_counter: Any = None
    score_origin: Any = None
