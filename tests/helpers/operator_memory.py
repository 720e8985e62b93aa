"""Caches of the operator and of bench that a test process holds between modules."""

from __future__ import annotations

import functools
import sys


def forget_calls() -> None:
    """Empty the caches of the operator and of bench.

    Kernels are on disk; traces and replays of the timing model are computed again.
    """
    from fa4_hd256.plans import forget_plans
    from fa4_hd256.run import compile

    forget_plans()
    compile.forget()
    for name, module in list(sys.modules.items()):
        if name.startswith("bench."):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()
