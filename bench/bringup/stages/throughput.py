"""Throughput beside other kernels: `python -m bench throughput`, a process for each group of cases,
and of the dense ones, which are most, for each pair of heads: what a hang costs is one process."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.bringup.outcome import Outcome, Target
from bench.bringup.stages import kernels

LIMIT = 1100
#: Groups of bench's suite, with heads where a group is split; the tokens above which a case is left
#: out of the first hour.
GROUPS = (
    *(f"dense {heads}" for heads in ("32/2", "16/2", "24/4", "16/16", "8/8")), "varlen", "window",
    "few KV heads", "unequal",
)  # fmt: skip
_TOKENS = 32768


def missing(target: Target) -> str:
    """A GPU that the kernels run on, and bench, which lies in a checkout."""
    if not target.is_gpu:
        return "needs a GPU; `python -m bench throughput --modelled` gives the model's figures"
    if importlib.util.find_spec("bench") is None:
        return "the package bench is not here; run it in a checkout"
    return kernels.missing(target)


def items(target: Target) -> list[str]:
    return [f"{direction} {group}" for direction in ("forward", "backward") for group in GROUPS]


def run(item: str, target: Target, note: Callable[[str], None]) -> Outcome:
    """One group; every provider that is installed: flash-attn-4, cuDNN through PyTorch, ours."""
    direction, group, heads = selection(item)
    with tempfile.TemporaryDirectory(prefix="fa4_hd256_") as directory:
        path = Path(directory, "table.json")
        command = [sys.executable, "-m", "bench", "throughput", "--direction", direction,
                   "--group", group, *heads, "--max-tokens", str(_TOKENS),
                   "--json", str(path)]  # fmt: skip
        note(" ".join(command[1:-4]))
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
        if not path.exists():
            last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            return Outcome(
                "fault", f"status {done.returncode}: {last}", {"stderr": done.stderr[-4000:]}
            )
        return judged(json.loads(path.read_text())["tables"])


def selection(item: str) -> tuple[str, str, list[str]]:
    """Return (direction, group, options of bench that choose the heads) of an item."""
    direction, _, group = item.partition(" ")
    if "/" not in group:
        return direction, group, []
    group, heads = group.rsplit(" ", 1)
    return direction, group, ["--heads", heads]


def judged(tables: list[dict]) -> Outcome:
    """Judge our rows of bench's table."""
    rows, values = tables[0]["rows"], {"tables": tables}
    broken = [row for row in rows if row["details"]["ours"].get("failed")]
    if not broken:
        return Outcome("measured", f"{len(rows)} rows", values)
    row = broken[0]
    first = f"{row['shape']} {row['heads']} {row['mask']}: {row['details']['ours']['status']}"
    text = f"{len(broken)} of {len(rows)} rows of ours, first {first}"
    return Outcome("failed", text, values)
