"""Attention under transforms of torch.func that differentiate: grad, vjp, and vmap around them.

The operator's own autograd keeps its context while it computes, which these transforms cannot do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..call.forward_problem import check_differentiable
from ..call.operator_arguments import BackwardValues, ForwardTensors, ForwardValues
from ..private_torch import TransformType, transforms
from .autograd import DIFFERENTIABLE, gradients_of, refuse_second_order, save
from .autograd import backward as backward_operator
from .flops import register_when_counted
from .operators import forward as forward_operator

# PyTorch's counter knows the operators from here on.
register_when_counted()


class _Held:
    """Arguments that are no tensors, which transforms do not look into."""

    def __init__(self, values: Any) -> None:
        self.values = values


def attend_under_transforms(
    tensors: ForwardTensors, values: ForwardValues
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of the operator; tensors with a batch. Raises NotImplementedError for a
    call without gradients (`check_differentiable`) of which a transform wants some, and inside
    torch.func.functionalize, for which PyTorch takes no gradients of a user's."""
    kinds = {level.key() for level in transforms() or ()}
    if TransformType.Functionalize in kinds:
        raise NotImplementedError(
            "torch.func.functionalize stands inside a transform that differentiates; accepted: "
            "functionalize around torch.func.grad and vjp, or neither"
        )
    wanted = (tensor for tensor in tensors[:DIFFERENTIABLE] if tensor is not None)
    if any(tensor.requires_grad for tensor in wanted):
        check_differentiable(tensors, values)
    apply = _DifferentiatedOperator.apply
    results: tuple[torch.Tensor, torch.Tensor] = apply(_Held(values), *tensors)
    return results


class _DifferentiatedOperator(torch.autograd.Function):
    """The operator with its gradients."""

    generate_vmap_rule = True

    @staticmethod
    def forward(held: _Held, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = forward_operator(*tensors, *held.values)
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        held, *tensors = inputs
        save(ctx, ForwardTensors(*tensors), held.values, output)

    @staticmethod
    def backward(
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[1 : 1 + DIFFERENTIABLE]
        others = len(ctx.needs_input_grad) - 1 - DIFFERENTIABLE
        gradients = gradients_of(ctx, needed, dout, dlse, _differentiated)
        return None, *gradients, *[None] * others


def _differentiated(tensors: Sequence[Any], values: BackwardValues) -> tuple[torch.Tensor, ...]:
    gradients: tuple[torch.Tensor, ...] = _Gradients.apply(_Held(values), *tensors)
    return gradients


class _Gradients(torch.autograd.Function):
    """The operator of the gradients, which has none itself."""

    generate_vmap_rule = True

    @staticmethod
    def forward(held: _Held, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = held.values
        return tuple(backward_operator(*tensors, *values.forward, list(values.wanted)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        refuse_second_order(ctx, *gradients)
