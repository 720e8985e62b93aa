"""sm100_sim: run compiled sm_100a kernels of CuTe DSL on any CPU.

`launch(compiled, *args)` runs what `cute.compile` returned; `last_reports()` gives the reports of
this process. Errors are subclasses of `SimulationError`.
"""

from .attach import attached
from .errors import SimulationError
from .launcher import launch
from .report import Report, last_reports

__all__ = ["Report", "SimulationError", "attached", "last_reports", "launch"]
