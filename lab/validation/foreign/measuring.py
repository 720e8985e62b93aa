"""Measurement of the cases on the GPU that is there: medians of batches of launches, in bursts.

A batch lies between two events behind a launch that is still running, so the host is ahead. Batches
are short and apart: the clock is that of first launches, not of a GPU at its power limit.
"""

from __future__ import annotations

import ctypes
import math
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from .case import Call, Case, Extent
from .cuda_kernels import TEXTBOOK, Source

#: Batches of a case, launches of each at most, and milliseconds that a batch takes at most.
BATCHES, LAUNCHES, MOST = 9, 10, 20.0
#: Seconds between batches.
REST = 0.1


#: CUfunction_attribute: registers of a thread.
_REGISTERS = 4


def _compiled(source: Source) -> bytes:
    """Return the cubin of CUDA C++ by nvcc. Raises FileNotFoundError without it."""
    compiler = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    with tempfile.TemporaryDirectory() as folder:
        text, cubin = Path(folder, "kernels.cu"), Path(folder, "kernels.cubin")
        text.write_text(source.text)
        included = [f"-I{headers}" for headers in source.folders()]
        subprocess.run(
            [compiler, "-cubin", "-arch=sm_90a", "-std=c++17", *included, "-o", cubin, text],
            check=True,
        )
        return cubin.read_bytes()


class Module:
    """Kernels of a cubin in PyTorch's context, by the driver's functions."""

    def __init__(self, cubin: bytes) -> None:
        self._cubin = cubin
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._module, self._functions = ctypes.c_void_p(), {}  # type: ignore[var-annotated]
        self._call("cuModuleLoadData", ctypes.byref(self._module), cubin)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} answers {status}")

    def function(self, name: str) -> ctypes.c_void_p:
        if name not in self._functions:
            found = ctypes.c_void_p()
            mangled = self._mangled(name).encode()
            self._call("cuModuleGetFunction", ctypes.byref(found), self._module, mangled)
            self._functions[name] = found
        return self._functions[name]

    def _mangled(self, name: str) -> str:
        """Return the symbol of a kernel: of a template, the one in the cubin that has its name."""
        if "<" not in name:
            return name
        short = name.partition("<")[0].rpartition("::")[2]
        text = rf"\.text\.(_Z\w*{len(short)}{short}\w*)".encode()
        (symbol,) = set(re.findall(text, self._cubin))
        return symbol.decode()

    def registers(self, name: str) -> int:
        found = ctypes.c_int()
        self._call("cuFuncGetAttribute", ctypes.byref(found), _REGISTERS, self.function(name))
        return found.value

    def launch(self, name: str, shape: tuple[int, ...], stream: int, values: list) -> None:
        """Launch a kernel. shape: CTAs and threads by x, y and z. values: of ctypes."""
        pointers = (ctypes.c_void_p * len(values))(
            *(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values)
        )
        self._call(
            "cuLaunchKernel", self.function(name), *map(ctypes.c_uint, shape), ctypes.c_uint(0),
            ctypes.c_void_p(stream), pointers, None,
        )  # fmt: skip


class Gpu:
    """The GPU as the world of a case. registers: of the last kernel in CUDA C++, a thread's."""

    registers: int | None = None

    def __init__(self) -> None:
        import torch

        torch.zeros(1, device="cuda")
        self._torch = torch
        self._modules: dict[Source, Module] = {}
        self._random = torch.Generator("cuda").manual_seed(0)

    def tensor(self, *shape: int, dtype: str, low: int | None = None) -> Any:
        made = self._torch.empty(*shape, dtype=getattr(self._torch, dtype), device="cuda")
        if low is not None:
            return made.random_(low, generator=self._random)
        return made.normal_(generator=self._random)

    def launch(
        self, kernel: str, grid: Extent, block: Extent, *arguments: Any, source: Source = TEXTBOOK
    ) -> None:
        if source not in self._modules:
            self._modules[source] = Module(_compiled(source))
        module = self._modules[source]
        values = [
            ctypes.c_int(one) if isinstance(one, int) else ctypes.c_void_p(one.data_ptr())
            for one in arguments
        ]
        stream = self._torch.cuda.current_stream().cuda_stream
        module.launch(kernel, (*grid, *block), stream, values)
        self.registers = module.registers(kernel)

    def milliseconds(self, call: Call, launches: int) -> tuple[float, float]:
        """Return the time of a batch on the GPU, and the host's for its launches."""
        begin, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        call()
        begin.record()
        before = time.perf_counter()
        for _ in range(launches):
            call()
        host = time.perf_counter() - before
        end.record()
        end.synchronize()
        return begin.elapsed_time(end), host * 1e3

    def release(self) -> None:
        self._torch.cuda.synchronize()
        self._torch.cuda.empty_cache()


def state() -> str:
    """Return clocks, power and temperature by nvidia-smi."""
    names = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    return subprocess.run(
        ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip


def measure(case: Case, gpu: Gpu) -> dict[str, Any]:
    """Return the time of a case's launch, in microseconds, with its quartiles."""
    started = time.perf_counter()
    call = case.prepare(gpu, **case.many)
    made = call()
    first, _ = gpu.milliseconds(call, 1)
    compiled = time.perf_counter() - started
    launches = max(2, min(LAUNCHES, math.floor(MOST / first)))
    times, hosts = [], []
    for _ in range(BATCHES):
        time.sleep(REST)
        device, host = gpu.milliseconds(call, launches)
        times.append(device / launches * 1e3)
        hosts.append(host / launches * 1e3)
    registers = gpu.registers if case.language == "CUDA C++" else getattr(made, "n_regs", None)
    low, median, high = np.percentile(times, [25, 50, 75]).tolist()
    return {
        "microseconds": median, "low": low, "high": high, "host": float(np.median(hosts)),
        "launches": launches, "batches": BATCHES, "registers": registers,
        "seconds_of_compilation": compiled, "state": state(),
    }  # fmt: skip


def measure_all(cases: Iterable[Case], most_seconds: float) -> dict[str, Any]:
    """Return the measurements of cases by name; of those that fail, what was said. Cases that
    would begin after `most_seconds` are left out, and named."""
    import torch
    import triton

    begin, gpu = time.perf_counter(), Gpu()
    rows: dict[str, Any] = {}
    found = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "cuda": torch.version.cuda, "state": state(), "rows": rows,
    }  # fmt: skip
    for case in cases:
        if time.perf_counter() - begin > most_seconds:
            rows[case.name] = {"error": f"not begun within {most_seconds:.0f} s"}
            continue
        try:
            rows[case.name] = measure(case, gpu)
        except Exception as error:  # another project's kernel fails; the others go on
            rows[case.name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        gpu.release()
        print(case.name, rows[case.name], flush=True)
    found["seconds"] = time.perf_counter() - begin
    return found
