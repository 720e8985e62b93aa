"""Native routines that Python calls by themselves, outside the run loop."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from .compiler import module_text, signature
from .language import Native, Pointer, Scalar

_BY_BITS: dict[str, Any] = {
    "signed": {32: ctypes.c_int32, 64: ctypes.c_int64},
    "unsigned": {8: ctypes.c_uint8, 16: ctypes.c_uint16, 32: ctypes.c_uint32, 64: ctypes.c_uint64},
    "float": {32: ctypes.c_float},
    "bool": {1: ctypes.c_bool},
}


def _ctype(kind: Scalar | Pointer | None) -> Any:
    if kind is None:
        return None
    return ctypes.c_uint64 if isinstance(kind, Pointer) else _BY_BITS[kind.kind][kind.bits]


@functools.cache
def callable_of(routine: Native) -> Any:
    """A routine as a function of Python; pointers are addresses."""
    # Golden vectors are recorded on machines that may lack llvmlite, and import rules of layouts.
    from sm100_sim.jit.engine import native_engine

    parameters, result = signature(routine)
    engine = native_engine(module_text((routine,)))
    kind = ctypes.CFUNCTYPE(_ctype(result), *map(_ctype, parameters.values()))
    function: Any = kind(engine.get_function_address(routine.name))
    function.engine = engine  # whose code it is
    return function
