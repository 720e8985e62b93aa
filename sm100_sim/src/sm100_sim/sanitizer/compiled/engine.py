"""Native code of the sanitizer's own routines."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from sm100_sim.isa.columns import Rule
from sm100_sim.jit.engine import native_engine
from sm100_sim.native.compiler import module_text

from .draining import drain_log
from .watched import WATCHED, WATCHED_ORDERS


@functools.cache
def _engine() -> Any:
    return native_engine(module_text((*WATCHED.values(), *WATCHED_ORDERS.values(), drain_log)))


def routine_address(name: str) -> int:
    """Address of a routine of `watched`."""
    return _engine().get_function_address(name)


def watched_name(routine: str, rule: Rule) -> str:
    """Name of the watched routine for an instruction that has `routine`; "" for none."""
    found = WATCHED.get(routine) or WATCHED_ORDERS.get(rule)
    return found.name if found is not None else ""


@functools.cache
def native_drain() -> Callable[[int], int]:
    """`draining.drain_log` of the warp whose context is at an address."""
    return ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_uint64)(routine_address(drain_log.name))
