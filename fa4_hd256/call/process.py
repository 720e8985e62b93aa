"""State of the process that calls depend on: torch.compile, tracing, modes, torch.func and
forward-mode gradients, which stand between a call and what it runs; communication, which holds
SMs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

from .. import environment
from ..gpus.devices import is_captured
from ..gpus.family import as_seen
from ..private_torch import (
    TransformType,
    dispatch_modes,
    function_modes,
    is_wrapped,
    tracer,
    transform,
    transforms,
)

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Bound once: each call asks.
_is_compiling = torch.compiler.is_compiling

#: True if this PyTorch has torch.distributed.
_IS_DISTRIBUTED = torch.distributed.is_available()


def is_intercepted() -> bool:
    """Return True if a call of an operator may now mean something else than running it."""
    return bool(
        _is_compiling()
        or dispatch_modes()
        or function_modes()
        or transform() is not None
        or tracer() is not None
        or forward_ad._current_level >= 0
        or as_seen() is not None
    )


def is_stood_in() -> bool:
    """Return True if new tensors may be stand-ins: of a graph, a mode, or torch.func."""
    return bool(_is_compiling() or dispatch_modes() or transform() is not None)


def without_modes() -> Any:
    """Return a context in which operations are what they are, whatever mode is active."""
    if not dispatch_modes():
        return contextlib.nullcontext()
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def is_transformed() -> bool:
    """Return True under a transform of torch.func that differentiates."""
    if _is_compiling() or transform() is None:
        return False
    kinds = (TransformType.Grad, TransformType.Jvp)
    return any(level.key() in kinds for level in transforms() or ())


def constant_in_graphs(function: _Function) -> _Function:
    """Mark a function whose result torch.compile takes as a constant of its graph. The mark is that
    of `torch.compiler.assume_constant_result`, which imports the whole compiler (1 to 2 s) to set
    it."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_lasting(made: torch.Tensor, of_capture: bool = False) -> bool:
    """Return True if what was made in a call may be cached for later ones: neither the result of a
    graph of torch.compile, which overwrites it when it runs again, nor a stand-in, of a graph that
    is traced or of torch.func; nor what a CUDA graph makes, which is there once it is replayed,
    unless it is for calls of that graph. of_capture: whether it is."""
    if _is_compiling() or type(made) is not torch.Tensor or is_wrapped(made):
        return False
    return is_captured(made.device) == of_capture


def may_have_gradients(tensors: Iterable[Any]) -> bool:
    """Return True if gradients may be requested inside vmap, where requires_grad reads False."""
    if _is_compiling() or not torch.is_grad_enabled():
        return False
    return any(isinstance(tensor, torch.Tensor) and is_wrapped(tensor) for tensor in tensors)


def refuse_tangents(tensors: Iterable[Any]) -> None:
    """Raise NotImplementedError for forward-mode gradients, which an operator would drop."""
    if _is_compiling() or forward_ad._current_level < 0:
        return
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                "forward-mode gradients (torch.func.jvp, jacfwd, torch.autograd.forward_ad) are "
                "not offered; accepted: backward, torch.autograd.grad, torch.func.grad, vjp"
            )


def sms_are_shared() -> bool:
    """Return True if kernels of other streams may hold SMs while ours run: in a process that is one
    of several of torch.distributed, whose communication (NCCL) overlaps with computing, unless SMs
    are left to them (RESERVED_SMS). It selects a scheduler, never a result."""
    group = torch.distributed
    return (
        _IS_DISTRIBUTED
        and group.is_initialized()
        and group.get_world_size() > 1
        and not environment.reserved_sms()
    )
