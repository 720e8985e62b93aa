"""Named ranges of device code, for in-kernel event tracing (iket, part of CuTe DSL).

`run-iket profile -- COMMAND` sets the compiler option `iket` and shows when each warp is in which
range. Without that option nothing is emitted: the compiled kernel is the same with and without
them. The option is part of the key of a compiled kernel (`environment.compiler_settings`).
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from typing import Any


def traced(name: str) -> Callable[[Callable], Callable]:
    """Put what a device method emits into a range of that name, where iket is requested."""

    def decorate(method: Callable) -> Callable:
        @functools.wraps(method)
        def call(*arguments: Any, **options: Any) -> Any:
            if not _iket_requested():
                return method(*arguments, **options)
            from cutlass.cute.experimental import iket

            iket.range_push(name)
            result = method(*arguments, **options)
            iket.range_pop()
            return result

        return call

    return decorate


def _iket_requested() -> bool:
    options = os.environ.get("CUTE_DSL_COMPILER_OPT", "")
    return "iket" in re.split(r"[\s,]+", options.replace("--", ""))
