"""The timing model's answer to a kernel that times itself: run, compile, replay."""

from __future__ import annotations

import importlib.util
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from .gpu import head
from .timed import ENTRY, RESULTS, Timed

CAPABILITY = (10, 0)
MACHINE = "b200"
_LANES = 32


@lru_cache(maxsize=1)
def missing() -> str:
    """Return why kernels cannot be replayed here, or ""."""
    for module, package in (
        ("numba", "numba"),
        ("triton", "triton, for its ptxas"),
        ("llvmlite", "llvmlite"),
    ):
        if importlib.util.find_spec(module) is None:
            return f"{package} is not installed (pip install ./sm100_sim '.[bench]' triton)"
    return "" if _assembler().exists() else f"triton has no {_assembler().name}"


def _assembler() -> Path:
    spec = importlib.util.find_spec("triton")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("triton is not installed; its ptxas is needed", name="triton")
    home = spec.submodule_search_locations[0]
    return Path(home, "backends", "nvidia", "bin", "ptxas-blackwell")


def _cubin(ptx: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="fa4_hd256_") as directory:
        source, target = Path(directory, "kernel.ptx"), Path(directory, "kernel.cubin")
        source.write_text(ptx)
        command = [str(_assembler()), "-arch=sm_100a", "-O3", str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"ptxas refused the kernel: {done.stderr.strip()}")
        return target.read_bytes()


@lru_cache(maxsize=64)
def clocks(kernel: Timed, replayed: bool) -> float:
    """Run the kernel in the simulator; clocks of a round by the timing model, 0 if not replayed."""
    import sm100_sim
    from sm100_sim.tools.golden.replay import placed

    ptx = head(CAPABILITY) + kernel.ptx
    buffers = [placed(np.zeros(RESULTS, np.uint64)), placed(np.zeros(kernel.buffer, np.uint8))]
    report = sm100_sim.launch_ptx(
        ptx,
        ENTRY,
        [*buffers, 0],
        grid=kernel.grid,
        block=_LANES * kernel.warps,
        cluster=kernel.cluster,
        dynamic_smem=kernel.shared,
        options=sm100_sim.Options(trace=replayed),
    )
    return _replayed(ptx, kernel, report) if replayed else 0.0


def _replayed(ptx: str, kernel: Timed, report: Any) -> float:
    from sm100_sim import timing

    compiled = timing.traced_program(report, ptx, timing.disassemble(_cubin(ptx))[ENTRY])
    # One CTA or pair has L2 to itself.
    run = timing.replay_program(compiled, timing.load(MACHINE).values()._replace(sms=1.0))
    return timing.clocks_measured(compiled, run) / kernel.rounds
