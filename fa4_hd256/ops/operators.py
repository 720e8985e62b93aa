"""The torch operators of the forward: one whose gradients `autograd` has, the same with the
greatest logits, one that writes to a tensor of the caller, one that writes new rows to a KV cache
first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from .. import plans
from ..call.autocast import autocast
from ..call.cache_checks import check_cache_tensors, check_memory
from ..call.forward_problem import check_operator
from ..call.memory import check_writable
from ..call.operator_arguments import (
    CacheTensors,
    CacheValues,
    ForwardTensors,
    ForwardValues,
    cache_arguments,
    flat,
    forward_arguments,
    schema_of,
    values_of,
)
from ..kernels.nvfp4_format import BLOCK_SCALES
from ..kernels.problem_class import result_dtypes
from ..package_name import NAMESPACE
from ..private_torch import DispatchKey, excluding
from ..run.append import plan_cache
from ..run.forward import plan_call
from .autograd import gradients, save_for_backward

_ARGUMENTS = schema_of(ForwardTensors, ForwardValues)


@torch.library.custom_op(
    f"{NAMESPACE}::forward", mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)"
)
def forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse); tensors 4-D, packed sequences with a batch of 1."""
    tensors, values = forward_arguments(arguments)
    out, lse = plans.within(_BODY_FORWARD, (*tensors, None), values)
    return out, lse


_values = plans.resolve_fields(ForwardValues)
#: Place of out.
OUT = len(ForwardTensors._fields)
#: Tensors that `forward_kvcache` writes to, and their places.
WRITTEN = (*CacheTensors._fields[:3], *BLOCK_SCALES)
WRITTEN_PLACES = tuple(map(CacheTensors._fields.index, WRITTEN))
#: Kinds of the operators' bodies; `interface` has those of eager calls.
_BODY_FORWARD = plans.Kind("forward", _values, plan_call, (OUT,))
_BODY_MAXIMA = plans.Kind("forward_max_logits", _values, partial(plan_call, max_logits=True))


@forward.register_fake
def _(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tensors, values = forward_arguments(arguments)
    check_operator(tensors, values)
    q = tensors.q
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    dtype = result_dtypes(q.dtype)[0]
    return torch.empty_like(q, dtype=dtype, memory_format=torch.contiguous_format), lse


forward.register_autograd(gradients, setup_context=save_for_backward)


@torch.library.custom_op(
    f"{NAMESPACE}::forward_max_logits",
    mutates_args=(),
    schema=f"({_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)
def forward_max_logits(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (out, lse, max_logits); max_logits: (heads,) float32, without a gradient."""
    tensors, values = forward_arguments(arguments)
    out, lse, max_logits = plans.within(_BODY_MAXIMA, (*tensors, None), values)
    return out, lse, max_logits


@forward_max_logits.register_fake
def _(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out, lse = forward(*arguments)
    return out, lse, lse.new_empty(lse.shape[1])


forward_max_logits.register_autograd(gradients, setup_context=save_for_backward)


@torch.library.custom_op(
    f"{NAMESPACE}::forward_out",
    mutates_args=("out",),
    schema=f"(Tensor(a!) out, {_ARGUMENTS}) -> Tensor",
)
def forward_out(out: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Return the lse of `forward` with these arguments, whose result goes to out, 4-D."""
    check_writable(out, arguments)
    inputs, values = forward_arguments(arguments)
    _, lse = plans.within(_BODY_FORWARD, (*inputs, out), values)
    return lse


@forward_out.register_fake
def _(out: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return forward(*arguments)[1]


@torch.library.custom_op(
    f"{NAMESPACE}::forward_kvcache",
    mutates_args=WRITTEN,
    schema=f"({schema_of(CacheTensors, CacheValues, written=WRITTEN)}) -> Tensor",
)
def forward_kvcache(*arguments: Any) -> torch.Tensor:
    """Write new rows to the caches, and the attention's result to out; return its lse."""
    tensors, values = cache_arguments(arguments)
    check_memory(tensors)
    _, lse = plans.within(_BODY_KVCACHE, tensors, flat(values))
    return lse


def _resolve_cache_body(tensors: Sequence[Any], facts: tuple[Any, ...]) -> CacheValues:
    check_cache_tensors(CacheTensors(*tensors))
    values: CacheValues = values_of(CacheValues, facts)
    return values


_BODY_KVCACHE = plans.Kind("forward_kvcache", _resolve_cache_body, plan_cache, WRITTEN_PLACES)


@forward_kvcache.register_fake
def _(*arguments: Any) -> torch.Tensor:
    tensors, values = cache_arguments(arguments)
    check_cache_tensors(tensors, values.rotary_interleaved)
    check_operator(tensors.attention(tensors.lengths).with_batches(), values.attention)
    *batch, rows, heads, _ = tensors.q.shape
    return tensors.q.new_empty((*batch, heads, rows), dtype=torch.float32)


def _with_autocast(operator: Any, leading: int, fixed: int | None) -> None:
    """Let an operator that is called under autocast cast q, k and v, as functions of users do: the
    tensors behind the `leading` ones; fixed: place of a tensor that is never cast."""
    name = operator._qualname.split("::")[1]

    def impl(key: DispatchKey) -> Any:
        def called(*arguments: Any) -> Any:
            before, after = arguments[:leading], arguments[leading + 3 :]
            cast = autocast(
                *arguments[leading : leading + 3],
                fixed=None if fixed is None else arguments[fixed],
            )
            with excluding(key):
                return operator(*before, *cast, *after)

        return called

    for key in (DispatchKey.AutocastCPU, DispatchKey.AutocastCUDA):
        _library.impl(name, impl(key), key.name)


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_with_autocast(forward, 0, None)
_with_autocast(forward_max_logits, 0, None)
_with_autocast(forward_out, 1, 0)
_with_autocast(forward_kvcache, 3, 1)
