"""Gradients from out and LSE of another call: an adapter's, or over more keys than the call has."""

from __future__ import annotations

from typing import Any

import torch

from ..call import named_configs
from ..call.operator_arguments import BackwardTensors, BackwardValues
from ..call.options import Options
from ..call.packed_ds import BackwardMetadata
from ..call.tile_mask import TileMask
from ..kernels.mask.block_mask import MASK_BLOCKS, MASK_KEY_BITS
from ..mask_mods import MaskMod
from ..mask_mods import read_by as read_by_mask
from ..ops.autograd import call_backward, listed_tiles_of
from ..score_mods import ScoreMod
from ..score_mods import read_by as read_by_score


def gradients_of_results(
    tensors: BackwardTensors,
    options: Options,
    longest: tuple[int | None, int | None] = (None, None),
    *,
    backward_config: Any = None,
    score_mod: ScoreMod | None = None,
    block_mask: TileMask | None = None,
    mask_mod: MaskMod | None = None,
    metadata: BackwardMetadata | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return (dq, dk, dv, dsink), shaped and typed like q, k, v and the sink.

    tensors: those of the call, without what the other arguments read. out and lse may count keys
    that are not among k and v, and a sink. options: with the scheduler of the backward. longest:
    bounds of the lengths of packed sequences. metadata: as `backward_metadata`. The other
    arguments are those of `flash_attn_func`, and errors those of `flash_attn_varlen_func`.
    """
    listed_tiles, others = 0, dict[str, Any]()
    if block_mask is not None:
        listed_tiles = listed_tiles_of(block_mask)
        others = {MASK_BLOCKS: block_mask.blocks, MASK_KEY_BITS: block_mask.key_bits}
    if metadata is not None:
        listed_tiles, others = metadata.ds_tiles, {"ds_begins": metadata.ds_begins}
    scores, score_key = read_by_score(score_mod)
    seen, mask_key = read_by_mask(mask_mod)
    (window_left, window_right), (max_seqlen_q, max_seqlen_k) = options.bounds, longest
    values = BackwardValues(
        softmax_scale=options.softmax_scale,
        window_left=window_left,
        window_right=window_right,
        softcap=options.softcap,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        use_clc=options.use_clc,
        config=named_configs.encode(backward_config, type(backward_config)),
        score_mod=score_key,
        mask_mod=mask_key,
        listed_tiles=listed_tiles,
        wanted=(True, True, tensors.sink is not None, False),
    )
    # Nothing calls this with a gate.
    return call_backward(tensors._replace(**others, **scores, **seen), values)[:4]
