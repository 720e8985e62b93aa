"""Origin of figures: the machine of a row, and the versions that a result depends on."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def git(root: Path, *arguments: str) -> bytes | None:
    """Return what git prints in a directory; None where it fails, or is not there."""
    try:
        asked = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True)
    except OSError:
        return None
    return asked.stdout if asked.returncode == 0 else None


def environment() -> dict[str, str]:
    """Versions of what results depend on, the commit of a checkout, the time in UTC."""
    from bench.peers.flash_attn_4 import PACKAGE
    from fa4_hd256.run.bug_report import versions

    try:
        theirs = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        theirs = "not installed"
    described = git(ROOT, "describe", "--always", "--dirty", "--abbrev=12") or b""
    return {
        **versions(),
        PACKAGE: theirs,
        "commit": described.decode().strip() or "not a git checkout",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def simulator_machine() -> str:
    """Name the `machine` of figures that the simulator counted, or of its own speed."""
    return f"simulator on a CPU, {len(os.sched_getaffinity(0))} cores"
