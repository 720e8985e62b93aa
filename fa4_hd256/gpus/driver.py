"""Queries of the CUDA driver for facts of a GPU that PyTorch does not report."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import cuda.bindings.driver as cuda

CTAS_OF_PAIR = 2

# A kernel that does nothing, which the driver compiles. What fits on an SM depends on the shared
# memory of the launch.
_PROBE = b".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry probe() { ret; }\n\0"


class DriverError(RuntimeError):
    """Failure of a call of the driver."""


def _checked(name: str, *arguments: Any) -> Any:
    try:
        status, *results = getattr(cuda, name)(*arguments)
    except RuntimeError as error:  # no driver at all
        raise DriverError(f"{name}: {error}") from error
    if status != cuda.CUresult.CUDA_SUCCESS:
        raise DriverError(f"{name}: {status.name}")
    return results[0] if results else None


@contextlib.contextmanager
def _context(index: int) -> Iterator[Any]:
    """Make the device's primary context current in this thread."""
    _checked("cuInit", 0)
    device = _checked("cuDeviceGet", index)
    _checked("cuCtxPushCurrent", _checked("cuDevicePrimaryCtxRetain", device))
    try:
        yield device
    finally:
        _checked("cuCtxPopCurrent")
        _checked("cuDevicePrimaryCtxRelease", device)


def _attribute(device: Any, name: str) -> int:
    number = getattr(cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return _checked("cuDeviceGetAttribute", number, device)


def resident_pairs(index: int) -> int:
    """Return how many CTA pairs a device runs at once if each CTA takes all shared memory of an SM.
    index: among the process's CUDA devices. Limits of the context (MPS) count. CUDA driver API,
    cuOccupancyMaxActiveClusters. Raises DriverError."""
    with _context(index) as device:
        module = _checked("cuModuleLoadData", _PROBE)
        try:
            probe = _checked("cuModuleGetFunction", module, b"probe")
            shared = _attribute(device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
            kind = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked("cuFuncSetAttribute", probe, kind, shared)
            return _checked("cuOccupancyMaxActiveClusters", probe, _launch_of_pair(shared))
        finally:
            _checked("cuModuleUnload", module)


def _launch_of_pair(shared: int) -> Any:
    pair = cuda.CUlaunchAttribute()
    pair.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    value = cuda.CUlaunchAttributeValue()
    value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = CTAS_OF_PAIR, 1, 1
    pair.value = value
    config = cuda.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = CTAS_OF_PAIR, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 32, 1, 1
    config.sharedMemBytes, config.numAttrs, config.attrs = shared, 1, [pair]
    return config


def hbm_bytes_per_second(index: int) -> float:
    """Return the memory's bytes per second, 0 if the driver tells no clock. Raises DriverError."""
    with _context(index) as device:
        kilohertz = _attribute(device, "MEMORY_CLOCK_RATE")
        return 2e3 * kilohertz * _attribute(device, "GLOBAL_MEMORY_BUS_WIDTH") / 8
