"""Host time of eager calls: what the host does before a call returns.

A call's time is that between its start and its return, with the GPU idle before each repetition and
so few calls in it that no queue fills up. A virtual machine may share cores with others, so the
process stays on those that are quietest.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.measure.providers import Inputs, synchronize
from bench.suite import Case
from fa4_hd256 import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    kv_cache,
    plans,
)
from fa4_hd256.kernels.limits import HEAD_DIM
from fa4_hd256.run import execute, launch
from fa4_hd256.run.compile import InProcess

PAGE_ROWS = 16

#: Calls of a repetition, few enough for every queue of launches, and repetitions.
CALLS, REPETITIONS = 20, 40
#: Repetitions between two choices of cores, and cores: the thread of a backward has its own.
BETWEEN_CHOICES, CORES = 8, 2


@dataclass(frozen=True)
class HostCase(Case):
    """A causal call of small tensors, whose kernels take less time than the host.

    name: in tables. grad: whether gradients are requested; backward: whether it alone is timed.
    Keys in pages are for `flash_attn_with_kvcache`. appends: the last of them are new rows.
    rotates: with rotary embedding of these and of the queries. num_splits: 0 for the default.
    """

    name: str = field(kw_only=True)
    backward: bool = False
    grad: bool = False
    appends: bool = False
    rotates: bool = False
    num_splits: int = 0

    def of_few_rows(self, rows: int) -> HostCase:
        """Return a case with fewer rows where results take time to be filled; decoding steps are
        unchanged."""
        if self.seqlen_q == 1:
            return self
        return replace(self, lengths=tuple((min(q, rows), min(k, rows)) for q, k in self.lengths))


def _case(
    name: str, *lengths: tuple[int, int], heads: tuple[int, int] = (16, 16), **more: Any
) -> HostCase:
    return HostCase("host", lengths, *heads, True, name=name, **more)


_GRADIENTS: dict[str, Any] = {"grad": True, "backward": True}
_DECODE = ((1, 1024),) * 4
CASES = (
    _case("forward, no gradients", (256, 256)),
    _case("forward, gradients wanted", (256, 256), grad=True),
    _case("backward", (256, 256), **_GRADIENTS),
    _case("backward, heads 16/2", (256, 256), heads=(16, 2), **_GRADIENTS),
    _case("packed forward", (128, 128), (256, 256), packed=True),
    _case("packed backward", (128, 128), (256, 256), packed=True, **_GRADIENTS),
    _case("decode", *_DECODE, heads=(16, 2)),
    _case("decode, KV splits", (1, 4096), heads=(16, 2), num_splits=4),
    *(
        _case(f"decode, {name}", *_DECODE, heads=(16, 2), page_size=PAGE_ROWS, **more)
        for name, more in (
            ("pages", {}), ("new rows in pages", {"appends": True}),
            ("rotated new rows", {"appends": True, "rotates": True}),
        )
    ),
)  # fmt: skip


def inputs_of(case: HostCase, device: torch.device) -> Inputs:
    """Return the tensors of a case, in bfloat16."""
    inputs = Inputs.random(case, device, torch.bfloat16)
    for leaf in inputs.leaves:
        leaf.requires_grad_(case.grad)
    return inputs


def our_call(case: HostCase, inputs: Inputs) -> Callable[[], torch.Tensor]:
    """Return a function that runs the forward, and does nothing else on the host. Over pages the
    last rows of each sequence are written again if the case appends."""
    options: dict[str, Any] = {"causal": case.causal, "num_splits": case.num_splits}
    function: Callable[..., Any] = flash_attn_func
    given: tuple[torch.Tensor, ...] = inputs.leaves
    if inputs.cu_seqlens is not None:
        function, options = flash_attn_varlen_func, options | inputs.sequences
    if (pages := inputs.pages) is not None:
        function, given = flash_attn_with_kvcache, (inputs.q, pages.k, pages.v)
        options |= {"cache_seqlens": pages.lengths, "page_table": pages.table}
        if case.appends:
            given += tuple(t[:, -case.seqlen_q :].clone() for t in (inputs.k, inputs.v))
            options["cache_seqlens"] = pages.lengths - case.seqlen_q
        if case.rotates:
            tables = torch.randn(2, case.seqlen_k, HEAD_DIM // 2, device=inputs.k.device)
            options |= dict(zip(("rotary_cos", "rotary_sin"), tables, strict=True))
    return lambda: function(*given, **options)


class _Empty(torch.autograd.Function):
    """Computes nothing: what is left of a backward is autograd's engine and its thread."""

    @staticmethod
    def forward(ctx: Any, found: tuple[torch.Tensor, ...], *leaves: torch.Tensor) -> torch.Tensor:
        """Return the first of found, out; the others are the gradients of leaves."""
        out, *ctx.gradients = found
        ctx.save_for_backward(*leaves, out)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Read what was saved, as a backward does."""
        assert ctx.saved_tensors
        return None, *ctx.gradients


def empty_call(inputs: Inputs) -> Callable[[], torch.Tensor]:
    """Return a function whose result has a backward that launches nothing."""
    found = torch.empty_like(inputs.q), *map(torch.empty_like, inputs.leaves)
    return lambda: _Empty.apply(tuple(t.detach() for t in found), *inputs.leaves)


class Times(NamedTuple):
    """Microseconds of a call; low and high are the 20th and the 80th percentile, and nanoseconds of
    an iteration of a loop of Python that does nothing, between the calls: what there is of a core,
    which a virtual machine may share with others."""

    low: float
    median: float
    high: float
    loop: float


def microseconds(case: HostCase, inputs: Inputs, call: Callable[[], torch.Tensor]) -> Times:
    """Return the host time of a call; of its backward alone where the case is one."""
    found, loops = [], []
    with quiet_cores() as choose_cores:
        for repetition in range(REPETITIONS + 3):
            if repetition % BETWEEN_CHOICES == 0:
                choose_cores()
                call()
            seconds = _seconds(case, inputs, call)
            if repetition >= 3:
                found.append(seconds / CALLS * 1e6)
                loops.append(_loop_seconds() * 1e9)
    low, median, high = map(float, np.percentile(found, (20, 50, 80)))
    return Times(low, median, high, float(np.median(loops)))


def _seconds(case: HostCase, inputs: Inputs, call: Callable[[], torch.Tensor]) -> float:
    device = inputs.q.device
    outs = [call() for _ in range(CALLS)] if case.backward else []
    synchronize(device)
    begin = time.perf_counter()
    if case.backward:
        for out in outs:
            torch.autograd.grad(out, inputs.leaves, inputs.dout)
    else:
        for _ in range(CALLS):
            call()
    seconds = time.perf_counter() - begin
    synchronize(device)
    return seconds


def _loop_seconds(iterations: int = 2000) -> float:
    begin = time.perf_counter()
    for _ in range(iterations):
        pass
    return (time.perf_counter() - begin) / iterations


@contextlib.contextmanager
def quiet_cores() -> Iterator[Callable[[], None]]:
    """Yield a function that keeps all threads of this process on the cores where an empty loop is
    shortest now. It does nothing where the system has no affinity of threads."""
    if not hasattr(os, "sched_setaffinity"):
        yield lambda: None
        return
    allowed = os.sched_getaffinity(0)

    def choose() -> None:
        loops = {}
        for core in allowed:
            os.sched_setaffinity(0, {core})
            loops[core] = min(_loop_seconds() for _ in range(5))
        _keep_on(sorted(allowed, key=lambda core: loops[core])[:CORES])

    try:
        yield choose
    finally:
        _keep_on(allowed)


def _keep_on(cores: Collection[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        # A thread may have ended since.
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """Make calls of CPU tensors launch nothing: an empty C function takes the place of a kernel's
    host code and of the driver, and nothing that of the simulator and of the compiler. For the
    parts of a call that need no GPU."""
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(
        ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value or 0
    )
    # Its arguments pass as checked.
    uncompiled: Any = SimpleNamespace(in_process=InProcess(is_checked=True))
    before = (
        launch.host_function, execute.compile_kernel, plans.repeats, kv_cache._are_read_as_given
    )  # fmt: skip
    launch.host_function = lambda compiled, device: function
    execute.compile_kernel = lambda spec: uncompiled
    plans.repeats = lambda tensors: True
    # Lengths on a GPU are not looked at.
    kv_cache._are_read_as_given = lambda cache_seqlens: isinstance(cache_seqlens, torch.Tensor)
    plans.forget_plans()
    try:
        yield
    finally:
        (launch.host_function, execute.compile_kernel, plans.repeats,
         kv_cache._are_read_as_given) = before  # fmt: skip
        plans.forget_plans()
