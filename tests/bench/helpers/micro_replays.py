"""The timing model's clocks for kernels that time themselves: run, assemble, replay."""

from __future__ import annotations

import importlib.util
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from bench.bringup.micro.simulated import ptx_for_blackwell, simulate
from bench.bringup.micro.table import Micro
from bench.bringup.micro.timed import ENTRY, Timed
from sm100_sim import timing

MACHINE = "b200"


def missing() -> str:
    """Return why kernels cannot be replayed here, or ""."""
    for module in ("numba", "triton"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed"
    return "" if _assembler().exists() else f"triton has no {_assembler().name}"


def _assembler() -> Path:
    (home,) = importlib.util.find_spec("triton").submodule_search_locations
    return Path(home, "backends", "nvidia", "bin", "ptxas-blackwell")


def _cubin(ptx: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="sm100_sim_") as directory:
        source, target = Path(directory, "kernel.ptx"), Path(directory, "kernel.cubin")
        source.write_text(ptx)
        command = [str(_assembler()), "-arch=sm_100a", "-O3", str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return target.read_bytes()


@lru_cache(maxsize=64)
def clocks(kernel: Timed, values: timing.Values | None = None) -> float:
    """Clocks of a round by the timing model. values: constants, those of `MACHINE` by default."""
    report, ptx = simulate(kernel, trace=True), ptx_for_blackwell(kernel)
    compiled = timing.traced_program(report, ptx, timing.disassemble(_cubin(ptx))[ENTRY])
    # One CTA or pair has L2 to itself.
    values = values or timing.load(MACHINE).values()
    run = timing.replay_program(compiled, values._replace(sms=1.0))
    return timing.clocks_measured(compiled, run) / kernel.rounds


def figure(micro: Micro, values: timing.Values | None = None) -> float:
    """The figure that a GPU with the model's clocks would give."""
    values = values or timing.load(MACHINE).values()
    wake = values.barrier_wake if micro.wakes else 0.0
    return micro.figure(*(clocks(kernel, values) for kernel in micro.kernels), wake=wake)
