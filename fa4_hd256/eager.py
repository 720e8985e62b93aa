"""Eager calls: past PyTorch's dispatcher, and where a call like it came before, past everything but
allocation and launch.

Nothing of an eager call on plain tensors needs the dispatcher, which takes longer than a launch.
Wherever something could intercept the operator (torch.compile, tracing, modes, subclasses,
torch.func) it is called as an operator.

NOTE [key of a call].  What a call's checks, its kernels and their arguments depend on: of each
tensor shape, strides, dtype, device and alignment; all other arguments, and their types where equal
values of some types alone are accepted; the environment (`environment.switches`). What a hit leaves
out therefore comes out as it did when the key was made. Contents of lengths are checked on the CPU
alone, where no call is repeated.

NOTE [guards].  To make a key takes longer than to launch. So each that came before has a guard,
PyTorch's own of compiled code: one call in C++ that says whether tensors have the classes, dispatch
keys, dtypes, devices, sizes, strides and requires_grad of those that it was made of. They are found
by the other arguments and two shapes. Where a PyTorch has none, keys are made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from . import environment
from .gpus.family import as_seen
from .run import packed
from .run.recording import Replayed, Tensors, recording

__all__ = ["ALIGNMENT", "LARGEST", "Entry", "OperatorCalls", "is_intercepted", "key_of"]

#: Keys of an operator that are kept; beyond, the oldest goes.
LARGEST = 2048

#: Guards of the same facts that are tried.
MOST_GUARDS = 8

#: Bytes: the strictest alignment that any kernel's argument has.
ALIGNMENT = 32

#: Of plain tensors, which no subclass takes calls of.
_KINDS = (torch.Tensor, torch.nn.Parameter)


# Bound once: a call asks all of them.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transform = torch._C._functorch.peek_interpreter_stack
_tracer = torch._C._get_tracing_state
_is_profiled = torch._C._autograd._profiler_enabled
_is_compiling = torch.compiler.is_compiling


def is_intercepted() -> bool:
    """Whether a call of an operator may now mean something else than running it."""
    return bool(
        _is_compiling()
        or _dispatch_modes()
        or _function_modes()
        or _transform() is not None
        or _tracer() is not None
        or forward_ad._current_level >= 0
        or as_seen() is not None
    )


def key_of(tensors: Tensors, facts: tuple[Any, ...]) -> tuple[tuple, list[int]] | None:
    """(key, addresses of the tensors) of a call that nothing intercepts; None where a tensor is
    no plain one, or has elements and no memory: PyTorch's zeros, which its dispatcher fills in, and
    storage that was resized to nothing, which it refuses.

    tensors: None for one not given. facts: all that the call depends on beside these and the
    environment. NOTE [key of a call].
    """
    if is_intercepted():
        return None
    key: list[Any] = [facts, environment.switches()]
    addresses = []
    for tensor in tensors:
        if tensor is None:
            key.append(None)
            addresses.append(0)
            continue
        if (
            type(tensor) not in _KINDS
            or tensor.layout is not torch.strided
            or tensor.is_nested
            or tensor.is_neg()
        ):
            return None
        address = tensor.data_ptr()
        if not address and not tensor.is_meta and tensor.numel():
            return None
        addresses.append(address)
        key += (
            tensor.shape, tensor.stride(), tensor.dtype, tensor.device, address % ALIGNMENT,
        )  # fmt: skip
    return tuple(key), addresses


def _guard_of(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """(tensors) -> whether they are like these; None where this PyTorch offers no such guard."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes: list[Any] = [list(t.shape) for t in tensors]
        strides: list[Any] = [list(t.stride()) for t in tensors]
        guard = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        if guard.check(*tensors) and not guard.check(*[t.unsqueeze(0) for t in tensors]):
            return guard.check
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError):
        pass
    return None


def are_aligned(addresses: Sequence[int]) -> bool:
    """Whether all of them are multiples of `ALIGNMENT`."""
    bits = 0
    for address in addresses:
        bits |= address
    return not bits % ALIGNMENT


class Entry:
    """What is kept of calls with a key.

    scalars: the operator's arguments that are no tensors. replayed: their launches, None where they
    do not repeat, or until one is recorded.
    """

    __slots__ = ("recorded", "replayed", "scalars")

    def __init__(self, scalars: Any) -> None:
        self.scalars = scalars
        self.replayed: Replayed | None = None
        self.recorded = False


class _Guard(NamedTuple):
    """check: whether tensors are those of the entry's key; places: of those that are given among a
    call's tensors."""

    check: Callable[..., bool]
    entry: Entry
    places: tuple[int, ...]


class OperatorCalls:
    """Calls of one operator on plain tensors, those that came before repeated.

    Calls that graphs make, through the dispatcher, are none of these.
    """

    def __init__(self, name: str, operator: Callable[..., Any], roles: Sequence[str]) -> None:
        """name: as profiles have it. operator: (tensors, scalars) -> its results. roles: of its
        tensors, in order."""
        self._name, self._operator, self._roles = name, operator, tuple(roles)
        self._kept: dict[Hashable, Entry] = {}
        self._guarded: dict[Hashable, list[_Guard]] = {}
        self._lock = threading.Lock()

    def find(
        self, facts: tuple[Any, ...], tensors: Tensors, resolve: Callable[[], tuple]
    ) -> tuple[Entry, list[int]] | None:
        """(entry, addresses of the tensors) of a call that nothing intercepts; None where it must
        go through the dispatcher all the same.

        facts: all that the call depends on beside its tensors and the environment, and which
        tensors are given. resolve: the operator's scalars, asked where no such call came before;
        raises as it does.
        """
        present = [tensor for tensor in tensors if tensor is not None]
        place = None
        try:
            place = facts, present[0].shape, present[1].shape, environment.switches()
            for check, entry, places in self._guarded.get(place, ()):
                if check(*present):
                    bits = 0
                    addresses = [0] * len(tensors)
                    for number, tensor in zip(places, present):
                        addresses[number] = address = tensor.data_ptr()
                        bits |= address or 1  # without memory: see `key_of`
                    if not bits % ALIGNMENT:
                        return entry, addresses
        # No tensor, or one without a shape, or an argument that cannot be hashed.
        except (AttributeError, IndexError, RuntimeError, TypeError):
            pass
        found = key_of(tensors, facts)
        if found is None:
            return None
        key, addresses = found
        entry = self._entry(key, resolve)
        if place is not None and entry.replayed is not None and are_aligned(addresses):
            self._guard(place, tensors, entry)
        return entry, addresses

    def _entry(self, key: tuple, resolve: Callable[[], tuple]) -> Entry:
        try:
            found = self._kept.get(key)
        except TypeError:  # an argument that cannot be hashed
            found = Entry(resolve())
            found.recorded = True  # nobody would find it
            return found
        if found is None:
            found = Entry(resolve())
            with self._lock:
                while len(self._kept) >= LARGEST:
                    del self._kept[next(iter(self._kept))]
                self._kept[key] = found
        return found

    def _guard(self, place: Hashable, tensors: Tensors, entry: Entry) -> None:
        """Let `find` find an entry by a guard. NOTE [guards]; the alignment is the largest."""
        given = [(n, tensor) for n, tensor in enumerate(tensors) if tensor is not None]
        check = _guard_of([tensor for _, tensor in given])
        if check is None:
            return
        with self._lock:
            if len(self._guarded) >= LARGEST:
                self._guarded.clear()
            # The last one first; of many layouts the oldest go.
            kept = self._guarded.get(place, [])
            guard = _Guard(check, entry, tuple([n for n, _ in given]))
            self._guarded[place] = [guard, *kept[: MOST_GUARDS - 1]]

    def run(
        self, entry: Entry, tensors: Tensors, addresses: Sequence[int], first: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """The operator's results; addresses: of the tensors, by `key_of`; first: the first result
        alone is read, others may be anything."""
        if _is_profiled():
            with torch.profiler.record_function(self._name):
                return self._run(entry, tensors, addresses, first)
        return self._run(entry, tensors, addresses, first)

    def _run(
        self, entry: Entry, tensors: Tensors, addresses: Sequence[int], first: bool
    ) -> tuple[torch.Tensor, ...]:
        if entry.replayed is not None:
            try:
                return entry.replayed.run(tensors, addresses, first)
            except torch.OutOfMemoryError:
                # The long way may do with less.
                return self._operator(tensors, entry.scalars)
        if entry.recorded or not _repeats(tensors):
            return self._operator(tensors, entry.scalars)
        with recording(self._roles, tensors) as recorded:
            results = self._operator(tensors, entry.scalars)
        entry.replayed, entry.recorded = recorded.replayed(), True
        return results

    def forget(self) -> None:
        """Let go of all that is kept."""
        with self._lock:
            self._kept.clear()
            self._guarded.clear()


def _repeats(tensors: Tensors) -> bool:
    """Whether calls on the device of these tensors may be repeated."""
    on_gpu = any(tensor is not None and tensor.is_cuda for tensor in tensors)
    return on_gpu or packed.stand_in is not None
