"""The torch operators of the forward, of one that writes to a tensor given, whose gradients
`autograd` has, and of new rows of a cache."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from . import plans
from .autograd import gradients, save_for_backward
from .call.autocast import autocast
from .call.forward_problem import check_operator
from .call.memory import check_writable
from .call.operator_arguments import (
    ForwardTensors,
    ForwardValues,
    forward_arguments,
    schema_of,
)
from .package_name import NAMESPACE
from .private_torch import DispatchKey, excluding
from .run.append import plan_append
from .run.append_arguments import AppendOptions, AppendTensors
from .run.forward import plan_call

__all__ = [
    "OUT",
    "append_rows",
    "forward",
    "forward_max_logits",
    "forward_out",
]

_ARGUMENTS = schema_of(ForwardTensors, ForwardValues)


@torch.library.custom_op(
    f"{NAMESPACE}::forward", mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)"
)
def forward(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of the fields of `ForwardTensors` and `ForwardValues`; tensors 4-D, packed
    sequences with a batch of 1."""
    tensors, values = forward_arguments(given)
    out, lse = plans.within(_FORWARD, (*tensors, None), values)
    return out, lse


_values = plans.leading(ForwardValues)
#: Places of out, and of the caches of `append_rows`.
OUT = len(ForwardTensors._fields)
#: Kinds of the operators' bodies; `interface` has those of eager calls.
_FORWARD = plans.Kind("forward", _values, plan_call, (OUT,))
_MAXIMA = plans.Kind("forward_max_logits", _values, partial(plan_call, max_logits=True))
_APPEND = plans.Kind(
    "append_rows",
    plans.leading(AppendOptions),
    lambda tensors, options: plan_append(AppendTensors(*tensors), options),
)


@forward.register_fake
def _(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tensors, values = forward_arguments(given)
    check_operator(tensors, values)
    q = tensors.q
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


forward.register_autograd(gradients, setup_context=save_for_backward)


@torch.library.custom_op(
    f"{NAMESPACE}::forward_max_logits",
    mutates_args=(),
    schema=f"({_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)
def forward_max_logits(*given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (out, lse, max_logits) for the arguments of `forward`; max_logits: (heads,) float32,
    without a gradient."""
    tensors, values = forward_arguments(given)
    out, lse, max_logits = plans.within(_MAXIMA, (*tensors, None), values)
    return out, lse, max_logits


@forward_max_logits.register_fake
def _(*given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out, lse = forward(*given)
    return out, lse, lse.new_empty(lse.shape[1])


forward_max_logits.register_autograd(gradients, setup_context=save_for_backward)


@torch.library.custom_op(
    f"{NAMESPACE}::forward_out",
    mutates_args=("out",),
    schema=f"(Tensor(a!) out, {_ARGUMENTS}) -> Tensor",
)
def forward_out(out: torch.Tensor, *given: Any) -> torch.Tensor:
    """Return the lse of `forward` with these arguments, whose result goes to out, 4-D."""
    check_writable(out, given)
    inputs, values = forward_arguments(given)
    _, lse = plans.within(_FORWARD, (*inputs, out), values)
    return lse


@forward_out.register_fake
def _(out: torch.Tensor, *given: Any) -> torch.Tensor:
    return forward(*given)[1]


@torch.library.custom_op(
    f"{NAMESPACE}::append_rows",
    mutates_args=("k_cache", "v_cache"),
    schema="(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor lengths, "
    "Tensor? page_table, Tensor? cu_seqlens_k_new, Tensor? k_descale, Tensor? v_descale, "
    "Tensor? rotary_cos, Tensor? rotary_sin, Tensor? rotary_seqlens, Tensor? q, "
    "Tensor? cu_seqlens_q, str descale, bool interleaved, bool ordered) -> (Tensor, Tensor)",
)
def append_rows(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the new rows k and v to the caches. given: the fields of `AppendTensors`, then those of
    `AppendOptions`. Returns the rows in use with them, and q, rotated; without rotary_cos something
    empty, since a schema with results that may be missing is none that PyTorch compiles."""
    count = len(AppendTensors._fields)
    tensors, options = AppendTensors(*given[:count]), AppendOptions(*given[count:])
    after, rotated = plans.within(_APPEND, tensors, options)
    return after, after.new_empty(0) if rotated is None else rotated


@append_rows.register_fake
def _(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = AppendTensors(*given[: len(AppendTensors._fields)])
    after, empty = torch.empty_like(tensors.lengths), tensors.lengths.new_empty(0)
    if tensors.rotary_cos is None:
        return after, empty
    return after, torch.empty_like(tensors.q, memory_format=torch.contiguous_format)


def _with_autocast(operator: Any, leading: int, count: int, fixed: int | None) -> None:
    """Let an operator that is called under autocast cast what functions of users cast: `count`
    tensors behind the `leading` ones; fixed: place of a tensor that is never cast."""
    name = operator._qualname.split("::")[1]

    def impl(key: DispatchKey) -> Any:
        def called(*given: Any) -> Any:
            before, after = given[:leading], given[leading + count :]
            cast = autocast(
                *given[leading : leading + count], fixed=None if fixed is None else given[fixed]
            )
            with excluding(key):
                return operator(*before, *cast, *after)

        return called

    for key in (DispatchKey.AutocastCPU, DispatchKey.AutocastCUDA):
        _library.impl(name, impl(key), key.name)


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_with_autocast(forward, 0, 3, None)
_with_autocast(forward_max_logits, 0, 3, None)
_with_autocast(forward_out, 1, 3, 0)
_with_autocast(append_rows, 0, 2, 2)
