"""Runs kernels that time themselves on a GPU, through the CUDA driver API."""

from __future__ import annotations

import ctypes

import numpy as np

from sm100_sim.tools.golden.cases import head
from sm100_sim.tools.golden.record import Gpu

from .table import LAUNCHES
from .timed import ENTRY, RESULTS, Timed

REPETITIONS, WARM_UP = 15, 3
#: Measurements of a clock: each takes two launches.
CLOCKS_TAKEN = 3


class Loaded:
    """A kernel on a GPU, with memory for its results and its buffer."""

    def __init__(self, gpu: Gpu, kernel: Timed, capability: tuple[int, int]) -> None:
        self._gpu, self.kernel = gpu, kernel
        call = gpu.call
        self._module = call("cuModuleLoadData", (head(capability) + kernel.ptx).encode() + b"\0")
        self._function = call("cuModuleGetFunction", self._module, ENTRY.encode())
        if kernel.shared:
            attribute = gpu.driver.CUfunction_attribute
            name = "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
            call("cuFuncSetAttribute", self._function, getattr(attribute, name), kernel.shared)
        self._results = call("cuMemAlloc", 8 * RESULTS)
        self._buffer = call("cuMemAlloc", kernel.buffer)
        call("cuMemsetD8", self._buffer, 0, kernel.buffer)

    def start(self, turn: int, stream: int = 0) -> None:
        values = (
            ctypes.c_uint64(int(self._results)),
            ctypes.c_uint64(int(self._buffer)),
            ctypes.c_uint32(turn),
        )
        pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in values))
        k = self.kernel
        grid, block = (k.grid, 1, 1), (32 * k.warps, 1, 1)
        more = k.shared, stream, ctypes.addressof(pointers), 0
        self._gpu.call("cuLaunchKernel", self._function, *grid, *block, *more)

    def once(self, turn: int) -> float:
        """Launch and wait; clocks of the loop, of the slowest warp or of the typical one."""
        call = self._gpu.call
        call("cuMemsetD8", self._results, 0, 8 * RESULTS)
        self.start(turn)
        call("cuCtxSynchronize")
        found = np.zeros(RESULTS, np.uint64)
        call("cuMemcpyDtoH", found.ctypes.data, self._results, found.nbytes)
        return float(np.median(found[found > 0]) if self.kernel.typical else found.max())

    def clocks(self) -> list[float]:
        """Clocks of a round, of each repetition."""
        found = [self.once(turn) for turn in range(WARM_UP + REPETITIONS)]
        return [clocks / self.kernel.rounds for clocks in found[WARM_UP:]]

    def seconds(self) -> list[float]:
        """Seconds of a launch among `LAUNCHES`, of each repetition."""
        return [self._timed(LAUNCHES if r else WARM_UP) for r in range(6)][1:]

    def gigahertz(self) -> list[float]:
        """Clocks over seconds of single launches."""
        self.once(0)
        return [self.once(0) / self._timed(1) / 1e9 for _ in range(CLOCKS_TAKEN)]

    def _timed(self, launches: int) -> float:
        """Seconds of a launch in a graph: launched one by one, the host's calls would count."""
        call, modes = self._gpu.call, self._gpu.driver.CUstreamCaptureMode
        stream = call("cuStreamCreate", 0)
        call("cuStreamBeginCapture", stream, modes.CU_STREAM_CAPTURE_MODE_RELAXED)
        for turn in range(launches):
            self.start(turn, stream)
        ready = call("cuGraphInstantiate", call("cuStreamEndCapture", stream), 0)
        begin, end = (call("cuEventCreate", 0) for _ in range(2))
        call("cuGraphUpload", ready, stream)
        call("cuStreamSynchronize", stream)
        call("cuEventRecord", begin, stream)
        call("cuGraphLaunch", ready, stream)
        call("cuEventRecord", end, stream)
        call("cuEventSynchronize", end)
        return float(call("cuEventElapsedTime", begin, end)) / 1e3 / launches

    def free(self) -> None:
        """Give memory and module back."""
        for address in (self._results, self._buffer):
            self._gpu.call("cuMemFree", address)
        self._gpu.call("cuModuleUnload", self._module)
