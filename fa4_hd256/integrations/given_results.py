"""Shared by the adapters to other projects: results written to their `out=`, gradients of results
that they have, and the memory limit of dS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..call import named_configs
from ..call.memory import check_out, tma_can_take
from ..call.operator_arguments import BackwardTensors, BackwardValues, ForwardValues
from ..call.options import Options
from ..call.packed_ds import BackwardMetadata
from ..call.process import constant_in_graphs, is_intercepted
from ..call.tile_mask import TileMask
from ..gpus.family import architecture_of
from ..kernels.kernel_set import kernels_of
from ..kernels.mask.block_mask import MASK_BLOCKS, MASK_KEY_BITS
from ..mask_mods import MaskMod
from ..ops.autograd import call_backward, listed_tiles_of
from ..score_mods import ScoreMod
from ..words import shown


def written_to(out: Any, q: torch.Tensor, attend: Callable[..., Any], wants_lse: bool) -> Any:
    """Call `attend` with out and return_lse, and return out, or (out, lse).

    out: like q, or None for a new tensor. Kernels write to it if they can take its layout, else the
    result is copied. A graph that is being traced has no addresses to check, so there only such
    layouts are accepted. attend: a function of attention with all its other arguments.

    Raises TypeError or ValueError for an out of another kind, dtype, shape or device.
    """
    if not isinstance(out, torch.Tensor) or is_intercepted() or tma_can_take(out):
        given = {} if out is None else {"out": out}
        return attend(return_lse=wants_lse, **given)
    check_out(out, q)
    result = attend(return_lse=wants_lse)
    return (out.copy_(result[0]), result[1]) if wants_lse else out.copy_(result)


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
    """Return (dq, dk, dv, dsink), shaped and typed like q, k, v and the sink, from out and LSE of
    another call: an adapter's, or over more keys than the call has.

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
    scores, score_key = ScoreMod.read_by(score_mod)
    seen, mask_key = MaskMod.read_by(mask_mod)
    (window_left, window_right), (max_seqlen_q, max_seqlen_k) = options.bounds, longest
    values = ForwardValues(
        softmax_scale=options.softmax_scale,
        window_left=window_left,
        window_right=window_right,
        softcap=options.softcap,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        use_clc=options.use_clc,
        backward_config=named_configs.encode(backward_config, type(backward_config)),
        backward_use_clc=options.use_clc,
        score_mod=score_key,
        mask_mod=mask_key,
        listed_tiles=listed_tiles,
    )
    # Nothing calls this with a gate.
    wanted = True, True, tensors.sink is not None, False
    given = tensors._replace(**others, **scores, **seen)
    return call_backward(given, BackwardValues(values, wanted))[:4]


def check_ds_bytes(ds_bytes: Any) -> None:
    if ds_bytes is None:
        return
    if isinstance(ds_bytes, bool) or not isinstance(ds_bytes, int):
        raise TypeError(f"ds_bytes is {shown(ds_bytes)}; accepted: an int of 0 or more, or None")
    if ds_bytes < 0:
        raise ValueError(f"ds_bytes is {ds_bytes}; accepted: 0 (keep no dS) or more, or None")


@constant_in_graphs
def backward_config_of(ds_bytes: int | None, device: torch.device) -> Any:
    """Return the backward configuration with these ds_bytes on a device; None: the default one."""
    if ds_bytes is None:
        return None
    return kernels_of(architecture_of(device)).config("backward")(ds_bytes=ds_bytes)
