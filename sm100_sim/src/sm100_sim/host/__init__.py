"""Host code of compiled functions, run on the CPU up to its launches."""

from sm100_sim.state.launch import LaunchConfig

from .host_code import HostProgram, keeping_ptx, ptx_of
from .program import launch_configs, program_of

__all__ = [
    "HostProgram",
    "LaunchConfig",
    "keeping_ptx",
    "launch_configs",
    "program_of",
    "ptx_of",
]
