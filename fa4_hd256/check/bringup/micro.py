"""Microbenchmarks: figures that set the constants of the timing model (`sm100_sim.timing`).

On a GPU each kernel is launched `REPETITIONS` times; a figure is the median over them, with the
quartiles as its spread. In the simulator the kernels run once, for their results, and the timing
model replays what it can: its answer must be the constant that it started from.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from . import micro_basic, micro_memory, micro_rates, micro_tensor
from .gpu import gpu, head
from .machine_file import like
from .micro_table import LAUNCHES, Micro
from .outcome import Outcome, Target
from .timed import ENTRY, RESULTS, Timed

REPETITIONS, WARM_UP = 15, 3
#: Measurements of a clock: each takes two launches.
CLOCKS_TAKEN = 3


@lru_cache(maxsize=4)
def _table(sms: int, has_tcgen05: bool) -> dict[str, Micro]:
    found = (
        *micro_basic.table(),
        *micro_memory.table(),
        *micro_tensor.table(sms),
        *micro_rates.table(sms, sets_clock=not has_tcgen05),
    )
    return {micro.name: micro for micro in found}


def missing(target: Target) -> str:
    """Nothing is needed beside the driver."""
    return ""


def items(target: Target) -> list[str]:
    """Names of the benchmarks that this GPU's instructions allow."""
    table = _table(target.sms, target.has_tcgen05)
    return [m.name for m in table.values() if target.has_tcgen05 or not m.tcgen05]


def run(item: str, target: Target, note: Callable[[str], None]) -> Outcome:
    """One figure."""
    micro = _table(target.sms, target.has_tcgen05)[item]
    if not target.is_gpu:
        return _modelled(micro, note)
    series = []
    for kernel in micro.kernels:
        note(f"kernel '{kernel.name}', grid {kernel.grid}, {kernel.warps} warps")
        loaded = Loaded(kernel, target.capability)
        if micro.unit == "GHz":
            series.append(loaded.gigahertz())
        else:
            series.append(loaded.seconds() if micro.seconds else loaded.clocks())
        loaded.free()
    wake = _wake(like(target)) if micro.wakes else 0.0
    return _figure(micro, np.array([micro.figure(*values, wake=wake) for values in zip(*series)]))


def _wake(machine: str) -> float:
    """Clocks from a barrier's phase to the warp that waits, of a machine of the timing model."""
    from sm100_sim import timing

    return timing.load(machine).values().barrier_wake


def _figure(micro: Micro, values: np.ndarray, state: str = "measured") -> Outcome:
    low, middle, high = (float(f"{x:.5g}") for x in np.percentile(values, (25, 50, 75)))
    sets = f"; sets {micro.constant}" if micro.constant else ""
    spread = f" ({low:g} to {high:g})" if low != high else ""
    return Outcome(
        state,
        f"{middle:g} {micro.unit}{spread}: {micro.what}{sets}",
        {
            "value": middle,
            "low": low,
            "high": high,
            "unit": micro.unit,
            "constant": micro.constant,
            "what": micro.what,
        },
    )


class Loaded:
    """A kernel on the GPU, with memory for its results and its buffer."""

    def __init__(self, kernel: Timed, capability: tuple[int, int]) -> None:
        self.kernel = kernel
        call = gpu().call
        self._module = call("cuModuleLoadData", (head(capability) + kernel.ptx).encode() + b"\0")
        self._function = call("cuModuleGetFunction", self._module, ENTRY.encode())
        if kernel.shared:
            attribute = gpu().driver.CUfunction_attribute
            name = "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
            call("cuFuncSetAttribute", self._function, getattr(attribute, name), kernel.shared)
        self._results = call("cuMemAlloc", 8 * RESULTS)
        self._buffer = call("cuMemAlloc", kernel.buffer)
        call("cuMemsetD8", self._buffer, 0, kernel.buffer)

    def start(self, turn: int, stream: int = 0) -> None:
        """Launch, and do not wait."""
        values = (
            ctypes.c_uint64(int(self._results)),
            ctypes.c_uint64(int(self._buffer)),
            ctypes.c_uint32(turn),
        )
        pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in values))
        k = self.kernel
        gpu().call(
            "cuLaunchKernel",
            self._function,
            k.grid,
            1,
            1,
            32 * k.warps,
            1,
            1,
            k.shared,
            stream,
            ctypes.addressof(pointers),
            0,
        )

    def once(self, turn: int) -> float:
        """Launch and wait; clocks of the loop, of the slowest warp or of the typical one."""
        call = gpu().call
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
        call, modes = gpu().call, gpu().driver.CUstreamCaptureMode
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
            gpu().call("cuMemFree", address)
        gpu().call("cuModuleUnload", self._module)


def _modelled(micro: Micro, note: Callable[[str], None]) -> Outcome:
    """Return the timing model's figures for the same kernels."""
    if micro.seconds:
        return Outcome("not measured", "times of the whole GPU: nothing in the simulator has them")
    from . import modelled

    why = modelled.missing()
    series = []
    for kernel in micro.kernels:
        if kernel.grid > 128 or kernel.buffer > 1 << 28:
            return Outcome("not measured", f"'{kernel.name}' takes more than one cluster")
        note(f"kernel '{kernel.name}' in the simulator")
        clocks = modelled.clocks(kernel, replayed=not why)
        series.append(clocks)
    if why:
        return Outcome("not measured", f"ran without an error; no time: {why}")
    wake = _wake(modelled.MACHINE) if micro.wakes else 0.0
    figure = _figure(micro, np.array([micro.figure(*series, wake=wake)]))
    return Outcome("measured", f"modelled: {figure.text}", {**figure.values, "modelled": True})
