"""sm100_sim: run compiled sm_100a kernels of CuTe DSL on any CPU.

`launch(compiled, *args)` runs what `cute.compile` returned; `last_reports()` gives the reports of
this process. Errors are subclasses of `SimulationError`.
"""

from .errors import SimulationError
from .report import Report, last_reports

__all__ = ["Report", "SimulationError", "last_reports", "launch"]


def __getattr__(name: str):
    # Importing the translator costs a second; `import sm100_sim` alone does not need it.
    if name == "launch":
        from .launch import launch

        globals()["launch"] = launch
        return launch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
