"""Operators for masks whose contents torch.compile cannot trace.

Packed sequences without offsets must be counted, and a bool mask becomes a list of tiles whose
length depends on its contents. An operator does both when the graph runs, so the model stays one
graph. All layers share the result for a mask.
"""

from __future__ import annotations

from typing import Any

import torch

from ...call.forward_problem import backward_use_clc
from ...call.functions.until_changed import UntilChanged
from ...call.operator_arguments import BackwardTensors
from ...call.options import Options
from ...call.tile_mask import TileMask
from ...interface import flash_attn_func, flash_attn_varlen_func
from ...kernels.mask.windows import Window
from ...masks import from_dense
from ...metadata import get_backward_metadata
from ...package_name import NAMESPACE
from ..given_results import backward_config_of, gradients_of_results
from .descriptions import offsets_of

#: Stands for None among an operator's ints.
_NONE = -1

_tiles = UntilChanged()
_counts = UntilChanged()


def tiles_of(dense: torch.Tensor) -> TileMask:
    tiles: TileMask = _tiles.made(dense, lambda: from_dense(dense))
    return tiles


def counted(begins: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return `offsets_of`, cached."""
    offsets, longest = _counts.made(begins, lambda: offsets_of(begins))
    return offsets, longest


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    window: Window,
    arguments: dict[str, Any],
    ds_bytes: int | None,
) -> torch.Tensor:
    """Compute attention with a mask that is read when the graph runs. q, k, v: (batch, seqlen,
    heads, 256). mask: bool, four dimensions as for `tiles_of`, or two as for `counted`. arguments:
    softmax_scale, softcap and learnable_sink of `flash_attn_func`."""
    scale = arguments["softmax_scale"]
    out, _ = masked_forward(
        q,
        k,
        v,
        arguments["learnable_sink"],
        mask,
        [_NONE if number is None else number for number in (*window, ds_bytes)],
        q.shape[-1] ** -0.5 if scale is None else scale,
        arguments["softcap"],
    )
    return out


@torch.library.custom_op(f"{NAMESPACE}::masked_forward", mutates_args=())
def masked_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    mask: torch.Tensor,
    bounds: list[int],
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of `attend`. lse: (batch, heads, seqlen_q), or (heads, batch * seqlen_q).
    bounds: the two sides of the window, and ds_bytes; -1 for None."""
    options: dict[str, Any] = {
        "softmax_scale": scale,
        "softcap": softcap,
        "learnable_sink": sink,
        "return_lse": True,
    }
    if mask.ndim == q.ndim:
        out, lse = flash_attn_func(q, k, v, block_mask=tiles_of(mask), **options)
        return out, lse
    offsets, longest = counted(mask)
    left, right, _ = bounds
    out, lse = flash_attn_varlen_func(
        *(tensor.flatten(0, 1) for tensor in (q, k, v)),
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        window_size=(left, right),
        **options,
    )
    return out.view(q.shape), lse


@masked_forward.register_fake
def _(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, mask = arguments[0], arguments[4]
    batch, rows, heads, _ = q.shape
    shape = (batch, heads, rows) if mask.ndim == q.ndim else (heads, batch * rows)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op(
    f"{NAMESPACE}::masked_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? sink, "
    "Tensor mask, int[] bounds, float scale, float softcap) -> (Tensor, Tensor, Tensor, Tensor)",
)
def masked_backward(
    *arguments: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dq, dk, dv, dsink) of `masked_forward`; dsink is empty without a sink. arguments: as
    in the schema. It has no list of tensors, since PyTorch cannot batch one."""
    dout, q, k, v, out, lse, sink, mask, bounds, scale, softcap = arguments
    left, right, ds_bytes = (None if number == _NONE else number for number in bounds)
    config = backward_config_of(ds_bytes, q.device)
    use_clc = backward_use_clc(None)
    if mask.ndim == q.ndim:
        dq, dk, dv, dsink = gradients_of_results(
            BackwardTensors(dout, None, q, k, v, out, lse, sink),
            Options.check(scale, False, (None, None), softcap, use_clc),
            backward_config=config,
            block_mask=tiles_of(mask),
        )
    else:
        offsets, longest = counted(mask)
        of_dout, of_q, of_k, of_v, of_out = (t.flatten(0, 1) for t in (dout, q, k, v, out))
        *gradients, dsink = gradients_of_results(
            BackwardTensors(
                of_dout,
                None,
                of_q,
                of_k,
                of_v,
                of_out,
                lse,
                sink,
                cu_seqlens_q=offsets,
                cu_seqlens_k=offsets,
            ),
            Options.check(scale, False, (left, right), softcap, use_clc),
            (longest, longest),
            backward_config=config,
            metadata=get_backward_metadata(offsets, None, False, (left, right)),
        )
        dq, dk, dv = (rows.view(like.shape) for rows, like in zip(gradients, (q, k, v)))
    return dq, dk, dv, q.new_empty(0) if sink is None else dsink


@masked_backward.register_fake
def _(*arguments: Any) -> tuple[torch.Tensor, ...]:
    _, q, k, v, _, _, sink, *_ = arguments
    made = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
    return *made, q.new_empty(0) if sink is None else torch.empty_like(sink)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, sink, mask, *ctx.values = inputs
    ctx.save_for_backward(q, k, v, *output, sink, mask)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: torch.Tensor | None, _: Any) -> tuple[Any, ...]:
    *tensors, sink, mask = ctx.saved_tensors
    if dout is None:
        return (None,) * (5 + len(ctx.values))
    dq, dk, dv, dsink = masked_backward(dout, *tensors, sink, mask, *ctx.values)
    return dq, dk, dv, None if sink is None else dsink, None, *(None for _ in ctx.values)


masked_forward.register_autograd(_gradients, setup_context=_save)
