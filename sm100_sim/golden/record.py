"""Record golden vectors on a GPU of compute capability 9.0, through the CUDA driver API.

Needs a CUDA driver, cuda-bindings and numpy. Cases run one after the other in a process of their
own: a kernel that faults or hangs costs its own vector and nobody else's.
"""

from __future__ import annotations

import ctypes
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..tensormap import TENSORMAP_BYTES, TensorMap
from .cases import KERNEL, TENSOR_MAPS, Case, all_cases, save
from .tensormaps import requests

#: Seconds a case may take, the start of its process included.
LIMIT = 60.0
_TYPES = {
    "u8": "UINT8", "u16": "UINT16", "u32": "UINT32", "s32": "INT32", "u64": "UINT64",
    "s64": "INT64", "f16": "FLOAT16", "f32": "FLOAT32", "f32.ftz": "FLOAT32_FTZ", "f64": "FLOAT64",
    "bf16": "BFLOAT16", "b4x16": "16U4_ALIGN8B",
}  # fmt: skip


class DriverError(RuntimeError):
    """A call of the CUDA driver API failed."""


class Gpu:
    """A context on device 0 and the few driver calls that a case needs."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.driver = driver
        self.call("cuInit", 0)
        self.device = self.call("cuDeviceGet", 0)
        context = self.call("cuDevicePrimaryCtxRetain", self.device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: Any) -> Any:
        """Result of a driver function; raises DriverError naming function and error."""
        status, *results = getattr(self.driver, name)(*arguments)
        if status != self.driver.CUresult.CUDA_SUCCESS:
            raise DriverError(f"{name}: {status.name}")
        return results[0] if len(results) == 1 else tuple(results)

    def description(self) -> dict[str, Any]:
        """Device name, compute capability and driver version."""
        attribute = self.driver.CUdevice_attribute
        major, minor = (
            self.call("cuDeviceGetAttribute", getattr(
                attribute, f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{which}"), self.device)
            for which in ("MAJOR", "MINOR")
        )
        name = self.call("cuDeviceGetName", 100, self.device)
        return {
            "device": name.split(b"\0")[0].decode(),
            "capability": f"{major}.{minor}",
            "driver_cuda": self.call("cuDriverGetVersion"),
        }

    def encode(self, t: TensorMap) -> bytes:
        """The driver's 128 bytes for a tensor map; raises DriverError if it refuses."""
        d = self.driver
        kind = f"T{_TYPES[t.dtype]}" if t.tf32 else _TYPES[t.dtype]
        swizzle = f"{t.swizzle}B" if t.swizzle else "NONE"
        promotion = f"L2_{t.l2_promotion}B" if t.l2_promotion else "NONE"
        fill = "NAN_REQUEST_ZERO_FMA" if t.nan_fill else "NONE"
        interleave = f"{t.interleave}B" if t.interleave else "NONE"
        # The driver reads rank - 1 strides; the array must not be empty.
        strides = t.strides or (16,)
        encoded = self.call(
            "cuTensorMapEncodeTiled",
            getattr(d.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kind}"),
            t.rank, t.address,
            [d.cuuint64_t(n) for n in t.sizes], [d.cuuint64_t(n) for n in strides],
            [d.cuuint32_t(n) for n in t.box], [d.cuuint32_t(n) for n in t.element_strides],
            getattr(d.CUtensorMapInterleave, f"CU_TENSOR_MAP_INTERLEAVE_{interleave}"),
            getattr(d.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
            getattr(d.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{promotion}"),
            getattr(d.CUtensorMapFloatOOBfill, f"CU_TENSOR_MAP_FLOAT_OOB_FILL_{fill}"),
        )  # fmt: skip
        return ctypes.string_at(int(encoded.getPtr()), TENSORMAP_BYTES)

    def run(self, case: Case) -> list[np.ndarray]:
        """Outputs of a case. After an error the process must end: nothing is freed."""
        module = self.call("cuModuleLoadData", case.ptx.encode() + b"\0")
        function = self.call("cuModuleGetFunction", module, KERNEL.encode())
        buffers = []
        for array in (*case.inputs, *case.outputs):
            buffers.append(self.call("cuMemAlloc", max(array.nbytes, 16)))
            host = np.ascontiguousarray(array)
            self.call("cuMemcpyHtoD", buffers[-1], host.ctypes.data, host.nbytes)
        self.launch(function, case, [int(buffer) for buffer in buffers])
        self.call("cuCtxSynchronize")
        results = []
        for buffer, array in zip(buffers[len(case.inputs):], case.outputs, strict=True):
            results.append(np.empty_like(array))
            self.call("cuMemcpyDtoH", results[-1].ctypes.data, buffer, array.nbytes)
        for buffer in buffers:
            self.call("cuMemFree", buffer)
        self.call("cuModuleUnload", module)
        return results

    def launch(self, function: Any, case: Case, addresses: list[int], stream: Any = 0) -> None:
        """Start a case whose buffers lie at these device addresses."""
        values: list[Any] = [ctypes.c_uint64(address) for address in addresses]
        for index, tensor_map in case.tensor_maps:
            placed = replace(tensor_map, address=addresses[index] + tensor_map.address)
            values.append(ctypes.create_string_buffer(self.encode(placed), TENSORMAP_BYTES))
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        self.call("cuLaunchKernel", function, case.grid, 1, 1, case.block, 1, 1, 0, stream,
                  ctypes.addressof(pointers), 0)


def _work(connection: Any) -> None:
    """A worker: receive case numbers, send back ("done", outputs) or ("failed", text)."""
    gpu = None
    while (number := connection.recv()) is not None:
        try:
            gpu = gpu or Gpu()
            connection.send(("done", gpu.run(all_cases()[number])))
        except Exception as error:  # reported by the parent under the case's name
            connection.send(("failed", f"{type(error).__name__}: {error}"))


class _Worker:
    """A process that runs cases; `run` replaces it after any failure."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._process = None

    def _start(self) -> None:
        self._connection, other = self._context.Pipe()
        self._process = self._context.Process(target=_work, args=(other,), daemon=True)
        self._process.start()
        other.close()

    def run(self, number: int) -> tuple[str, Any]:
        """("done", outputs) or ("failed", text)."""
        if self._process is None:
            self._start()
        try:
            self._connection.send(number)
            if self._connection.poll(LIMIT):
                outcome = self._connection.recv()
            else:
                outcome = ("failed", f"no result within {LIMIT:.0f} s")
        except (EOFError, OSError):
            outcome = ("failed", "its process ended")
        if outcome[0] == "failed":
            # After a fault a context answers every call with the same error.
            self.close()
        return outcome

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def record(directory: Path, only: tuple[str, ...] = ()) -> dict[str, str]:
    """Record into `directory` all groups, or `only` some; returns failures, case name -> reason.

    Raises DriverError without a usable GPU and RuntimeError on one that is not of compute
    capability 9.0.
    """
    gpu = Gpu()
    manifest = gpu.description()
    print(manifest, flush=True)
    if manifest["capability"] != "9.0":
        raise RuntimeError(
            f"{manifest['device']} has compute capability {manifest['capability']}; the kernels "
            "are for sm_90a, so record on a GPU of compute capability 9.0 (H100, H200)"
        )
    directory.mkdir(parents=True, exist_ok=True)
    if not only:
        _record_tensor_maps(gpu, directory)
    worker = _Worker()
    results: dict[str, list[np.ndarray]] = {}
    failed: dict[str, str] = {}
    faults: dict[str, str] = {}
    cases = all_cases()
    for number, case in enumerate(cases):
        if only and case.group not in only:
            continue
        state, outcome = worker.run(number)
        if case.faults and state == "failed":
            faults[case.name], results[case.name] = outcome, []
        elif case.faults or state == "failed":
            failed[case.name] = "no error" if case.faults else outcome
            print(f"{case.name}: {failed[case.name]}", flush=True)
        else:
            results[case.name] = outcome
    worker.close()
    save(directory, results, {**manifest, "failed": failed, "faults": faults}, only)
    print(f"{len(results)} of {len(cases)} cases recorded in {directory}", flush=True)
    return failed


def _record_tensor_maps(gpu: Gpu, directory: Path) -> None:
    """Descriptors of all requests, uint8 (n, 128), zeros where the driver refused."""
    found = np.zeros((len(requests()), TENSORMAP_BYTES), np.uint8)
    accepted = np.zeros(len(found), bool)
    for i, tensor_map in enumerate(requests()):
        try:
            found[i] = np.frombuffer(gpu.encode(tensor_map), np.uint8)
            accepted[i] = True
        except (DriverError, OverflowError) as error:
            print(f"tensor map {i}: {error}", flush=True)
    np.savez_compressed(directory / TENSOR_MAPS, descriptors=found, accepted=accepted)
    print(f"{accepted.sum()} of {len(found)} tensor maps encoded", flush=True)
