"""Which scheduler a call uses: `use_clc=`, else the environment variable FA_CLC, else static."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["clc_requested", "scheduler_class"]

VARIABLE = "FA_CLC"


def clc_requested(
    use_clc: bool | None = None, environment: Mapping[str, str] | None = None
) -> bool:
    """Whether the call asks for the cluster-launch-control scheduler.

    `use_clc` decides where it is True or False; None reads FA_CLC (1 = CLC, 0 or unset = static).
    Read it once per call and make the result part of the compile key.

    Raises TypeError for another type of `use_clc`, ValueError for another value of FA_CLC.
    """
    if use_clc is not None:
        if not isinstance(use_clc, bool):
            raise TypeError(f"use_clc must be True, False or None, got {use_clc!r}")
        return use_clc
    value = (os.environ if environment is None else environment).get(VARIABLE, "0")
    if value not in ("0", "1"):
        raise ValueError(
            f"{VARIABLE} is {value!r}; accepted are 0 (static tile scheduler, the default) and "
            "1 (dynamic scheduler by cluster launch control). Unset it or set one of the two"
        )
    return value == "1"


def scheduler_class(use_clc: bool):
    """The scheduler class for a resolved choice (see `clc_requested`)."""
    if use_clc:
        from .clc import ClcScheduler

        return ClcScheduler
    from .static import StaticPersistentScheduler

    return StaticPersistentScheduler
