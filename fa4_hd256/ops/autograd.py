"""Gradients of the torch operator: the operator that computes them, and how autograd calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from .. import plans
from ..call.forward_problem import check_differentiable
from ..call.operator_arguments import (
    BackwardTensors,
    BackwardValues,
    ForwardValues,
    backward_arguments,
    flat,
    forward_arguments,
    schema_of,
)
from ..call.process import is_intercepted
from ..call.tile_mask import TileMask
from ..gpus.devices import is_captured
from ..kernels.functions.user_functions import FUNCTION_TENSORS
from ..package_name import NAMESPACE
from ..private_torch import is_batch_of_gradients, nesting_of_batches
from ..run.backward import or_empty, plan_call, smaller_plan
from ..run.execute import Execution

#: Tensors of `forward` that gradients flow to, its first ones: q, k, v, sink, out_gate.
DIFFERENTIABLE = 5
#: Place of out among what `BackwardTensors.kept` makes.
_OUT = 3
#: Tensors of a backward that calls with the same values may have or lack, and dlse.
_OPTIONAL = slice(*map(BackwardTensors._fields.index, ("sink", FUNCTION_TENSORS[0])))
_DLSE = BackwardTensors._fields.index("dlse")


@torch.library.custom_op(
    f"{NAMESPACE}::backward",
    mutates_args=(),
    schema=f"({schema_of(BackwardTensors, BackwardValues)}) -> ({', '.join(['Tensor'] * 5)})",
)
def backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Return (dq, dk, dv, dsink, dgate), deterministic; those not wanted are empty."""
    tensors, values = backward_arguments(arguments)
    values = values._replace(wanted=tuple(values.wanted))
    return or_empty(plans.within(_BACKWARD, tensors, flat(values)), tensors)


#: Takes packed sequences with a batch of 1, as the operator's body has them, and without one, as
#: calls past the dispatcher do.
_BACKWARD = plans.Kind(
    "backward", plans.resolve_fields(BackwardValues), plan_call, smaller=smaller_plan
)


@backward.register_fake
def _(*arguments: Any) -> tuple[torch.Tensor, ...]:
    tensors, values = backward_arguments(arguments)
    (dq, dkdv, dsink, dgate), q, sink = values.wanted, tensors.q, tensors.sink
    gate = tensors.out_gate
    return (
        q.new_empty(q.shape if dq else 0),
        tensors.k.new_empty(tensors.k.shape if dkdv else 0),
        tensors.v.new_empty(tensors.v.shape if dkdv else 0),
        q.new_empty(0) if sink is None else sink.new_empty(sink.shape if dsink else 0),
        q.new_empty(0) if gate is None else gate.new_empty(gate.shape if dgate else 0),
    )


def refuse_second_order(context: FunctionCtx, *gradients: Any) -> None:
    raise NotImplementedError(
        "fa4_hd256 offers no second-order gradients; call backward without create_graph=True"
    )


backward.register_autograd(refuse_second_order)


def call_backward(tensors: Sequence[Any], values: BackwardValues) -> tuple[torch.Tensor, ...]:
    """Return (dq, dk, dv, dsink, dgate) as `backward` has them, those of packed sequences without a
    batch; what is not requested may be None or anything. tensors: the fields of `BackwardTensors`,
    packed sequences with or without a batch of 1. values: hashable, so `wanted` a tuple."""
    # If gradients of gradients are requested, the operator refuses them.
    if not torch.is_grad_enabled() and not is_intercepted():
        forward, wanted = values
        absent = [tensor is None for tensor in tensors[_OPTIONAL]]
        facts = (_BACKWARD, *forward, wanted, tensors[_DLSE] is None, *absent)
        planned = plans.find(facts, tensors)
        if planned is not None:
            return plans.run(_BACKWARD, planned[0], tensors, planned[1])
    named = BackwardTensors(*tensors)
    gradients = backward(*named.with_batches(), *values.forward, list(values.wanted))
    given = named.q, named.k, named.v, named.sink, named.out_gate
    # Packed sequences have a batch of 1 in the operator; what is not requested has one dimension.
    return tuple(
        gradient.squeeze(0) if tensor is not None and 1 < gradient.ndim > tensor.ndim else gradient
        for gradient, tensor in zip(gradients, given, strict=True)
    )


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """setup_context of the forward's operators: what `gradients` needs, and no more."""
    tensors, values = forward_arguments(inputs)
    check_differentiable(tensors, values)
    save(ctx, tensors, values, output)


def listed_tiles_of(mask: TileMask) -> int:
    """`TileMask.listed_tiles`, counted now unless the host has no numbers to read."""
    if mask.is_countable and not (
        mask.listed_tiles or is_intercepted() or is_captured(mask.device)
    ):
        mask.count_listed()
    return mask.listed_tiles


def save(
    ctx: Any, tensors: Sequence[Any], values: ForwardValues, results: tuple[torch.Tensor, ...]
) -> None:
    """Keep what `gradients_of` needs. tensors: as `ForwardTensors`. results: out, lse, others."""
    ctx.save_for_backward(*BackwardTensors.kept(tensors, results[0], results[1]))
    ctx.values = values
    if len(results) > 2:
        ctx.mark_non_differentiable(*results[2:])
    # A result without a gradient, LSE mostly, has None then, and costs nothing.
    ctx.set_materialize_grads(False)


def gradients_of(
    ctx: Any,
    needed: Sequence[bool],
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    compute: Callable[..., tuple[torch.Tensor, ...]] = call_backward,
) -> tuple[torch.Tensor | None, ...]:
    """Return gradients of q, k, v, the sink and the gate, None for those not requested. needed:
    which are requested. compute: computes them, as `call_backward` does."""
    if (dout is None and dlse is None) or not any(needed):
        return (None,) * len(needed)
    # Read once: hooks of saved tensors run at each read, and a checkpoint refuses a second one.
    return _of_saved(ctx.saved_tensors, ctx.values, needed, dout, dlse, compute=compute)


def _of_saved(
    tensors: Sequence[torch.Tensor],
    values: ForwardValues,
    needed: Sequence[bool],
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    *,
    compute: Callable[..., tuple[torch.Tensor, ...]],
) -> tuple[torch.Tensor | None, ...]:
    """Return `gradients_of` of saved tensors and values."""
    if dout is None:
        out = tensors[_OUT]
        dout = out.new_zeros(()).expand(out.shape)
    if is_batch_of_gradients(dout) or (dlse is not None and is_batch_of_gradients(dlse)):
        batched = [one is not None and is_batch_of_gradients(one) for one in (dout, dlse)]
        entries = _entries((dout, dlse), batched)
        found = [_of_saved(tensors, values, needed, *of, compute=compute) for of in entries]
        return _joined(found)
    wanted = (needed[0], needed[1] or needed[2], *needed[3:])
    # Fields of `BackwardTensors`, whose class takes longer than a plain tuple.
    results = compute((dout, dlse, *tensors), BackwardValues(values, wanted))
    # From a list, in half the time of a generator.
    return tuple([one if is_needed else None for one, is_needed in zip(results, needed)])


def _nesting() -> int:
    """Return the level of the batch. The thread of a GPU knows no nesting."""
    return max(1, nesting_of_batches())


def _entries(
    of_results: tuple[torch.Tensor | None, ...], batched: Sequence[bool]
) -> list[tuple[torch.Tensor | None, ...]]:
    """Return (dout, dlse) of each entry of a batch. batched: which of the two are batches."""
    level = _nesting()
    entries = [
        torch._remove_batch_dim(tensor, level, 0, 0) if is_batched and tensor is not None else None
        for tensor, is_batched in zip(of_results, batched, strict=True)
    ]
    size = next(len(entry) for entry in entries if entry is not None)
    return [
        tuple(
            tensor if entry is None else entry[i]
            for tensor, entry in zip(of_results, entries, strict=True)
        )
        for i in range(size)
    ]


def _joined(
    gradients: Sequence[tuple[torch.Tensor | None, ...]],
) -> tuple[torch.Tensor | None, ...]:
    """Return gradients of each entry as those of a batch."""
    level = _nesting()
    return tuple(
        None if entries[0] is None else torch._add_batch_dim(torch.stack(entries), 0, level)
        for entries in zip(*gradients, strict=True)
    )


def gradients(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, *_: None
) -> tuple[torch.Tensor | None, ...]:
    needed = ctx.needs_input_grad[:DIFFERENTIABLE]
    others = len(ctx.needs_input_grad) - DIFFERENTIABLE
    return *gradients_of(ctx, needed, dout, dlse), *[None] * others


# ---------------------------------------------------------------- calls past the dispatcher


class _Attention(torch.autograd.Function):
    """Autograd's function of the forward, for calls past the dispatcher."""

    @staticmethod
    def forward(
        ctx: Any,
        found: tuple[plans.Kind, Execution, list[int], Sequence[Any]],
        *differentiable: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Return the results of a plan without out. found: the call's kind, what `plans.find`
        returned, and its tensors: the fields of `ForwardTensors`, then None. differentiable: the
        first of these once more, `DIFFERENTIABLE` ones: autograd tracks what it gets as an
        argument, but nothing inside a tuple."""
        kind, execution, addresses, tensors = found
        results = plans.run(kind, execution, tensors, addresses)
        save(ctx, tensors, execution.values, results)
        return results

    @staticmethod
    def backward(
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, *_: None
    ) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[1 : 1 + DIFFERENTIABLE]
        return None, *gradients_of(ctx, needed, dout, dlse)


#: `_Attention.apply` without what it does for torch.func, which such calls are none of.
attend_with_gradients: Any = super(torch.autograd.Function, _Attention).apply
