"""sm100_sim: run compiled sm_100a kernels of CuTe DSL on any CPU.

`launch(compiled, *args)` runs what `cute.compile` returned; `last_reports()` gives the reports of
this process. Errors are subclasses of `SimulationError`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attach import attached
    from .errors import SimulationError
    from .launcher import launch
    from .report import Report, last_reports

__all__ = ["Report", "SimulationError", "attached", "last_reports", "launch"]

# Loaded on first use: the recorder of golden vectors runs where llvmlite is not installed.
_HOMES = {"Report": "report", "SimulationError": "errors", "attached": "attach",
          "last_reports": "report", "launch": "launcher"}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
