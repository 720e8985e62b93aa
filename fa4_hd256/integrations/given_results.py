"""Gradients where out and LSE are another's: an adapter's, or of more keys than are given."""

from __future__ import annotations

from typing import Any

import torch

from ..autograd import call_backward, listed_tiles_of
from ..call import named_configs
from ..call.forward_problem import backward_use_clc
from ..call.operator_arguments import BackwardTensors, BackwardValues
from ..call.options import Options
from ..call.tile_mask import TileMask
from ..kernels.mask.block_mask import MASK_BLOCKS, MASK_KEY_BITS
from ..mask_mods import MaskMod
from ..mask_mods import read_by as read_by_mask
from ..score_mods import ScoreMod, read_by

__all__ = ["gradients_of_results"]


def gradients_of_results(
    tensors: tuple[torch.Tensor, ...],
    options: Options,
    offsets: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    longest: tuple[int | None, int | None] = (None, None),
    *,
    dlse: torch.Tensor | None = None,
    use_clc: bool | None = None,
    backward_config: str = named_configs.DEFAULT,
    functions: tuple[ScoreMod | None, TileMask | None, MaskMod | None] = (None, None, None),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dq, dk, dv), shaped and typed like q, k and v.

    tensors: q, k, v, out, dout, lse, shaped as for `flash_attn_varlen_func`; out and lse may count
    keys that are not among k and v, and a sink. offsets: cu_seqlens_q and cu_seqlens_k, longest:
    the bounds of their lengths, None where sequences are not packed. dlse: gradient of lse, None
    for 0. use_clc, backward_config, functions: as `flash_attn_func` takes them, the second by name,
    the third score_mod, block_mask and mask_mod.

    Raises as `flash_attn_varlen_func` does.
    """
    q, k, v, out, dout, lse = tensors
    score_mod, block_mask, mask_mod = functions
    masks: dict[str, Any] = {}
    listed_tiles = 0
    if block_mask is not None:
        masks = {MASK_BLOCKS: block_mask.blocks, MASK_KEY_BITS: block_mask.key_bits}
        listed_tiles = listed_tiles_of(block_mask)
    dynamic = backward_use_clc(use_clc)
    scores, key = read_by(score_mod)
    asked, key_of_mask = read_by_mask(mask_mod)
    dq, dk, dv, _ = call_backward(
        BackwardTensors(dout, dlse, q, k, v, out, lse, None, *offsets, **(masks | scores | asked)),
        BackwardValues(
            options.softmax_scale,
            *options.bounds,
            options.softcap,
            *longest,
            dynamic,
            backward_config,
            key,
            key_of_mask,
            listed_tiles,
            (True, True, False),
        ),
    )
    return dq, dk, dv
