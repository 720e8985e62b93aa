"""Time cubins on a Hopper GPU: `python lab/micro/hopper_measure.py DIR`.

DIR holds cubins and a list of them, made by `python -m lab hopper --build DIR` on any machine.
Prints one JSON object, kernel -> clocks of a round (the slowest warp's, the median of the
repetitions). Needs a CUDA driver, cuda-bindings and numpy, and nothing of this project.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

REPETITIONS = 32


def _call(driver: Any, name: str, *arguments: Any) -> Any:
    status, *results = getattr(driver, name)(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{name}: {status.name}")
    return results[0] if len(results) == 1 else tuple(results)


def measure(directory: Path) -> dict[str, Any]:
    """Clocks of a round of every kernel, with the GPU's name, and quartiles over repetitions.

    Raises RuntimeError naming the driver call that failed, FileNotFoundError for a missing file.
    """
    from cuda.bindings import driver

    def call(name: str, *arguments: Any) -> Any:
        return _call(driver, name, *arguments)

    listed = json.loads((directory / "kernels.json").read_text())
    call("cuInit", 0)
    device = call("cuDeviceGet", 0)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", device))
    results = call("cuMemAlloc", 8 * 64)
    buffer = call("cuMemAlloc", listed["buffer_bytes"])
    call("cuMemsetD8", buffer, 0, listed["buffer_bytes"])
    found: dict[str, Any] = {
        "device": call("cuDeviceGetName", 128, device).split(b"\0")[0].decode(),
        "driver": call("cuDriverGetVersion"),
        "rounds": {},
        "quartiles": {},
    }
    shared = listed["dynamic_shared"]
    for kernel in listed["kernels"]:
        module = call("cuModuleLoadData", (directory / kernel["file"]).read_bytes())
        function = call("cuModuleGetFunction", module, listed["entry"].encode())
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call("cuFuncSetAttribute", function, limit, shared)
        values = np.array([int(results), int(buffer)], np.uint64)
        pointers = np.array([values.ctypes.data, values.ctypes.data + 8], np.uint64)
        clocks = []
        for _ in range(REPETITIONS):
            call(
                "cuLaunchKernel", function, kernel["ctas"], 1, 1, 32 * kernel["warps"], 1, 1,
                shared, 0, pointers.ctypes.data, 0,
            )  # fmt: skip
            call("cuCtxSynchronize")
            out = np.zeros(kernel["ctas"] * kernel["warps"], np.uint64)
            call("cuMemcpyDtoH", out.ctypes.data, results, out.nbytes)
            clocks.append(int(out.max()) / listed["rounds"])
        found["rounds"][kernel["name"]] = float(np.median(clocks))
        found["quartiles"][kernel["name"]] = np.percentile(clocks, [25, 75]).tolist()
        call("cuModuleUnload", module)
    return found


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1])), indent=1))
