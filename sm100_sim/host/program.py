"""The linked host code of whatever `cute.compile` returned."""

from __future__ import annotations

import weakref
from typing import Any

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
