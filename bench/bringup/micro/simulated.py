"""Runs kernels that time themselves in the simulator, which gives no times."""

from __future__ import annotations

import numpy as np

from sm100_sim import Options, Report, launch_ptx
from sm100_sim.tools.golden.cases import head
from sm100_sim.tools.golden.replay import placed

from .timed import ENTRY, RESULTS, Timed

_LANES = 32


def ptx_for_blackwell(kernel: Timed) -> str:
    return head((10, 0)) + kernel.ptx


def simulate(kernel: Timed, trace: bool = False) -> Report:
    buffers = [placed(np.zeros(RESULTS, np.uint64)), placed(np.zeros(kernel.buffer, np.uint8))]
    return launch_ptx(
        ptx_for_blackwell(kernel),
        ENTRY,
        [*buffers, 0],
        grid=kernel.grid,
        block=_LANES * kernel.warps,
        cluster=kernel.cluster,
        dynamic_smem=kernel.shared,
        options=Options(trace=trace),
    )
