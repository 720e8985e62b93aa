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
by the other arguments: first that which the last such call passed, as a model's layers have it,
then those of the same two shapes. It refuses a tensor that is given twice, as offsets of queries
that are those of keys are: it is checked once, and the others are compared with it by identity.
Where a PyTorch has none, keys are made.
"""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from . import environment
from .call.interception import is_intercepted
from .package_name import NAMESPACE
from .run import packed
from .run.recording import Replayed, Tensors, current, recording

__all__ = [
    "ALIGNMENT", "LARGEST", "Entry", "OperatorCalls", "forget_calls", "key_of", "leading",
    "repeats",
]  # fmt: skip

#: Keys of an operator that are kept; beyond, the oldest goes.
LARGEST = 2048

#: Guards of the same facts that are tried.
MOST_GUARDS = 8

#: Bytes: the strictest alignment that any kernel's argument has.
ALIGNMENT = 32

#: Classes of plain tensors, whose calls no subclass intercepts.
_KINDS = (torch.Tensor, torch.nn.Parameter)


_is_profiled = torch._C._autograd._profiler_enabled  # bound once


def key_of(
    tensors: Tensors, facts: tuple[Any, ...], switches: tuple[str, ...]
) -> tuple[tuple, list[int]] | None:
    """(key, addresses of the tensors that are given) of a call that nothing intercepts; None where
    a tensor is no plain one, or has elements and no memory: PyTorch's zeros, which its dispatcher
    fills in, and storage that was resized to nothing, which it refuses.

    tensors: None for one not given. facts: all that the call depends on beside these and the
    environment; their types count, too. switches: of the environment. NOTE [key of a call].
    """
    if is_intercepted():
        return None
    key: list[Any] = [facts, _types(facts), switches]
    addresses = []
    for tensor in tensors:
        if tensor is None:
            key.append(None)
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


def _types(facts: tuple[Any, ...]) -> tuple[type, ...]:
    """Return the types: some arguments accept only some types of equal values."""
    return tuple(map(type, facts))


def are_aligned(addresses: Sequence[int]) -> bool:
    """Return True if all addresses are multiples of `ALIGNMENT`."""
    return not functools.reduce(operator.or_, addresses) % ALIGNMENT


class Entry:
    """Cached state of the calls with one key.

    scalars: the operator's arguments that are no tensors. replayed: their launches, None where they
    do not repeat, or until one is recorded.
    """

    __slots__ = ("recorded", "replayed", "scalars")

    def __init__(self, scalars: Any) -> None:
        self.scalars = scalars
        self.replayed: Replayed | None = None
        self.recorded = False


class _Guard:
    """Finds an entry. switches: the environment's, of its key."""

    __slots__ = ("_check", "_distinct", "_given", "_repeated", "entry", "switches")

    def __init__(
        self,
        check: Callable[..., bool],
        places: dict[int, int],
        entry: Entry,
        switches: tuple[str, ...],
    ) -> None:
        """check: whether tensors are those of the entry's key, each given once; places: of those
        that are given among a call's tensors, and where each is given first, two or more."""
        self._check, self.entry, self.switches = check, entry, switches
        self._given = operator.itemgetter(*places)
        self._distinct = operator.itemgetter(*dict.fromkeys(places.values()))
        self._repeated = [(place, first) for place, first in places.items() if place != first]

    def addresses(self, tensors: Tensors) -> list[int] | None:
        """Return the addresses of the tensors that are present; None unless they match the entry's
        key."""
        given = distinct = self._distinct(tensors)
        if not self._check(*distinct):
            return None
        if self._repeated:
            for place, first in self._repeated:
                if tensors[place] is not tensors[first]:
                    return None
            given = self._given(tensors)
        addresses = [tensor.data_ptr() for tensor in given]
        # Without memory: see `key_of`. Entries that have guards are of the largest alignment.
        return addresses if 0 not in addresses and are_aligned(addresses) else None


class _Alike:
    """Calls that differ in tensors and environment alone. last: the guard that one of them passed
    last."""

    __slots__ = ("last",)

    def __init__(self, last: _Guard) -> None:
        self.last = last


def _place(alike: _Alike, tensors: Tensors, switches: tuple[str, ...]) -> Hashable:
    """Return the key of the guards of similar calls: the first two tensors have the same shapes."""
    first, second, *_ = [tensor for tensor in tensors if tensor is not None]
    return alike, first.shape, second.shape, switches


_all_calls: weakref.WeakSet[OperatorCalls] = weakref.WeakSet()


def forget_calls() -> None:
    """Let go of what is kept of calls, of all operators."""
    for calls in _all_calls:
        calls.forget()


class OperatorCalls:
    """Calls of one operator on plain tensors, those that came before repeated: past the dispatcher
    (`find`, `run`), or in the operator's body where a graph calls it (`within`)."""

    def __init__(
        self,
        name: str,
        operator: Callable[..., Any],
        resolve: Callable[[Tensors, tuple[Any, ...]], Any],
        roles: Sequence[str],
        written: Sequence[str] = (),
    ) -> None:
        """name: in the package's namespace. operator: (tensors, scalars) -> its results. resolve:
        (tensors, facts) -> scalars, its arguments that are no tensors, called where no such call
        came before; raises for what is not accepted. roles: of its tensors, in order. written:
        roles of those that it writes to."""
        self._name = f"{NAMESPACE}::{name}"  # as profiles have it
        self._operator, self._resolve = operator, resolve
        self._roles = tuple(roles)
        self._written = tuple([self._roles.index(role) for role in written])
        self._kept: dict[Hashable, Entry] = {}
        self._alike: dict[Hashable, _Alike] = {}
        self._guarded: dict[Hashable, list[_Guard]] = {}
        # A cache of `_alike`, in C. Missing calls are not cached: KeyError.
        self._alike_of = functools.lru_cache(LARGEST, typed=True)(
            lambda *facts: self._alike[facts, _types(facts)]
        )
        self._lock = threading.Lock()
        _all_calls.add(self)

    def find(
        self, facts: tuple[Any, ...], tensors: Tensors
    ) -> tuple[Entry, list[int]] | None:
        """(entry, addresses of the tensors that are given) of a call that nothing intercepts; None
        where it must go through the dispatcher all the same.

        facts: all that the call depends on beside its tensors and the environment, and which
        tensors are given. Raises as `resolve` does.
        """
        switches = environment.switches()
        try:
            alike = self._alike_of(*facts)
            guard = alike.last
            if guard.switches is switches:
                addresses = guard.addresses(tensors)
                if addresses is not None:
                    return guard.entry, addresses
            for guard in self._guarded.get(_place(alike, tensors, switches), ()):
                addresses = guard.addresses(tensors)
                if addresses is not None:
                    alike.last = guard
                    return guard.entry, addresses
        # The first call of its kind, or no tensor, or an argument that cannot be hashed.
        except (AttributeError, KeyError, RuntimeError, TypeError):
            pass
        found = key_of(tensors, facts, switches)
        if found is None:
            return None
        key, addresses = found
        entry = self._entry(key, facts, tensors)
        if entry.replayed is not None and are_aligned(addresses):
            self._guard(facts, tensors, entry, switches)
        return entry, addresses

    def _entry(self, key: tuple, facts: tuple[Any, ...], tensors: Tensors) -> Entry:
        try:
            found = self._kept.get(key)
        except TypeError:  # an argument that cannot be hashed
            found = Entry(self._resolve(tensors, facts))
            found.recorded = True  # nobody would find it
            return found
        if found is None:
            found = Entry(self._resolve(tensors, facts))
            with self._lock:
                while len(self._kept) >= LARGEST:
                    del self._kept[next(iter(self._kept))]
                self._kept[key] = found
        return found

    def _guard(
        self, facts: tuple[Any, ...], tensors: Tensors, entry: Entry, switches: tuple[str, ...]
    ) -> None:
        """Let `find` find an entry by a guard. NOTE [guards]; the alignment is the largest."""
        first_of: dict[int, int] = {}
        given = [(place, tensor) for place, tensor in enumerate(tensors) if tensor is not None]
        places = {place: first_of.setdefault(id(tensor), place) for place, tensor in given}
        distinct = [tensor for place, tensor in given if places[place] == place]
        check = _guard_of(distinct) if len(distinct) > 1 else None
        if check is None:
            return
        guard = _Guard(check, places, entry, switches)
        with self._lock:
            if len(self._guarded) >= LARGEST:
                self._forget_guards()
            alike = self._alike.setdefault((facts, _types(facts)), _Alike(guard))
            alike.last = guard
            place = _place(alike, tensors, switches)
            # The last one first; of many layouts the oldest go.
            kept = self._guarded.get(place, [])
            self._guarded[place] = [guard, *kept[: MOST_GUARDS - 1]]

    def _forget_guards(self) -> None:
        self._alike.clear()
        self._alike_of.cache_clear()
        self._guarded.clear()

    def run(
        self, entry: Entry, tensors: Tensors, addresses: Sequence[int], first: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """The operator's results; addresses: of the tensors that are given; first: the first result
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
                results = entry.replayed.run(tensors, addresses, first)
            except torch.OutOfMemoryError:
                # The long way may do with less.
                return self._operator(tensors, entry.scalars)
            if self._written:
                # The operator does so, too: what autograd has saved of them has changed.
                written: Any = [tensors[place] for place in self._written]
                torch.autograd.graph.increment_version(written)
            return results
        if entry.recorded or not repeats(tensors):
            return self._operator(tensors, entry.scalars)
        with recording(self._roles, tensors) as recorded:
            results = self._operator(tensors, entry.scalars)
        entry.replayed, entry.recorded = recorded.replayed(), True
        return results

    def within(self, tensors: Tensors, values: Sequence[Any]) -> Any:
        """The results of an operator in its own body. values: its arguments that are no tensors,
        which `resolve` finds first in the facts (`leading`).

        A call that is recorded already, past the dispatcher, is recorded there.
        """
        if current() is None and repeats(tensors):
            found = self.find((*values, *[tensor is None for tensor in tensors]), tensors)
            if found is not None:
                return self.run(found[0], tensors, found[1])
        return self._operator(tensors, values)

    def forget(self) -> None:
        """Let go of all that is kept."""
        with self._lock:
            self._kept.clear()
            self._forget_guards()


def leading(kind: Any) -> Callable[[Tensors, tuple[Any, ...]], Any]:
    """A `resolve` of `OperatorCalls`: facts begin with the fields of a named tuple."""
    count = len(kind._fields)
    return lambda tensors, facts: kind(*facts[:count])


def repeats(tensors: Tensors) -> bool:
    """Return True if calls on the device of these tensors may be repeated."""
    on_gpu = any(tensor is not None and tensor.is_cuda for tensor in tensors)
    return on_gpu or packed.stand_in is not None
