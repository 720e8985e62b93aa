"""cuda.bindings as the simulated device would answer: the calls of CuTe DSL and its scripts.

Functions follow the convention of cuda.bindings: a tuple whose first element is the status. What
is not listed here raises NotImplementedError if it has a stream or a graph, and keeps its own
behaviour otherwise, an error without a driver.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import cuda.bindings.driver as driver
import cuda.bindings.runtime as runtime
import numpy as np

from sm100_sim import devices

from . import driver_graphs, graphs, streams
from .patch import Patch

CUDA_VERSION = 13000
_allocations: dict[int, Any] = {}
#: Event -> when it was recorded; None where that was in a capture.
_events: dict[int, float | None] = {}
#: Functions that have a stream or a graph, by their first lines of documentation or their names; a
#: launch may have its stream in a structure.
_WITH_STREAM = re.compile(r"\b(h?stream|h?graph(exec)?|hnode|node)\b", re.IGNORECASE)
_LAUNCHES = re.compile(r"cu(da)?Launch")
_OF_GRAPHS = re.compile(r"cu(da)?(Graph(?!ics)|Stream\w*Capture|ThreadExchangeStreamCapture)")


def allocations() -> Iterator[tuple[int, int, str]]:
    """Yield (start, end, name) of the memory that cuMemAlloc and cudaMalloc gave out."""
    for start, buffer in _allocations.items():
        yield start, start + len(buffer), "memory allocated through cuda.bindings"


def _allocate(nbytes: int, *_: Any) -> int:
    # Allocations of the driver start at multiples of 256 bytes.
    size = max(int(nbytes), 1)
    whole = (ctypes.c_uint8 * (size + 255))()
    buffer = (ctypes.c_uint8 * size).from_buffer(whole, -ctypes.addressof(whole) % 256)
    _allocations[ctypes.addressof(buffer)] = buffer
    return ctypes.addressof(buffer)


def _free(pointer: Any, *_: Any) -> None:
    _allocations.pop(int(pointer), None)


def _device_attribute(attribute: Any, _device: Any = 0) -> int:
    number, attributes = int(attribute), devices.current().attributes
    if number not in attributes:
        raise NotImplementedError(f"CUDA device attribute {attribute!r} has no value in devices.py")
    return attributes[number]


def _fill(width: int) -> Callable[..., None]:
    kind = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32}[width]

    def fill(pointer: Any, value: int, count: int, *_: Any) -> None:
        # As an array: a benchmark fills twice the L2 cache to empty it.
        memory = np.ctypeslib.as_array((kind * int(count)).from_address(int(pointer)))
        memory.fill(int(value) % (1 << 8 * width))

    return fill


def _copy(target: Any, source: Any, nbytes: int, *_: Any) -> None:
    ctypes.memmove(int(target), int(source), int(nbytes))


def _in_order(function: Callable[..., None], place: int) -> Callable[..., None]:
    """A copy or fill on the stream of argument `place`: in its capture it is left to the replay,
    and memory that was allocated here stays as long as the graph."""

    def call(*args: Any) -> None:
        if graphs.takes(streams.handle(args[place] if len(args) > place else None)):
            graphs.record(lambda: function(*args), (args, list(_allocations.values())))
        else:
            function(*args)

    return call


def _record(event: Any, stream: Any = None, *_: Any) -> None:
    taken = graphs.takes(streams.handle(stream))
    _events[int(event)] = None if taken else time.perf_counter()


def _time(name: str, event: Any) -> float:
    time_of = _events[int(event)]
    if time_of is None:
        raise RuntimeError(f"{name}: the event was recorded in a capture, and has no time")
    return time_of


def _waits_for_event(name: str) -> Callable[..., None]:
    """A function by which the host waits for an event, or queries it: it has happened."""

    def wait(event: Any, *_: Any) -> None:
        _time(name, event)

    return wait


def _elapsed(name: str) -> Callable[..., float]:
    return lambda start, end: 1e3 * (_time(name, end) - _time(name, start))


def _wait_event(name: str) -> Callable[..., None]:
    def wait(stream: Any, event: Any, *_: Any) -> None:
        time_of = _events[int(event)]
        graphs.refuse_joining(name, streams.handle(stream), time_of is None, time_of != 0.0)

    return wait


def _synchronize(name: str) -> Callable[..., None]:
    return lambda stream=None: graphs.refuse_waiting(name, streams.handle(stream))


def _synchronize_all(name: str) -> Callable[..., None]:
    return lambda *_: graphs.refuse_waiting(name)


def _new_event(kind: type) -> Callable[..., Any]:
    def create(*_: Any) -> Any:
        number = len(_events) + 1
        _events[number] = 0.0
        return kind(number)

    return create


def _nothing(*_: Any) -> None:
    return None


def _always(*values: Any) -> Callable[..., Any]:
    return lambda *_: values if len(values) > 1 else values[0]


def _driver_calls() -> dict[str, Callable[..., Any]]:
    calls: dict[str, Callable[..., Any]] = dict.fromkeys((
        "cuInit", "cuStreamDestroy", "cuEventDestroy", "cuCtxSetCurrent", "cuCtxDestroy",
        "cuDevicePrimaryCtxRelease", "cuLibraryUnload"), _nothing)  # fmt: skip
    context = driver.CUcontext(1)
    return calls | {
        "cuDeviceGetCount": _always(1), "cuDeviceGet": lambda number: driver.CUdevice(number),
        "cuCtxGetDevice": _always(driver.CUdevice(0)), "cuDriverGetVersion": _always(CUDA_VERSION),
        "cuDeviceGetName": lambda *_: devices.current().product.encode(),
        "cuDeviceTotalMem": lambda *_: devices.current().memory_bytes,
        "cuDeviceGetAttribute": _device_attribute, "cuCtxGetCurrent": _always(context),
        "cuCtxCreate": _always(context), "cuDevicePrimaryCtxRetain": _always(context),
        "cuEventCreate": _new_event(driver.CUevent),
        "cuMemAlloc": lambda n: driver.CUdeviceptr(_allocate(n)), "cuMemFree": _free,
        "cuMemsetD8": _fill(1), "cuMemsetD16": _fill(2), "cuMemsetD32": _fill(4),
        "cuMemsetD8Async": _in_order(_fill(1), 3), "cuMemsetD16Async": _in_order(_fill(2), 3),
        "cuMemsetD32Async": _in_order(_fill(4), 3),
        "cuMemcpyHtoD": _copy, "cuMemcpyDtoH": _copy, "cuMemcpyDtoD": _copy,
        "cuMemcpyHtoDAsync": _in_order(_copy, 3), "cuMemcpyDtoHAsync": _in_order(_copy, 3),
        "cuMemcpyDtoDAsync": _in_order(_copy, 3),
    } | _stream_calls("cu", "cuCtxSynchronize", driver.CUstream) | driver_graphs.calls(
        "cu", driver.CUgraph, driver.CUgraphExec, driver.CUstreamCaptureStatus)  # fmt: skip


def _stream_calls(prefix: str, all_streams: str, stream: type) -> dict[str, Callable[..., Any]]:
    """Return what makes streams and waits for them, by name.

    prefix: of the names in this module. all_streams: the function that waits for all of them.
    """
    query, wait = f"{prefix}StreamQuery", f"{prefix}StreamSynchronize"
    event, asked = f"{prefix}EventSynchronize", f"{prefix}EventQuery"
    waits, elapsed = f"{prefix}StreamWaitEvent", f"{prefix}EventElapsedTime"
    return dict.fromkeys(
        (f"{prefix}StreamCreate", f"{prefix}StreamCreateWithPriority"),
        lambda *_: stream(streams.new()),
    ) | {
        query: _synchronize(query), wait: _synchronize(wait),
        event: _waits_for_event(event), asked: _waits_for_event(asked),
        waits: _wait_event(waits), elapsed: _elapsed(elapsed),
        f"{prefix}EventRecord": _record, all_streams: _synchronize_all(all_streams),
    }  # fmt: skip


def _runtime_calls() -> dict[str, Callable[..., Any]]:
    calls: dict[str, Callable[..., Any]] = dict.fromkeys((
        "cudaStreamDestroy", "cudaSetDevice", "cudaEventDestroy", "cudaGetLastError",
        "cudaPeekAtLastError", "cudaLibraryUnload"), _nothing)  # fmt: skip
    event, stream = _new_event(runtime.cudaEvent_t), runtime.cudaStream_t
    return calls | {
        "cudaGetDeviceCount": _always(1), "cudaGetDevice": _always(0),
        "cudaRuntimeGetVersion": _always(CUDA_VERSION), "cudaDriverGetVersion":
        _always(CUDA_VERSION), "cudaDeviceGetAttribute": _device_attribute,
        "cudaStreamCreateWithFlags": lambda *_: stream(streams.new()),
        "cudaEventCreate": event, "cudaEventCreateWithFlags": event,
        "cudaMalloc": _allocate, "cudaFree": _free,
        "cudaMemset": lambda pointer, value, n: _fill(1)(pointer, value, n),
        "cudaMemsetAsync": _in_order(_fill(1), 3),
        "cudaMemcpy": _copy, "cudaMemcpyAsync": _in_order(_copy, 4),
    } | _stream_calls("cuda", "cudaDeviceSynchronize", stream) | driver_graphs.calls(
        "cuda", runtime.cudaGraph_t, runtime.cudaGraphExec_t,
        runtime.cudaStreamCaptureStatus)  # fmt: skip


def _answering(function: Callable[..., Any], success: Any) -> Callable[..., tuple]:
    def call(*args: Any) -> tuple:
        result = function(*args)
        if result is None:
            return (success,)
        return (success, *result) if isinstance(result, tuple) else (success, result)

    return call


def _refused(module: Any, calls: dict[str, Any]) -> Iterator[str]:
    """Yield the names of functions of `module` that have a stream or a graph and are not simulated.

    A function left as it is would hand the handles of simulated streams to a driver.
    """
    for name, function in vars(module).items():
        if name.startswith("cu") and callable(function) and not isinstance(function, type):
            named = _OF_GRAPHS.match(name) or _LAUNCHES.match(name)
            signature = (function.__doc__ or "").partition("\n")[0]
            if name not in calls and (named or _WITH_STREAM.search(signature)):
                yield name


def _refusal(name: str, calls: dict[str, Any]) -> Callable[..., Any]:
    simulated = ", ".join(sorted(filter(_OF_GRAPHS.match, calls)))

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"{name} is not simulated; of CUDA graphs the simulator has {simulated}"
        )

    return refuse


def patches() -> Iterator[Patch]:
    """Yield the patches that make cuda.bindings answer as the simulated device."""
    for module, calls, success in (
        (driver, _driver_calls(), driver.CUresult.CUDA_SUCCESS),
        (runtime, _runtime_calls(), runtime.cudaError_t.cudaSuccess),
    ):
        for name, function in calls.items():
            yield Patch(module, name, _answering(function, success))
        for name in _refused(module, calls):
            yield Patch(module, name, _refusal(name, calls))
