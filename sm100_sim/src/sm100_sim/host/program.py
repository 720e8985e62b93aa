"""The linked host code of whatever `cute.compile` returned."""

from __future__ import annotations

import weakref
from typing import Any

from sm100_sim.state.launch import LaunchConfig

from .host_code import HostProgram
from .tvm_ffi import TvmFfiProgram

_programs: weakref.WeakKeyDictionary[Any, HostProgram] = weakref.WeakKeyDictionary()


def program_of(compiled: Any) -> HostProgram:
    """The program of `compiled`, linked at the first request and kept as long as the object.

    Raises LaunchError as `HostProgram` does.
    """
    program = _programs.get(compiled)
    if program is None:
        kind = TvmFfiProgram if hasattr(compiled, "_create_tvm_ffi_function") else HostProgram
        program = _programs[compiled] = kind(compiled)
    return program


def launch_configs(compiled: Any, *args: Any, **kwargs: Any) -> list[LaunchConfig]:
    """Return the launches of a compiled function that is called with these arguments; nothing runs.

    compiled, args, kwargs: as for `launch`. The `param_pointers` of the result no longer point to
    anything. Raises LaunchError as `launch` does.
    """
    configs: list[LaunchConfig] = []
    program_of(compiled).run(args, configs.append, kwargs)
    return configs
