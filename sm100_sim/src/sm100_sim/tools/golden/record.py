"""Record golden vectors on a GPU of compute capability 9.0, through the CUDA driver API.

Needs a CUDA driver, cuda-bindings and numpy. Cases run one after the other in a process of their
own: a kernel that faults or hangs costs its own vector and nobody else's. Of a case with a rule
the fault or the hang is the result.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sm100_sim.errors import MissingExtra
from sm100_sim.interrupt import starting_workers
from sm100_sim.state.tensormap import TENSORMAP_BYTES, TensorMap

from .cases import KERNEL, TENSOR_MAPS, Case, Vectors
from .collection import all_cases, groups, save
from .instructions.tensormaps import requests

#: Seconds a case may take, the start of its process included.
LIMIT = 60.0
#: Seconds after which a launch that tests a rule counts as hanging; the longest takes some 20 ms.
HANG_AFTER = 0.7
#: Processes that wait with a context, so that a case need not wait for one.
SPARES = 3
_TYPES = {
    "u8": "UINT8", "u16": "UINT16", "u32": "UINT32", "s32": "INT32", "u64": "UINT64",
    "s64": "INT64", "f16": "FLOAT16", "f32": "FLOAT32", "f32.ftz": "FLOAT32_FTZ", "f64": "FLOAT64",
    "bf16": "BFLOAT16", "b4x16": "16U4_ALIGN8B",
}  # fmt: skip


class DriverError(RuntimeError):
    """A call of the CUDA driver API failed. error: its name, CUDA_ERROR_..."""

    error = ""


class Gpu:
    """A context on device 0 and the few driver calls that a case needs."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ModuleNotFoundError as error:
            raise MissingExtra("the driver of a GPU", "gpu", error) from error

        self.driver = driver
        self.call("cuInit", 0)
        self.device = self.call("cuDeviceGet", 0)
        context = self.call("cuDevicePrimaryCtxRetain", self.device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: Any) -> Any:
        """Result of a driver function; raises DriverError naming function and error."""
        status, *results = getattr(self.driver, name)(*arguments)
        if status != self.driver.CUresult.CUDA_SUCCESS:
            failure = DriverError(f"{name}: {status.name}")
            failure.error = status.name
            raise failure
        return results[0] if len(results) == 1 else tuple(results)

    def description(self) -> dict[str, Any]:
        """Device name, compute capability and driver version."""
        attribute = self.driver.CUdevice_attribute
        major, minor = (
            self.call(
                "cuDeviceGetAttribute",
                getattr(attribute, f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{which}"),
                self.device,
            )
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

    def load(self, case: Case) -> tuple[Any, Any]:
        """Return (module, function) of a case."""
        module = self.call("cuModuleLoadData", case.ptx.encode() + b"\0")
        function = self.call("cuModuleGetFunction", module, KERNEL.encode())
        if case.dynamic_smem:
            attribute = self.driver.CUfunction_attribute
            self.call(
                "cuFuncSetAttribute",
                function,
                attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                case.dynamic_smem,
            )
        return module, function

    def registers(self, function: Any) -> int:
        """Registers that each thread of a function is launched with."""
        return self.call(
            "cuFuncGetAttribute",
            self.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS,
            function,
        )

    def upload(self, case: Case) -> list[Any]:
        """Buffers of a case in device memory, filled."""
        buffers = []
        for array in (*case.inputs, *case.outputs):
            buffers.append(self.call("cuMemAlloc", max(array.nbytes, 16)))
            host = np.ascontiguousarray(array)
            self.call("cuMemcpyHtoD", buffers[-1], host.ctypes.data, host.nbytes)
        # A copy from pageable memory may still be under way when it returns.
        self.call("cuCtxSynchronize")
        return buffers

    def run(self, case: Case) -> list[np.ndarray]:
        """Outputs of a case. After an error the process must end: nothing is freed."""
        module, function = self.load(case)
        buffers = self.upload(case)
        self.launch(function, case, [int(buffer) for buffer in buffers], 0)
        self.call("cuCtxSynchronize")
        results = self._download(case, buffers, 0)
        for buffer in buffers:
            self.call("cuMemFree", buffer)
        self.call("cuModuleUnload", module)
        return results

    def _download(self, case: Case, buffers: list[Any], stream: Any) -> list[np.ndarray]:
        results = []
        for buffer, array in zip(buffers[len(case.inputs) :], case.outputs, strict=True):
            results.append(np.empty_like(array))
            self.call("cuMemcpyDtoHAsync", results[-1].ctypes.data, buffer, array.nbytes, stream)
        self.call("cuStreamSynchronize", stream)
        return results

    def ending(self, case: Case) -> tuple[str, list[np.ndarray], int]:
        """Return how a case ends (`Vectors.ending`), its outputs, and the registers of its launch.

        Outputs of a kernel that hangs are what it had written. After a hang or an error of the
        stage "run" the process must end.
        """
        stage, registers = "load", 0
        try:
            _, function = self.load(case)
            registers = self.registers(function)
            buffers = self.upload(case)
            unblocked = self.driver.CUstream_flags.CU_STREAM_NON_BLOCKING
            kernels, copies = (self.call("cuStreamCreate", unblocked) for _ in range(2))
            stage = "launch"
            self.launch(function, case, [int(buffer) for buffer in buffers], kernels)
            stage = "run"
            done = self._finishes(kernels)
            return "done" if done else "hang", self._download(case, buffers, copies), registers
        except DriverError as error:
            return f"{stage}: {error.error}", [], registers

    def _finishes(self, stream: Any) -> bool:
        end = time.monotonic() + HANG_AFTER
        while time.monotonic() < end:
            try:
                self.call("cuStreamQuery", stream)
                return True
            except DriverError as error:
                if error.error != "CUDA_ERROR_NOT_READY":
                    raise
            time.sleep(0.001)
        return False

    def launch(self, function: Any, case: Case, addresses: list[int], stream: Any = 0) -> None:
        """Start a case whose buffers lie at these device addresses."""
        values: list[Any] = [ctypes.c_uint64(address) for address in addresses]
        for index, tensor_map in case.tensor_maps:
            placed = replace(tensor_map, address=addresses[index] + tensor_map.address)
            values.append(ctypes.create_string_buffer(self.encode(placed), TENSORMAP_BYTES))
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        self.call(
            "cuLaunchKernel",
            function,
            case.grid,
            1,
            1,
            case.block,
            1,
            1,
            case.dynamic_smem,
            stream,
            ctypes.addressof(pointers),
            0,
        )


def _work(connection: Any) -> None:
    """A worker: receive case numbers, send back ("done", outputs), ("ended", what `Gpu.ending`
    gives) or ("failed", text)."""
    gpu: Any = None
    try:
        gpu = Gpu()
    except Exception as error:  # reported by the parent with the first case
        connection.send(("failed", f"{type(error).__name__}: {error}"))
    while (number := connection.recv()) is not None:
        case = all_cases()[number]
        try:
            connection.send(("ended", gpu.ending(case)) if case.rule else ("done", gpu.run(case)))
        except Exception as error:  # reported by the parent under the case's name
            connection.send(("failed", f"{type(error).__name__}: {error}"))


class _Worker:
    """A process that runs cases."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_work, args=(other,), daemon=True)
        with starting_workers():
            self._process.start()
        other.close()

    def run(self, number: int) -> tuple[str, Any]:
        """Run a case; return the answer of `_work`."""
        try:
            self._connection.send(number)
            if self._connection.poll(LIMIT):
                return self._connection.recv()
            return "failed", f"no result within {LIMIT:.0f} s"
        except (EOFError, OSError):
            return "failed", "its process ended"

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


class _Workers:
    """A worker and some that stand by: after a fault a context answers every call with the same
    error, and a kernel that hangs ends with its process alone."""

    def __init__(self) -> None:
        self._workers = [_Worker() for _ in range(1 + SPARES)]

    def run(self, number: int) -> tuple[str, Any]:
        """Run a case; return the answer of `_work`."""
        outcome = self._workers[0].run(number)
        state, result = outcome
        if state == "failed" or state == "ended" and result[0].startswith(("hang", "run")):
            self._workers.pop(0).close()
            self._workers.append(_Worker())
        return outcome

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.close()


def record(directory: Path, only: tuple[str, ...] = ()) -> dict[str, str]:
    """Record into `directory` all groups, or `only` some; returns failures, case name -> reason.

    The others stay as they are. Raises DriverError without a usable GPU, RuntimeError on one that
    is not of compute capability 9.0 and ValueError for a group that does not exist, or some groups
    beside others that another GPU or driver recorded.
    """
    unknown = set(only) - set(groups(all_cases()))
    if unknown:
        raise ValueError(f"no groups {sorted(unknown)}; there are {sorted(groups(all_cases()))}")
    gpu = Gpu()
    manifest = gpu.description()
    print(manifest, flush=True)
    if manifest["capability"] != "9.0":
        raise RuntimeError(
            f"{manifest['device']} has compute capability {manifest['capability']}; the kernels "
            "are for sm_90a, so record on a GPU of compute capability 9.0 (H100, H200)"
        )
    if only:
        same_origin(manifest, Vectors(directory).manifest)
    directory.mkdir(parents=True, exist_ok=True)
    if not only:
        _record_tensor_maps(gpu, directory)
    recording = _Recording(
        [i for i, case in enumerate(all_cases()) if not only or case.group in only]
    )
    recording.run()
    save(directory, recording.results, manifest | recording.fields(), only)
    count = len(recording.results)
    print(f"{count} of {len(recording.numbers)} cases recorded in {directory}", flush=True)
    return recording.failed


def same_origin(manifest: dict, before: dict) -> None:
    """ValueError where two manifests name different GPUs or drivers: one names all its vectors'."""
    for what in ("device", "driver_cuda"):
        if manifest[what] != before[what]:
            raise ValueError(
                f"the other groups were recorded with {what} {before[what]!r}, and here it is "
                f"{manifest[what]!r}; record all groups, or these into another directory"
            )


class _Recording:
    """Runs the cases of these numbers; fills what the manifest and the files take."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers
        self.results: dict[str, list[np.ndarray]] = {}
        self.failed: dict[str, str] = {}
        self.faults: dict[str, str] = {}
        self.endings: dict[str, str] = {}
        self.registers: dict[str, int] = {}

    def fields(self) -> dict[str, dict[str, Any]]:
        """Fields of the manifest, by case name."""
        return {
            "failed": self.failed,
            "faults": self.faults,
            "endings": self.endings,
            "registers": self.registers,
        }

    def run(self) -> None:
        """Run every case."""
        workers = _Workers()
        for number in self.numbers:
            case = all_cases()[number]
            state, outcome = workers.run(number)
            if state == "ended":
                self.endings[case.name], self.results[case.name], registers = outcome
                if "setmaxnreg" in case.ptx and registers:
                    self.registers[case.name] = registers
            elif case.faults and state == "failed":
                self.faults[case.name], self.results[case.name] = outcome, []
            elif case.faults or state == "failed":
                self.failed[case.name] = "no error" if case.faults else outcome
                print(f"{case.name}: {self.failed[case.name]}", flush=True)
            else:
                self.results[case.name] = outcome
        workers.close()


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
