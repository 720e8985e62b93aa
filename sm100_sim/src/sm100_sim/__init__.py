"""sm100_sim: run compiled Blackwell (SM100) kernels on any CPU.

| names | what |
|---|---|
| launch | run what `cute.compile` returned, on CPU tensors |
| launch_packed | the same, its arguments packed by the caller |
| launch_ptx | run a kernel of a PTX module, on numpy arrays |
| launch_triton | run a Triton kernel, on CPU tensors or numpy arrays |
| launch_cuda, compile_cuda, CompiledCuda | run a kernel in CUDA C++, compiled by NVRTC |
| tensor_map | the TMA descriptor of an array, as an argument of a kernel |
| attached, Session | run a GPU program in CuTe DSL or Triton as it is |
| Options, LaunchConfig, launch_configs, keeping_ptx | how launches run; what a call launches |
| Report, last_reports, Finding, Cause | what a launch did, what is wrong with it |
| SimulationError and its subclasses, PtxSyntaxError | what ends a launch |
| device, default_device, DEVICES, SimulatedDevice | the GPUs that it passes for |
| timing | the time a launch would take: `timing.predict` |
| tools | golden vectors: what holds the simulator against silicon |

What is not listed here, in `sm100_sim.timing` or under `sm100_sim.tools` is private.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import timing, tools
    from .attach import Session, attached
    from .causes import Cause
    from .cuda_launcher import CompiledCuda, compile_cuda, launch_cuda
    from .devices import DEVICES, SimulatedDevice, default_device, device
    from .errors import (
        BarrierError,
        ClcError,
        CompileError,
        CtaExited,
        DivergenceError,
        Hang,
        LaunchError,
        MemoryFault,
        Misaligned,
        MissingExtra,
        SimulationError,
        TmemError,
        UnknownInstruction,
    )
    from .host import LaunchConfig, keeping_ptx, launch_configs
    from .jit.cache import cache_state
    from .launcher import Options, launch, launch_packed
    from .ptx.parser import PtxSyntaxError
    from .ptx_launcher import launch_ptx, tensor_map
    from .report import Report, last_reports
    from .sanitizer.findings import Finding
    from .triton_launcher import launch_triton

__version__ = "0.1.0"

__all__ = [
    "DEVICES",
    "BarrierError",
    "Cause",
    "ClcError",
    "CompileError",
    "CompiledCuda",
    "CtaExited",
    "DivergenceError",
    "Finding",
    "Hang",
    "LaunchConfig",
    "LaunchError",
    "MemoryFault",
    "Misaligned",
    "MissingExtra",
    "Options",
    "PtxSyntaxError",
    "Report",
    "Session",
    "SimulatedDevice",
    "SimulationError",
    "TmemError",
    "UnknownInstruction",
    "attached",
    "cache_state",
    "compile_cuda",
    "default_device",
    "device",
    "keeping_ptx",
    "last_reports",
    "launch",
    "launch_configs",
    "launch_cuda",
    "launch_packed",
    "launch_ptx",
    "launch_triton",
    "tensor_map",
    "timing",
    "tools",
]

# Loaded on first use: the recorder of golden vectors runs where llvmlite is not installed.
_HOMES = {
    "attach": ("Session", "attached"),
    "causes": ("Cause",),
    "cuda_launcher": ("CompiledCuda", "compile_cuda", "launch_cuda"),
    "devices": ("DEVICES", "SimulatedDevice", "default_device", "device"),
    "errors": (
        "BarrierError", "ClcError", "CompileError", "CtaExited", "DivergenceError", "Hang",
        "LaunchError", "MemoryFault", "Misaligned", "MissingExtra", "SimulationError", "TmemError",
        "UnknownInstruction",
    ),
    "host": ("LaunchConfig", "keeping_ptx", "launch_configs"),
    "launcher": ("Options", "launch", "launch_packed"),
    "ptx.parser": ("PtxSyntaxError",),
    "ptx_launcher": ("launch_ptx", "tensor_map"),
    "triton_launcher": ("launch_triton",),
    "report": ("Report", "last_reports"),
    "sanitizer.findings": ("Finding",),
    "jit.cache": ("cache_state",),
}  # fmt: skip


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """The public names; each loads what it needs and no more."""
    if name in ("timing", "tools"):
        return importlib.import_module(f".{name}", __name__)
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
