"""Eager calls: past PyTorch's dispatcher, and where a call like it came before, past everything but
allocation and launch.

Nothing of an eager call on plain tensors needs the dispatcher, which takes longer than a launch.
Wherever something could intercept the operator (torch.compile, tracing, modes, subclasses,
torch.func) it is called as an operator.

NOTE [key of a call].  What a call's checks, its kernels and their arguments depend on: of each
tensor shape, strides, dtype, device and alignment; the operator's other arguments; the environment
(`environment.switches`). What a hit leaves out therefore comes out as it did when the key was made.
Contents of lengths are checked on the CPU alone, where no call is repeated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

from . import environment
from .gpus.family import as_seen
from .run import packed
from .run.recording import Replayed, Tensors, recording

__all__ = ["LARGEST", "OperatorCalls", "Resolved", "is_intercepted"]

#: Keys of an operator that are kept; beyond, the oldest goes.
LARGEST = 2048

#: Bytes: the strictest alignment that any kernel's argument has.
_ALIGNMENT = 32

_KINDS = (torch.Tensor, torch.nn.Parameter)


def _bits(*names: str) -> int:
    bits = 0
    for name in names:
        bits |= DispatchKeySet(getattr(DispatchKey, name)).raw_repr()
    return bits


#: Dispatch keys of plain dense tensors; any other one has a meaning that a direct call would miss.
_PLAIN = _bits(
    "CPU", "CUDA", "ADInplaceOrView", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA"
)
_NOT_PLAIN = ~_PLAIN


def is_intercepted(tensors: Tensors) -> bool:
    """Whether a call of an operator on these tensors may mean something else than running it."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or as_seen() is not None
    ):
        return True
    for tensor in tensors:
        if tensor is not None and (
            type(tensor) not in _KINDS
            or torch._C._dispatch_keys(tensor).raw_repr() & _NOT_PLAIN
        ):
            return True
    return False


class OperatorCalls:
    """Calls of one operator on plain tensors, those that came before repeated.

    Calls that graphs make, through the dispatcher, are none of these.
    """

    def __init__(self, name: str, operator: Callable[..., Any], roles: Sequence[str]) -> None:
        """name: as profiles have it. operator: (tensors, scalars) -> its results. roles: of its
        tensors, in order."""
        self._name, self._operator, self._roles = name, operator, tuple(roles)
        self._kept: dict[tuple, Replayed | None] = {}
        self._lock = threading.Lock()

    def __call__(self, tensors: Tensors, scalars: tuple) -> tuple[torch.Tensor, ...]:
        """The operator's results. tensors: plain, None for one not given; the call is not
        intercepted. scalars: all other arguments, hashable."""
        if torch._C._autograd._profiler_enabled():
            with torch.profiler.record_function(self._name):
                return self._call(tensors, scalars)
        return self._call(tensors, scalars)

    def _call(self, tensors: Tensors, scalars: tuple) -> tuple[torch.Tensor, ...]:
        key: list[Any] = [scalars, environment.switches()]
        addresses = []
        for tensor in tensors:
            if tensor is None:
                key.append(None)
                addresses.append(0)
                continue
            address = tensor.data_ptr()
            addresses.append(address)
            key += (
                tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(),
                address % _ALIGNMENT,
            )  # fmt: skip
        found = tuple(key)
        replayed = self._kept.get(found)
        if replayed is not None:
            return replayed.run(tensors, addresses)
        if found in self._kept or not _repeats(tensors):
            return self._operator(tensors, scalars)
        with recording(self._roles, tensors) as recorded:
            results = self._operator(tensors, scalars)
        self._keep(found, recorded.replayed())
        return results

    def _keep(self, key: tuple, replayed: Replayed | None) -> None:
        with self._lock:
            while len(self._kept) >= LARGEST:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = replayed

    def forget(self) -> None:
        """Let go of all that is kept."""
        with self._lock:
            self._kept.clear()


class Resolved:
    """What options come to, by what was given: see NOTE [key of a call]."""

    def __init__(self) -> None:
        self._kept: dict[tuple, tuple] = {}
        self._lock = threading.Lock()

    def __call__(self, facts: tuple, resolve: Callable[[], tuple]) -> tuple:
        """What `resolve` returns, or returned for the same facts. facts: all that it depends on
        beside the environment; where they cannot be hashed it is asked."""
        key = facts, environment.switches()
        try:
            found = self._kept.get(key)
        except TypeError:
            return resolve()
        if found is None:
            found = resolve()
            with self._lock:
                if len(self._kept) >= LARGEST:
                    self._kept.clear()
                self._kept[key] = found
        return found


def _repeats(tensors: Tensors) -> bool:
    """Whether calls on the device of these tensors may be repeated."""
    on_gpu = any(tensor is not None and tensor.is_cuda for tensor in tensors)
    return on_gpu or packed.stand_in is not None
