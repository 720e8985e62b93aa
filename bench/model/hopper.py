"""The timing model with Hopper's constants on the kernels that a Hopper GPU was measured with.
"""

from __future__ import annotations

import numpy as np

from bench.measure import hopper_kernels
from bench.measure.hopper_cubins import (
    THREADS,
    compile_ptx,
)
from bench.measure.hopper_kernels import Kernel
from sm100_sim.host.host_code import LaunchConfig
from sm100_sim.launcher import Options, parameter_buffer, run_kernel, translated_kernel
from sm100_sim.timing.program import Compiled, build
from sm100_sim.timing.replay import Replay, clocks_measured
from sm100_sim.timing.sass import disassemble

GPU = "h200"


def program_of(kernel: Kernel) -> Compiled:
    """The kernel run in the simulator and its warps' paths through the cubin."""
    results, buffer = np.zeros(64, np.uint64), np.zeros(hopper_kernels.BUFFER, np.uint8)
    entry, shared = hopper_kernels.ENTRY, hopper_kernels.DYNAMIC_SHARED
    block, grid = (THREADS * kernel.warps, 1, 1), (kernel.ctas, 1, 1)
    config = LaunchConfig(entry, grid, block, grid, shared, (), ptx=kernel.ptx)
    translated = translated_kernel(kernel.ptx, entry, True)
    arrays = {"results": results, "buffer": buffer}
    values = [array.ctypes.data.to_bytes(8, "little") for array in arrays.values()]
    ranges = sorted(
        (array.ctypes.data, array.ctypes.data + array.nbytes, name)
        for name, array in arrays.items()
    )
    parameters = parameter_buffer(translated.kernel, values)
    report = run_kernel(config, parameters, ranges, Options(trace=True))
    function = disassemble(compile_ptx(kernel.ptx))[entry]
    return build(function, translated, report.trace, grid, report.shared_accesses)


def round_clocks(compiled: Compiled, run: Replay) -> float:
    """Clocks that a kernel measures, over its rounds."""
    return clocks_measured(compiled, run) / hopper_kernels.ROUNDS
