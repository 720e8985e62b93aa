"""The compiler's own report of what a kernel uses, read out of its cubin."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = "nvidia-cuda-cuobjdump"
_USAGE = re.compile(
    r"Function (\S+):\s+REG:(\d+)\s+STACK:(\d+)\s+SHARED:(\d+)\s+LOCAL:(\d+)"
)


@dataclass(frozen=True)
class ResourceUsage:
    """registers: a thread, at launch. stack, local: bytes a thread; spills would be in either."""

    registers: int
    stack: int
    local: int


def resource_usage(cubin: bytes, kernel: str | None = None) -> ResourceUsage:
    """What `cuobjdump --dump-resource-usage` says of a cubin's kernel.

    kernel: its (mangled) name; without one, the largest of all that are there. Raises RuntimeError
    if cuobjdump is not installed, its report has another form or the kernel is not in it.
    """
    with tempfile.TemporaryDirectory(prefix="fa4_hd256_") as directory:
        path = Path(directory, "kernel.cubin")
        path.write_bytes(cubin)
        command = [cuobjdump(), "--dump-resource-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [
        tuple(map(int, row)) for name, *row in _USAGE.findall(text) if kernel in (None, name)
    ]
    if not rows:
        wanted = "" if kernel is None else f" of {kernel}"
        raise RuntimeError(f"cuobjdump's report has no resource usage{wanted}:\n{text}")
    return ResourceUsage(
        registers=max(row[0] for row in rows),
        stack=max(row[1] for row in rows),
        local=max(row[3] for row in rows),
    )


def cuobjdump() -> str:
    """Path of cuobjdump as its package installed it; RuntimeError if the package is missing."""
    try:
        files = importlib.metadata.files(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.stem == "cuobjdump" and os.access(file.locate(), os.X_OK):
            return str(file.locate())
    raise RuntimeError(
        f"cuobjdump is needed to read registers and spills; install it with pip install {_PACKAGE}"
    )
