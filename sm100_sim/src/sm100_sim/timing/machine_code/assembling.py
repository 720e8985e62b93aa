"""Machine code of a kernel that came as PTX alone: ptxas of a wheel, or of a CUDA toolkit."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

#: Where wheels have it: folder of a package, path below. That of Triton for Blackwell comes first.
_WHEELS = (
    ("nvidia", "cu13/bin/ptxas"),
    ("triton", "backends/nvidia/bin/ptxas-blackwell"),
    ("triton", "backends/nvidia/bin/ptxas"),
)


def _candidates() -> Iterator[str]:
    for package, path in _WHEELS:
        spec = importlib.util.find_spec(package)
        for base in (spec.submodule_search_locations or ()) if spec else ():
            yield os.path.join(base, path)
    found = shutil.which("ptxas")
    if found:
        yield found


@functools.lru_cache(maxsize=16)
def assembled(ptx: str) -> bytes:
    """Return the cubin of a PTX module, for the target that it names.

    Raises ValueError without ptxas, and with its messages if it refuses the module.
    """
    path = next((path for path in _candidates() if os.access(path, os.X_OK)), None)
    if path is None:
        raise ValueError(
            "the kernel came as PTX alone, and the model follows machine code: install ptxas, "
            "which the packages triton and nvidia-cuda-nvcc bring"
        )
    found, said = _run(path, ptx)
    older = re.search(r"Unsupported \.version .*current version is '([\d.]+)'", said)
    if older:  # a newer compiler's text; what it has of newer instructions is refused below
        found, said = _run(path, re.sub(r"(?m)^\s*\.version\s+\S+", f".version {older[1]}", ptx))
    if found is None:
        raise ValueError(f"ptxas refuses the module:\n{said}")
    return found


def _run(path: str, ptx: str) -> tuple[bytes | None, str]:
    """Run ptxas; return the cubin, None if it refuses the module, and its messages."""
    match = re.search(r"^\s*\.target\s+(\w+)", ptx, re.M)
    with tempfile.TemporaryDirectory(prefix="sm100_sim_ptxas_") as directory:
        source, target = Path(directory, "kernel.ptx"), Path(directory, "kernel.cubin")
        source.write_text(ptx, encoding="utf-8")
        done = subprocess.run(
            [path, f"-arch={match[1] if match else 'sm_100a'}", "-o", str(target), str(source)],
            capture_output=True, text=True,
        )  # fmt: skip
        return (None if done.returncode else target.read_bytes()), done.stderr.strip()
