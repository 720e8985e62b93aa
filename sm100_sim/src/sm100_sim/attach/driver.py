"""cuda.bindings as the simulated device would answer: the calls of CuTe DSL and its scripts.

Functions follow the convention of cuda.bindings: a tuple whose first element is the status. What
is not listed here keeps its own behaviour, an error without a driver.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from typing import Any

import cuda.bindings.driver as driver
import cuda.bindings.runtime as runtime

from sm100_sim import devices

from .patch import Patch

CUDA_VERSION = 13000
_allocations: dict[int, Any] = {}
_events: dict[int, float] = {}


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
        (kind * int(count)).from_address(int(pointer))[:] = [int(value)] * int(count)

    return fill


def _copy(target: Any, source: Any, nbytes: int, *_: Any) -> None:
    ctypes.memmove(int(target), int(source), int(nbytes))


def _record(event: Any, *_: Any) -> None:
    _events[int(event)] = time.perf_counter()


def _elapsed(start: Any, end: Any) -> float:
    return 1e3 * (_events[int(end)] - _events[int(start)])


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
    calls = dict.fromkeys((
        "cuInit", "cuCtxSynchronize", "cuStreamSynchronize", "cuStreamDestroy", "cuEventDestroy",
        "cuEventSynchronize", "cuCtxSetCurrent", "cuCtxDestroy", "cuDevicePrimaryCtxRelease",
        "cuLibraryUnload", "cuStreamWaitEvent"), _nothing)  # fmt: skip
    context = driver.CUcontext(1)
    return calls | {
        "cuDeviceGetCount": _always(1), "cuDeviceGet": lambda number: driver.CUdevice(number),
        "cuCtxGetDevice": _always(driver.CUdevice(0)), "cuDriverGetVersion": _always(CUDA_VERSION),
        "cuDeviceGetName": lambda *_: devices.current().product.encode(),
        "cuDeviceTotalMem": lambda *_: devices.current().memory_bytes,
        "cuDeviceGetAttribute": _device_attribute, "cuCtxGetCurrent": _always(context),
        "cuCtxCreate": _always(context), "cuDevicePrimaryCtxRetain": _always(context),
        "cuStreamCreate": _always(driver.CUstream(0)), "cuStreamQuery": _nothing,
        "cuEventCreate": _new_event(driver.CUevent), "cuEventRecord": _record,
        "cuEventElapsedTime": _elapsed,
        "cuMemAlloc": lambda n: driver.CUdeviceptr(_allocate(n)), "cuMemFree": _free,
        "cuMemsetD8": _fill(1), "cuMemsetD16": _fill(2), "cuMemsetD32": _fill(4),
        "cuMemsetD8Async": _fill(1), "cuMemsetD32Async": _fill(4),
        "cuMemcpyHtoD": _copy, "cuMemcpyDtoH": _copy, "cuMemcpyDtoD": _copy,
    }  # fmt: skip


def _runtime_calls() -> dict[str, Callable[..., Any]]:
    calls = dict.fromkeys((
        "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaStreamDestroy", "cudaSetDevice",
        "cudaEventDestroy", "cudaEventSynchronize", "cudaGetLastError", "cudaPeekAtLastError",
        "cudaLibraryUnload"), _nothing)  # fmt: skip
    return calls | {
        "cudaGetDeviceCount": _always(1), "cudaGetDevice": _always(0),
        "cudaRuntimeGetVersion": _always(CUDA_VERSION), "cudaDriverGetVersion":
        _always(CUDA_VERSION), "cudaDeviceGetAttribute": _device_attribute,
        "cudaStreamCreate": _always(runtime.cudaStream_t(0)),
        "cudaEventCreate": _new_event(runtime.cudaEvent_t), "cudaEventRecord": _record,
        "cudaEventElapsedTime": _elapsed, "cudaMalloc": _allocate, "cudaFree": _free,
        "cudaMemset": lambda pointer, value, n: _fill(1)(pointer, value, n),
        "cudaMemcpy": _copy,
    }  # fmt: skip


def _answering(function: Callable[..., Any], success: Any) -> Callable[..., tuple]:
    def call(*args: Any) -> tuple:
        result = function(*args)
        if result is None:
            return (success,)
        return (success, *result) if isinstance(result, tuple) else (success, result)

    return call


def patches() -> Iterator[Patch]:
    """Yield the patches that make cuda.bindings answer as the simulated device."""
    for module, calls, success in (
        (driver, _driver_calls(), driver.CUresult.CUDA_SUCCESS),
        (runtime, _runtime_calls(), runtime.cudaError_t.cudaSuccess),
    ):
        for name, function in calls.items():
            yield Patch(module, name, _answering(function, success))
