"""Attention in mxfp8 with gradients: autograd's function of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .. import plans
from ..call import named_configs
from ..call.checks import are_differentiated
from ..call.forward_problem import Call, check_differentiable
from ..call.mxfp8_gradients import Mxfp8BackwardTensors, check_given, refuse_others
from ..call.operator_arguments import ForwardTensors, ForwardValues
from ..call.process import is_intercepted
from ..gpus.family import architecture_of
from ..kernels.kernel_set import kernels_of
from ..kernels.problem_class import DESCALES
from ..quantize.mxfp8 import Mxfp8Gradients, quantized
from ..run.mxfp8_backward import plan_call
from .autograd import refuse_second_order

#: Backwards, whose values are those of the forward with their own scheduler and configuration.
_BACKWARD = plans.Kind("mxfp8_backward", plans.resolve_fields(ForwardValues), plan_call)

#: Places among `ForwardTensors`. What is behind the scales `refuse_others` refuses.
_BEHIND_V, _FIRST_SCALE = (ForwardTensors._fields.index(name) for name in ("sink", DESCALES[0]))


class Mxfp8Call(NamedTuple):
    """A forward in mxfp8 whose gradients can be computed."""

    #: Of the forward: q, k and v as codes, and their scales.
    tensors: ForwardTensors
    #: The user's mxfp8_gradients: the tensors that gradients flow to, and operands of the backward.
    given: Mxfp8Gradients
    #: The forward's, with the tile scheduler and the configuration of the backward as use_clc and
    #: config.
    values: ForwardValues
    #: Runs the forward: writes the result to its argument, and returns the LSE.
    run: Callable[[torch.Tensor], torch.Tensor]


def attend(
    given: Any,
    tensors: ForwardTensors,
    arguments: Call,
    run: Callable[[torch.Tensor], torch.Tensor],
    beside: Sequence[str],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse), typed like the tensors that gradients flow to. given: the user's
    mxfp8_gradients. run: as of `Mxfp8Call`. beside: names of arguments that have no gradients and
    are given. Raises TypeError or ValueError for what does not fit, NotImplementedError for what is
    not offered."""
    if is_intercepted():
        raise NotImplementedError(
            "mxfp8_gradients inside torch.compile, torch.func or a mode: not offered; accepted: "
            "eager calls"
        )
    if not isinstance(given, Mxfp8Gradients):
        raise TypeError(
            f"mxfp8_gradients is a {type(given).__name__}; accepted: that of "
            "fa4_hd256.quantize.quantize_mxfp8_training"
        )
    # The backward's configuration is not that of calls in 16 bits.
    values = arguments._replace(backward_config=None).values(tensors)
    refuse_others(tensors, values, beside)
    check_given(given, tensors)
    # Gradients flow to the tensors that were quantized, which have no scales.
    exact = ForwardTensors(given.q, given.k, given.v, *tensors[_BEHIND_V:_FIRST_SCALE])
    check_differentiable(exact, values)
    kernels = kernels_of(architecture_of(tensors.q.device))
    kernels.backward_set(is_mxfp8=True)
    kind = kernels.config("mxfp8_backward")
    config = named_configs.encode(arguments.backward_config, kind, said="backward_config")
    values = values._replace(use_clc=values.backward_use_clc, config=config)
    call = Mxfp8Call(tensors, given, values, run)
    if are_differentiated(given[:3]):
        found: tuple[torch.Tensor, torch.Tensor] = _Mxfp8Attention.apply(call, *given[:3])
        return found
    return _forward(call)


def _forward(call: Mxfp8Call) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty(call.tensors.q.shape, dtype=call.given.q.dtype, device=call.given.q.device)
    return out, call.run(out)


class _Mxfp8Attention(torch.autograd.Function):
    """Autograd's function of the forward."""

    @staticmethod
    def forward(ctx: Any, call: Mxfp8Call, *exact: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, lse = _forward(call)
        tensors, given = call.tensors, call.given
        ctx.save_for_backward(
            out, lse, tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.q, tensors.k,
            tensors.q_descale, tensors.k_descale, *given[3:],
        )  # fmt: skip
        ctx.values = call.values
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            refuse_second_order(ctx)
        needed = ctx.needs_input_grad[1:]
        if (dout is None and dlse is None) or not any(needed):
            return (None,) * 4
        (out, lse, offsets_q, offsets_k, q, k, of_q, of_k, *given) = ctx.saved_tensors
        v_columns, q_rows, k_rows, *scales = given
        if dout is None:
            dout = torch.zeros_like(out)
        columns, of_columns = quantized("dout", dout, offsets_q)
        rows, of_rows = quantized("dout", dout, offsets_q, along_rows=True)
        tensors = Mxfp8BackwardTensors(
            dout, dlse, out, lse, offsets_q, offsets_k, q, k, v_columns, columns, q_rows, k_rows,
            rows, of_q, of_k, scales[0], of_columns, scales[1], scales[2], of_rows,
        )  # fmt: skip
        found = plans.within(_BACKWARD, tensors, ctx.values)
        return None, *(g if is_needed else None for g, is_needed in zip(found, needed, strict=True))
