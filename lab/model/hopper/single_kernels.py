"""The timing model with Hopper's constants on the kernels that a Hopper GPU was measured with."""

from __future__ import annotations

import numpy as np

from lab.micro import hopper_kernels
from lab.micro.hopper_cubins import THREADS, compile_ptx
from lab.micro.hopper_kernels import Kernel
from sm100_sim import Options, launch_ptx
from sm100_sim.timing import Compiled, Replay, clocks_measured, disassemble, traced_program

GPU = "h200"


def program_of(kernel: Kernel) -> Compiled:
    """The kernel run in the simulator and its warps' paths through the cubin."""
    arrays = np.zeros(64, np.uint64), np.zeros(hopper_kernels.BUFFER, np.uint8)
    report = launch_ptx(
        kernel.ptx, hopper_kernels.ENTRY, arrays, grid=kernel.ctas, block=THREADS * kernel.warps,
        cluster=kernel.ctas, dynamic_smem=hopper_kernels.DYNAMIC_SHARED,
        options=Options(trace=True),
    )  # fmt: skip
    function = disassemble(compile_ptx(kernel.ptx))[hopper_kernels.ENTRY]
    return traced_program(report, kernel.ptx, function)


def round_clocks(compiled: Compiled, run: Replay) -> float:
    """Clocks that a kernel measures, over its rounds."""
    return clocks_measured(compiled, run) / hopper_kernels.ROUNDS
