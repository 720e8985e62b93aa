"""The timing model: how long a compiled kernel would take, replayed from its own SASS.

`predict` runs a compiled function in the simulator, finds the path of every warp through the
kernel's SASS and replays it clock by clock on a model of the SMs (docs/timing.md). It needs numba
and nvidia-cuda-nvdisasm.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Prediction", "ReplayError", "attached", "predict"]


def __getattr__(name: str) -> Any:
    """The public names; loaded when asked for, so that the rest works without numba."""
    if name in ("Prediction", "attached", "predict"):
        from . import prediction as module
    elif name == "ReplayError":
        from . import replay as module
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)
