"""Host time of eager calls: what the host does before a call returns, by part.

A call's time is that between its start and its return, with the GPU idle before each repetition and
so few calls in it that no queue fills up. Its parts are timed by themselves, or as the time that
functions of the package take of a call that was not made before.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.measure.providers import Pages
from fa4_hd256 import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    kv_cache,
    plans,
)
from fa4_hd256.kernels.limits import HEAD_DIM
from fa4_hd256.run import launch

__all__ = ["CASES", "HostCase", "Times", "microseconds", "parts_of_long_way", "unkept"]

PAGE_ROWS = 16

#: Calls of a repetition, few enough for every queue of launches, and repetitions.
CALLS, REPETITIONS = 20, 40


@dataclass(frozen=True)
class HostCase:
    """A call of small tensors, whose kernels take less time than the host.

    lengths: (seqlen_q, seqlen_k) of each sequence. packed: for `flash_attn_varlen_func`. paged:
    keys in pages of 16, for `flash_attn_with_kvcache`. appends: the last of them are new rows.
    rotates: with rotary embedding of these and of the queries.
    """

    name: str
    lengths: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (16, 16)
    causal: bool = True
    packed: bool = False
    backward: bool = False
    grad: bool = False
    paged: bool = False
    appends: bool = False
    rotates: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def of_few_rows(self, rows: int) -> HostCase:
        """Return a case with fewer rows where results take time to be filled; decoding steps are
        unchanged."""
        if max(q for q, _ in self.lengths) == 1:
            return self
        return replace(self, lengths=tuple((min(q, rows), min(k, rows)) for q, k in self.lengths))


CASES = (
    HostCase("forward, no gradients", ((256, 256),)),
    HostCase("forward, gradients wanted", ((256, 256),), grad=True),
    HostCase("backward", ((256, 256),), grad=True, backward=True),
    HostCase("backward, heads 16/2", ((256, 256),), (16, 2), grad=True, backward=True),
    HostCase("packed forward", ((128, 128), (256, 256)), packed=True),
    HostCase("packed backward", ((128, 128), (256, 256)), packed=True, grad=True, backward=True),
    HostCase("decode", ((1, 1024),) * 4, (16, 2)),
    HostCase("decode, keys divided", ((1, 4096),), (16, 2), options={"num_splits": 4}),
    HostCase("decode, pages", ((1, 1024),) * 4, (16, 2), paged=True),
    HostCase("decode, new rows in pages", ((1, 1024),) * 4, (16, 2), paged=True, appends=True),
    HostCase(
        "decode, rotated new rows",
        ((1, 1024),) * 4,
        (16, 2),
        paged=True,
        appends=True,
        rotates=True,
    ),  # fmt: skip
)


@dataclass
class Tensors:
    """Tensors of a case: q, k, v, dout as `bench.measure.providers.Inputs` has them; offsets:
    cu_seqlens of packed sequences."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    offsets: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def random(cls, case: HostCase, device: torch.device) -> Tensors:
        """bfloat16, standard normal."""
        generator = torch.Generator(device).manual_seed(0)

        def normal(side: int, heads: int) -> torch.Tensor:
            lengths = [pair[side] for pair in case.lengths]
            rows = (sum(lengths),) if case.packed else (len(lengths), lengths[0])
            shape = (*rows, heads, HEAD_DIM)
            return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

        (heads, heads_kv), offsets = case.heads, None
        if case.packed:
            of_lengths = {
                lengths: torch.tensor([0, *lengths], device=device).cumsum(0).int()
                for lengths in zip(*case.lengths, strict=True)
            }
            # Self-attention gives the same tensor twice.
            of_q, of_k = (of_lengths[lengths] for lengths in zip(*case.lengths, strict=True))
            offsets = of_q, of_k
        q, k, v = normal(0, heads), normal(1, heads_kv), normal(1, heads_kv)
        found = cls(q, k, v, normal(0, heads), offsets)
        for tensor in (found.q, found.k, found.v):
            tensor.requires_grad_(case.grad)
        return found


def our_call(case: HostCase, tensors: Tensors) -> Callable[[], torch.Tensor]:
    """A forward."""
    options: dict[str, Any] = {"causal": case.causal, **case.options}
    if case.paged:
        return _paged_call(case, tensors, options)
    function: Callable[..., Any] = flash_attn_func
    arguments: tuple[Any, ...] = (tensors.q, tensors.k, tensors.v)
    if tensors.offsets is not None:
        function = flash_attn_varlen_func
        longest = (max(q for q, _ in case.lengths), max(k for _, k in case.lengths))
        given = (*tensors.offsets, *longest)
        names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
        options |= zip(names, given, strict=True)
    return lambda: function(*arguments, **options)


def _paged_call(
    case: HostCase, tensors: Tensors, options: dict[str, Any]
) -> Callable[[], torch.Tensor]:
    """The keys in pages, the last rows of each sequence written again where the case appends."""
    rows, _ = case.lengths[0]
    cache = Pages.of(tensors.k, tensors.v, PAGE_ROWS, torch.Generator().manual_seed(0))
    function: Callable[..., Any] = flash_attn_with_kvcache
    if not case.appends:
        return lambda: function(
            tensors.q, cache.k, cache.v, cache_seqlens=cache.lengths, page_table=cache.table,
            **options,
        )  # fmt: skip
    k, v = (tensor[:, -rows:].clone() for tensor in (tensors.k, tensors.v))
    lengths = cache.lengths - rows
    if case.rotates:
        tables = torch.randn(2, tensors.k.shape[1], HEAD_DIM // 2, device=tensors.k.device)
        options |= dict(zip(("rotary_cos", "rotary_sin"), tables, strict=True))
    return lambda: function(
        tensors.q, cache.k, cache.v, k, v, cache_seqlens=lengths, page_table=cache.table, **options
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Times(NamedTuple):
    """Microseconds of a call; low and high are the 20th and the 80th percentile, and nanoseconds of
    an iteration of a loop of Python that does nothing, between the calls: what there is of a core,
    which a virtual machine may share with others."""

    low: float
    median: float
    high: float
    loop: float


def microseconds(case: HostCase, tensors: Tensors, call: Callable[[], torch.Tensor]) -> Times:
    """Host time of a call; of its backward alone where the case is one."""
    leaves, device = (tensors.q, tensors.k, tensors.v), tensors.q.device

    def backward(out: torch.Tensor) -> None:
        torch.autograd.grad(out, leaves, tensors.dout)

    found, loops = [], []
    for repetition in range(REPETITIONS + 3):
        outs = [call() for _ in range(CALLS)] if case.backward else []
        _synchronize(device)
        begin = time.perf_counter()
        if case.backward:
            for out in outs:
                backward(out)
        else:
            for _ in range(CALLS):
                call()
        seconds = (time.perf_counter() - begin) / CALLS
        _synchronize(device)
        if repetition >= 3:
            found.append(seconds * 1e6)
            loops.append(_loop_seconds() * 1e9)
    low, median, high = map(float, np.percentile(found, (20, 50, 80)))
    return Times(low, median, high, float(np.median(loops)))


def _loop_seconds(iterations: int = 2000) -> float:
    """Return the seconds of an iteration."""
    begin = time.perf_counter()
    for _ in range(iterations):
        pass
    return (time.perf_counter() - begin) / iterations


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """Make calls of CPU tensors launch nothing: an empty C function takes the place of a kernel's
    host code and of the driver, and nothing that of the simulator. For the parts of a call that
    need no GPU."""
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(
        ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value or 0
    )
    before = launch.host_function, plans.repeats, kv_cache._are_read_as_given
    launch.host_function = lambda compiled, device: function
    plans.repeats = lambda tensors: True
    # Lengths on a GPU are not looked at.
    kv_cache._are_read_as_given = lambda cache_seqlens: isinstance(cache_seqlens, torch.Tensor)
    plans.forget_plans()
    try:
        yield
    finally:
        launch.host_function, plans.repeats, kv_cache._are_read_as_given = before
        plans.forget_plans()


@contextlib.contextmanager
def unkept() -> Iterator[None]:
    """Inside, no plan is kept: each call makes its own."""
    repeats = plans.repeats
    plans.repeats = lambda tensors: False
    plans.forget_plans()
    try:
        yield
    finally:
        plans.repeats = repeats


#: Part of a first call -> functions whose time it is, less that of functions of other parts that
#: they call. What is in none is autograd's and Python's own, and the launch.
LONG_WAY = {
    "validation": (
        "fa4_hd256.call.forward_problem:Problem.describe",
        "fa4_hd256.call.backward_problem:BackwardProblem.describe",
        "fa4_hd256.call.forward_problem:Call.values",
        "fa4_hd256.call.cache_checks:check_cache_tensors", "fa4_hd256.run.append:check_contents",
    ),
    "plan": (
        "fa4_hd256.run.forward:plan_call", "fa4_hd256.run.backward:plan_backward",
        "fa4_hd256.run.append:plan_cache",
    ),
    "compiled kernel": ("fa4_hd256.run.execute:compile_kernel",),
    "packing": (
        "fa4_hd256.run.execute:PackedArguments.__init__", "fa4_hd256.run.execute:check_convention",
    ),
    "workspaces": ("fa4_hd256.run.execute:_maker",),
}  # fmt: skip


class _Clock:
    """Seconds of each part, without those of parts inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(LONG_WAY, 0.0)
        self._inner = [0.0]

    def timed(self, part: str, function: Callable) -> Callable:
        def run(*arguments: Any, **options: Any) -> Any:
            self._inner.append(0.0)
            begin = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                seconds = time.perf_counter() - begin
                self.seconds[part] += seconds - self._inner.pop()
                self._inner[-1] += seconds

        return run


def _place_of(name: str) -> tuple[Any, str]:
    """Return what holds a function of `LONG_WAY`, a module or a class, and its name there. Raises
    AttributeError if there is none."""
    module, _, path = name.partition(":")
    *outer, last = path.split(".")
    place: Any = importlib.import_module(module)
    for attribute in outer:
        place = getattr(place, attribute)
    getattr(place, last)
    return place, last


def parts_of_long_way(
    case: HostCase, tensors: Tensors, call: Callable[[], torch.Tensor]
) -> dict[str, float]:
    """Microseconds of each part of a call, or of its backward, that makes its plan, and "the rest"
    of it; timing itself takes some tenths of a microsecond for each function."""
    clock, undo = _Clock(), []
    whole = microseconds(case, tensors, call).median
    # The backward runs in a thread of autograd: one call at a time all the same.
    out = call() if case.backward else None
    try:
        for part, names in LONG_WAY.items():
            for name in names:
                place, last = _place_of(name)
                own = place.__dict__[last]
                function = own.__func__ if isinstance(own, classmethod) else own
                timed: Any = clock.timed(part, function)
                setattr(place, last, classmethod(timed) if isinstance(own, classmethod) else timed)
                undo.append((place, last, own))
        for _ in range(CALLS):
            if case.backward:
                assert out is not None
                torch.autograd.grad(
                    out, (tensors.q, tensors.k, tensors.v), tensors.dout, retain_graph=True
                )
            else:
                call()
    finally:
        for place, last, own in undo:
            setattr(place, last, own)
    found = {part: seconds / CALLS * 1e6 for part, seconds in clock.seconds.items()}
    return found | {"the rest": max(0.0, whole - sum(found.values()))}


def _each(function: Callable[[], Any], device: torch.device) -> float:
    """Median microseconds of a run of `function`."""
    found = []
    for _ in range(REPETITIONS):
        _synchronize(device)
        begin = time.perf_counter()
        for _ in range(CALLS):
            function()
        found.append((time.perf_counter() - begin) / CALLS * 1e6)
    _synchronize(device)
    return float(np.median(found))


def parts_of_repeated(
    case: HostCase, tensors: Tensors, call: Callable[[], torch.Tensor]
) -> dict[str, float]:
    """Microseconds of each part of a call, or of its backward, that finds its plan."""
    device = tensors.q.device
    with _noted() as (ran, asked):
        out = call()
        if case.backward:
            torch.autograd.grad(out, (tensors.q, tensors.k, tensors.v), tensors.dout)
    whole = microseconds(case, tensors, call).median
    with torch.no_grad():
        again = plans.find(*asked[-1])
        if again is None or again[0] is not ran[-1][1]:
            raise ValueError(f"{case.name} finds no plan")
        found = _parts_of_execution(ran[-1], asked[-1], device)
    return found | {"options, autograd, the rest": whole - sum(found.values())}


@contextlib.contextmanager
def _noted() -> Iterator[tuple[list[tuple], list[tuple]]]:
    """Note the arguments of `plans.run` and `plans.find` inside."""
    ran: list[tuple] = []
    asked: list[tuple] = []
    run, find = plans.run, plans.find

    def note_run(*given: Any) -> Any:
        ran.append(given)
        return run(*given)

    def note_find(*given: Any) -> Any:
        asked.append(given)
        return find(*given)

    plans.run, plans.find = note_run, note_find  # type: ignore
    try:
        yield ran, asked
    finally:
        plans.run, plans.find = run, find


def _parts_of_execution(ran: tuple, asked: tuple, device: torch.device) -> dict[str, float]:
    """Microseconds of each part. ran, asked: arguments of `plans.run` and `plans.find`."""
    kind, execution, given, addresses, *first = ran
    stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0
    guard = _each(lambda: plans.find(*asked), device)
    whole = _each(lambda: plans.run(kind, execution, given, addresses, *first), device)
    makers = execution._make_only_first if any(first) else execution._make
    made = [make() for make in makers]
    allocation = _each(lambda: [make() for make in makers], device)
    where = [*addresses, *(t.data_ptr() for t in made), *execution._later]
    found = made
    if execution._by_name:
        found = [*(t for t in given if t is not None), *made, *[None] * len(execution._later)]
    launches = _each(lambda: execution._run(where, stream, found), device)
    kept = [step for step in execution._free[-1] if hasattr(step, "_function")]

    def host_code() -> None:
        for step in kept:
            if hasattr(step, "_address"):
                step._function(step._address)

    code = _each(host_code, device)
    return {
        "guard": guard,
        "allocation": allocation,
        "addresses": launches - code,
        "host code, launch": code,
        "the rest of the execution": whole - allocation - launches,
    }
