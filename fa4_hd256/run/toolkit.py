"""The CUDA of the libraries that CuTe DSL compiles with. It takes the newest that are installed and
that the driver can load."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata

from ..architectures import ARCHITECTURES

#: Libraries for another CUDA than those that come with CuTe DSL.
_OTHERS = "nvidia-cutlass-dsl-libs-cu13"


class ToolkitError(RuntimeError):
    """CuTe DSL's libraries do not know a target."""


@functools.cache
def other_libraries() -> str:
    """Return the version of the libraries for CUDA 13, "" where they are not installed. What they
    compile differs from what the default ones do."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(_OTHERS)
    return ""


def check(target: str) -> None:
    """Raise ToolkitError where the libraries are too old for a target (`Architecture.toolkits`)."""
    oldest = next((a.toolkits[target] for a in ARCHITECTURES if target in a.toolkits), None)
    if oldest is None:
        return
    from cutlass.base_dsl.version_info import CUDA_VERSION

    if (CUDA_VERSION.major, CUDA_VERSION.minor) < oldest:
        raise ToolkitError(
            f"kernels for {target} need CuTe DSL's libraries of CUDA {oldest[0]}.{oldest[1]} or "
            f"newer; those in use are of CUDA {CUDA_VERSION.major}.{CUDA_VERSION.minor}. Install "
            "newer ones: pip install 'nvidia-cutlass-dsl[cu13]'. CuTe DSL takes the newest that "
            "the driver can load"
        )
