"""Plans of calls, found by guards: `find` and `run`.

`find` returns the `Execution` of a call, `run` runs it::

    first call     the key finds none: `Kind.resolve` checks the arguments, `Kind.plan` makes the
                   plan, and its execution is cached; a call that is refused leaves nothing behind
    second call    the key finds the execution, which gets a guard
    later calls    the guard finds the execution

Who makes the kinds, and what they resolve and plan by::

    made in              calls                        resolve                          plan
    interface            eager forwards               forward_problem.resolve_call     run/forward
    kv_cache             eager calls with new rows    cache_checks.resolve_cache_call  run/append
    ops/autograd         backwards, eager or not      `resolve_fields`                 run/backward
    ops/mxfp8            backwards in mxfp8           `resolve_fields`                 run/mxfp8_
                                                                                       backward
    ops/operators        bodies of the operators      `resolve_fields`; with new rows  run/forward,
                                                      check_cache_tensors              run/append

So a call like one before goes without checks, without a description and without PyTorch's
dispatcher, which takes longer than a launch. Where something could intercept the operator
(torch.compile, tracing, modes, subclasses, torch.func) a call goes through the dispatcher to the
operator, whose body comes here (`within`).

NOTE [key of a plan].  What a plan and the checks before it depend on: of each tensor shape,
strides, dtype, device and alignment; all other arguments, and their types where equal values of
some types alone are accepted; the environment (`environment.switches`). Contents of lengths are
checked on the CPU alone, or where FA4_HD256_CHECK or FA4_HD256_CHECK_PAGES is set: there every
call makes its plan.

NOTE [guards].  To make a key takes longer than to launch. So an execution gets a guard, PyTorch's
own of compiled code: one call in C++ that says whether tensors have the classes, dispatch keys,
dtypes, devices, sizes, strides and requires_grad of those that it was made of. Guards are found by
the facts of a call, its arguments that are no tensors: first the guard that the last such call
passed, as a model's layers do, then the guards of the same two shapes. Addresses are no part of
PyTorch's guard: calls whose addresses are all multiples of `ALIGNMENT` alone have one. It refuses a
tensor that is given twice, as cu_seqlens_q is where it is cu_seqlens_k, too. So it gets each tensor
once, and what is given again is compared by identity. Nor does it see a tensor that was absent when
it was made: that each is absent still, `out` among them, is compared, too. Where a PyTorch has no
such guard, every call makes its key.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import environment
from .call.forward_problem import Call
from .call.memory import ALIGNMENT
from .call.operator_arguments import values_of
from .call.options import NO_WINDOW
from .call.process import is_intercepted, sms_are_shared
from .package_name import NAMESPACE
from .private_torch import is_profiled, tensor_guard
from .run.execute import Execution, Tensors, addresses_of
from .run.plan import LaunchPlan

#: Cached plans; beyond, the oldest goes.
LARGEST = 2048

#: Guards of the same facts that are tried.
MOST_GUARDS = 8

#: Classes of plain tensors, whose calls no subclass takes over.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def key_of(
    tensors: Tensors, facts: tuple[Any, ...], switches: tuple[str, ...]
) -> tuple[tuple, list[int]] | None:
    """Return (key, addresses of the tensors) of a call that nothing intercepts, else
    None.

    None also where a tensor is no plain one, or has elements and no memory. Three kinds have none:
    those of the device "meta"; PyTorch's ZeroTensor, which its dispatcher fills in; and storage
    resized to nothing, which the dispatcher refuses.

    tensors: None for one not given. facts: all that the call depends on beside these and the
    environment; their types count, too. switches: of the environment. NOTE [key of a plan].
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
            type(tensor) not in _PLAIN
            or tensor.layout is not torch.strided
            or tensor.is_nested
            or tensor.is_neg()
        ):
            return None
        if tensor.is_meta:
            return None
        address = tensor.data_ptr()
        if not address and tensor.numel():
            return None
        addresses.append(address)
        key += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, address % ALIGNMENT)
    return tuple(key), addresses


def _types(facts: tuple[Any, ...]) -> tuple[type, ...]:
    """Return the types of facts: of equal values some types alone are accepted."""
    return tuple(map(type, facts))


_address_of = torch.Tensor.data_ptr
#: Addresses, bit by bit: a multiple of `ALIGNMENT` if all of them are.
_mixed: Callable[[Sequence[int]], int] = functools.partial(functools.reduce, operator.or_)


@dataclass(frozen=True, eq=False)
class Kind:
    """Calls that are described by the same arguments. One operator may have two kinds: of eager
    calls, whose facts are arguments as users give them, and of its own body, whose facts are
    arguments of its schema.

    name: of their operator, in the package's namespace, and of their range in a profile. resolve:
    (tensors, facts without the kind) -> values, what the plan needs beside tensors; called at the
    first call with a key, and may raise for what is not accepted. plan: (tensors, values) -> their
    plan; raises for all else, and writes to no tensor. written: places of tensors that they write
    to. smaller: (tensors, values, a plan that memory is too short for) -> another one, None where
    there is none.
    """

    name: str
    resolve: Callable[[Tensors, tuple[Any, ...]], Any]
    plan: Callable[[Tensors, Any], LaunchPlan]
    written: tuple[int, ...] = ()
    smaller: Callable[[Tensors, Any, LaunchPlan], LaunchPlan | None] | None = None


class _Guard:
    """Finds an execution. switches: the environment's, of its key."""

    __slots__ = (
        "_absent",
        "_check",
        "_distinct",
        "_nones",
        "_present",
        "_repeated",
        "execution",
        "switches",
    )

    def __init__(
        self,
        check: Callable[..., bool],
        places: dict[int, int],
        absent: list[int],
        execution: Execution,
        switches: tuple[str, ...],
    ) -> None:
        """check: whether tensors are those of the key, each given once; places: of those
        that are given among a call's tensors, and where each is given first, two or more;
        absent: places of those that are not given."""
        self._check, self.execution, self.switches = check, execution, switches
        self._present = operator.itemgetter(*places)
        self._distinct = operator.itemgetter(*dict.fromkeys(places.values()))
        self._repeated = [(place, first) for place, first in places.items() if place != first]
        # Runs of places: slices are taken and compared in C.
        self._absent = operator.itemgetter(*_runs(absent)) if absent else None
        self._nones = self._absent and self._absent((None,) * (absent[-1] + 1))

    def addresses(self, tensors: Tensors) -> list[int] | None:
        """Return the addresses of the tensors if they are those of the key, else None."""
        present = distinct = self._distinct(tensors)
        if not self._check(*distinct):
            return None
        if self._absent is not None and self._absent(tensors) != self._nones:
            return None
        if self._repeated:
            for place, first in self._repeated:
                if tensors[place] is not tensors[first]:
                    return None
            present = self._present(tensors)
        addresses = list(map(_address_of, present))
        # Without memory: see `key_of`. Executions that have guards are of the largest alignment.
        return None if 0 in addresses or _mixed(addresses) % ALIGNMENT else addresses


def _runs(places: list[int]) -> list[slice]:
    """Return slices of which each has the places of one run; places ascend."""
    runs: list[slice] = []
    for place in places:
        begins = not runs or runs[-1].stop != place
        runs.append(slice(place if begins else runs.pop().start, place + 1))
    return runs


class _Alike:
    """Calls with the same facts, which differ in tensors and environment alone. last: the guard
    that one of them passed last."""

    __slots__ = ("last",)

    def __init__(self, last: _Guard) -> None:
        self.last = last


def _place(alike: _Alike, tensors: Tensors, switches: tuple[str, ...]) -> Hashable:
    """Return the key of the guards of calls alike whose first two tensors have the same shapes."""
    given = [tensor for tensor in tensors if tensor is not None]
    return (alike, switches, *[tensor.shape for tensor in given[:2]])


class _Cache:
    def __init__(self) -> None:
        self.executions: dict[Hashable, Execution] = {}
        self.alike: dict[Hashable, _Alike] = {}
        self.guards: dict[Hashable, list[_Guard]] = {}
        self.lock = threading.Lock()

    def keep(self, key: Hashable, execution: Execution) -> None:
        with self.lock:
            while len(self.executions) >= LARGEST:
                del self.executions[next(iter(self.executions))]
            self.executions[key] = execution

    def replace(self, old: Execution, new: Execution) -> None:
        with self.lock:
            keys = [key for key, execution in self.executions.items() if execution is old]
            self.executions |= dict.fromkeys(keys, new)
            self.forget_guards()

    def forget_guards(self) -> None:
        self.alike.clear()
        _alike_of.cache_clear()
        self.guards.clear()


_cache = _Cache()


@functools.lru_cache(LARGEST, typed=True)
def _alike_of(*facts: Any) -> _Alike:
    """Return the entry of `_Cache.alike`, KeyError without one. `lru_cache` looks it up in C."""
    return _cache.alike[facts, _types(facts)]


def forget_plans() -> None:
    with _cache.lock:
        _cache.executions.clear()
        _cache.forget_guards()


def launched_by(call: Callable[[], Any]) -> list[LaunchPlan]:
    """Return the plans that a call runs, in order, those of its backward on a GPU among them."""
    plans: list[LaunchPlan] = []
    _watching.append(plans)
    try:
        call()
    finally:
        _watching.remove(plans)
    return plans


#: Lists that get the plans of calls, for `launched_by`.
_watching: list[list[LaunchPlan]] = []


def call_fields(  # noqa: PLR0913
    *,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    use_clc: Any,
    num_splits: Any,
    batch_invariant: Any,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    config: Any,
    backward_config: Any = None,
    score_mod: str | None = None,
    mask_mod: str | None = None,
    listed_tiles: int = 0,
) -> tuple[Any, ...]:
    """Return the fields of a `Call` as a plain tuple, which takes a third of the time."""
    return (
        softmax_scale, causal, window_size, softcap, use_clc, num_splits, batch_invariant,
        max_seqlen_q, max_seqlen_k, config, backward_config, score_mod, mask_mod, listed_tiles,
    )  # fmt: skip


assert call_fields(**{name: name for name in Call._fields}) == Call._fields  # type: ignore


def facts_of(kind: Kind, arguments: tuple[Any, ...], form: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the facts of a call: all that it depends on beside tensors and environment.
    arguments: the fields of `Call`, which come behind the kind. form: which tensors are
    present, which are the same one, what the scheduler metadata is for (`marked`), and with a KV
    cache rotary_interleaved."""
    window, sides = arguments[_WINDOW_SIZE], None
    if window is not NO_WINDOW and isinstance(window, tuple):
        # Of equal sides some types alone are accepted.
        sides = tuple(map(type, window))
    return (kind, *arguments, sides, sms_are_shared(), *form)


_WINDOW_SIZE = Call._fields.index("window_size")


def find(facts: tuple[Any, ...], tensors: Tensors) -> tuple[Execution, list[int]] | None:
    """Return (execution, addresses of the tensors), of a plan that is made for the first call with
    a key; None for a call that must go through PyTorch's dispatcher.

    facts: what `facts_of` returns, or the call's `Kind` and an operator's arguments. Raises as
    the kind's `resolve` and `plan` do, which check the arguments of a first call.
    """
    switches = environment.switches()
    try:
        alike = _alike_of(*facts)
        guard = alike.last
        if guard.switches is switches:
            addresses = guard.addresses(tensors)
            if addresses is not None:
                return guard.execution, addresses
        for guard in _cache.guards.get(_place(alike, tensors, switches), ()):
            addresses = guard.addresses(tensors)
            if addresses is not None:
                alike.last = guard
                return guard.execution, addresses
    # KeyError: the first or second call with these facts. TypeError: an argument has no hash.
    # AttributeError: one is no tensor. RuntimeError: a tensor has no memory to ask for.
    except (AttributeError, KeyError, RuntimeError, TypeError):
        pass
    keyed = key_of(tensors, facts, switches)
    if keyed is None:
        return None
    key, addresses = keyed
    try:
        execution = _cache.executions.get(key)
    except TypeError:  # an argument that cannot be hashed: nobody would find it
        return _planned(facts, tensors), addresses
    if execution is None:
        execution = _planned(facts, tensors)
        if repeats(tensors):
            _cache.keep(key, execution)
    elif not _mixed(addresses) % ALIGNMENT:
        _guard(facts, tensors, execution, switches)
    return execution, addresses


def _planned(facts: tuple[Any, ...], tensors: Tensors) -> Execution:
    kind = facts[0]
    values = kind.resolve(tensors, facts[1:])
    written = tuple([place for place in kind.written if tensors[place] is not None])
    return Execution(kind.plan(tensors, values), values, written)


def _guard(
    facts: tuple[Any, ...], tensors: Tensors, execution: Execution, switches: tuple[str, ...]
) -> None:
    first_of: dict[int, int] = {}
    present = [(place, tensor) for place, tensor in enumerate(tensors) if tensor is not None]
    places = {place: first_of.setdefault(id(tensor), place) for place, tensor in present}
    distinct = [tensor for place, tensor in present if places[place] == place]
    check = tensor_guard(distinct) if len(distinct) > 1 else None
    if check is None:
        return
    absent = [place for place, tensor in enumerate(tensors) if tensor is None]
    guard = _Guard(check, places, absent, execution, switches)
    with _cache.lock:
        if len(_cache.guards) >= LARGEST:
            _cache.forget_guards()
        alike = _cache.alike.setdefault((facts, _types(facts)), _Alike(guard))
        alike.last = guard
        place = _place(alike, tensors, switches)
        # The last one first; of many layouts the oldest go.
        kept = _cache.guards.get(place, [])
        _cache.guards[place] = [guard, *kept[: MOST_GUARDS - 1]]


def run(
    kind: Kind,
    execution: Execution,
    tensors: Tensors,
    addresses: Sequence[int],
    only_first: bool = False,
) -> tuple[Any, ...]:
    """Run what `find` returned. only_first: the caller reads the first result alone."""
    if is_profiled():
        with torch.profiler.record_function(f"{NAMESPACE}::{kind.name}"):
            return _run(kind, execution, tensors, addresses, only_first)
    return _run(kind, execution, tensors, addresses, only_first)


def _run(
    kind: Kind, execution: Execution, tensors: Tensors, addresses: Sequence[int], only_first: bool
) -> tuple[Any, ...]:
    ran = execution
    while True:
        try:
            results = ran.run(tensors, addresses, only_first)
            break
        except torch.OutOfMemoryError:
            plan = kind.smaller and kind.smaller(tensors, execution.values, ran.plan)
            if plan is None:
                raise
        ran = Execution(plan, execution.values, execution.written)
    if ran is not execution and not execution.has_run:
        # Memory was never enough for it.
        _cache.replace(execution, ran)
    for plans in _watching:
        plans.append(ran.plan)
    if execution.written:
        # As an operator does: what autograd has kept of them is no longer what it was.
        written: Any = [tensors[place] for place in execution.written]
        torch.autograd.graph.increment_version(written)
    return results


def within(kind: Kind, tensors: Tensors, values: Sequence[Any]) -> tuple[Any, ...]:
    """Return an operator's results, called by its body. values: its arguments but tensors."""
    facts = (kind, *values, bytes([tensor is None for tensor in tensors]))
    planned = find(facts, tensors) if repeats(tensors) else None
    execution, addresses = planned or (_planned(facts, tensors), addresses_of(tensors))
    return run(kind, execution, tensors, addresses)


def resolve_fields(record: type) -> Callable[[Tensors, tuple[Any, ...]], Any]:
    """Return a `Kind.resolve` for values already as operators take them: the plan checks. record:
    the class of these values, such as `ForwardValues`."""
    return lambda tensors, facts: values_of(record, facts)


def repeats(tensors: Tensors) -> bool:
    """Return True if plans of calls with these tensors are kept: not where each checks contents."""
    on_gpu = any(tensor is not None and tensor.is_cuda for tensor in tensors)
    return on_gpu and not environment.checks_pages()
