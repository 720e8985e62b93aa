"""Origin of figures: the machine of a row, and the versions that a result depends on."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Folders of what figures depend on.
SOURCES = ("bench", "fa4_hd256", "lab", "schedulers", "sm100_sim/src", "softmax_emu")


def git(root: Path, *arguments: str) -> bytes | None:
    """Return what git prints in a directory; None where it fails, or is not there."""
    try:
        asked = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True)
    except OSError:
        return None
    return asked.stdout if asked.returncode == 0 else None


def changed_files(
    root: Path, commit: str = "HEAD", folders: Sequence[str] = SOURCES
) -> list[str] | None:
    """Return the .py and .json files below folders that differ from a commit; None as `git`."""
    patterns = [f":(glob){folder}/**/*.{kind}" for folder in folders for kind in ("py", "json")]
    listed = git(root, "diff", "--name-only", "--no-renames", commit, "--", *patterns)
    return None if listed is None else listed.decode().splitlines()


def commit_of(root: Path) -> str:
    """Return the commit of a checkout, with -dirty where `changed_files` has any. Tables and pages
    do not count: commands that write them run one after the other in one checkout."""
    head = git(root, "rev-parse", "--short=12", "HEAD")
    if head is None:
        return "not a git checkout"
    return head.decode().strip() + ("-dirty" if changed_files(root) else "")


def environment() -> dict[str, str]:
    """Versions of what results depend on, the commit of a checkout, the time in UTC."""
    from bench.peers.flash_attn_4 import PACKAGE
    from fa4_hd256.run.bug_report import version_of, versions

    return {
        **versions(),
        PACKAGE: version_of(PACKAGE),
        "commit": commit_of(ROOT),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def simulator_machine() -> str:
    """Name the `machine` of figures that the simulator counted, or of its own speed."""
    return f"simulator on a CPU, {len(os.sched_getaffinity(0))} cores"
