"""The smallest shapes under a sanitizer: NVIDIA's compute-sanitizer on a GPU, the simulator's own
in the simulator. A planted fault first shows that the tool sees one here."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from bench.bringup import child
from bench.bringup.outcome import Outcome, Target
from bench.bringup.stages import kernels
from fa4_hd256 import kernels as kernel_sources

TOOL = "compute-sanitizer"
#: Exit status requested from the tool for findings.
FOUND = 86
#: Seconds of one run: the tool slows a kernel down by one to three orders of magnitude.
LIMIT = 500
_CHECKS = ("memcheck", "racecheck", "synccheck")
#: Beside the smallest shapes: several tiles per CTA under the dynamic scheduler, heads that share
#: tiles, packed sequences.
_MORE = (
    "forward full 600x1100 clc",
    "backward causal 300x300 heads 8 of 1",
    "backward full 600x1100 clc",
    "backward packed causal clc",
)
_FAULT, _RACE = "finds a planted fault", "finds a planted race"
#: Planted fault of a step, and its description.
_PLANTED = {
    _FAULT: ("fault", "a store to an unmapped address"),
    _RACE: ("race", "shared memory that two warps exchange without a barrier"),
}


def missing(target: Target) -> str:
    """The tool comes with the CUDA toolkit."""
    if target.is_gpu and shutil.which(TOOL) is None:
        return f"{TOOL} is not on the PATH; it comes with the CUDA toolkit"
    return ""


def items(target: Target) -> list[str]:
    """List what the tool must find, what it must pass, then each kernel that can run here."""
    able = [] if kernels.missing(target) else [f"smallest {name}" for name in kernels.SMALLEST]
    if not target.is_gpu:
        return [f"simulator {name}" for name in able]
    able += _MORE if able else ()
    plain = [f"memcheck {_FAULT}", f"racecheck {_RACE}", "memcheck passes a plain kernel"]
    return [*plain, *(f"{check} {name}" for name in able for check in _CHECKS)]


def run(item: str, target: Target, note: Callable[[str], None]) -> Outcome:
    """One kernel under one tool."""
    tool, _, name = item.partition(" ")
    note(item)
    if tool == "simulator":
        return _simulated(name, target, note)
    if name in _PLANTED:
        planted, what = _PLANTED[name]
        outcome = _under(tool, "planted", planted, target)
        seen = outcome.state == "failed"
        return Outcome(
            "passed" if seen else "failed",
            outcome.text if seen else f"the tool reports no error for {what}",
        )
    if name == "passes a plain kernel":
        return _under(tool, "answers", "triples", target)
    return _under(tool, "kernels", name, target)


def _under(tool: str, stage: str, step: str, target: Target) -> Outcome:
    """A step of another stage in a process under the tool."""
    # Errors of the driver's functions are the step's own to report; cuda-bindings asks the driver
    # for functions that it may not have.
    command = [TOOL, "--tool", tool, "--target-processes", "all", "--report-api-errors", "no",
               "--error-exitcode", str(FOUND), sys.executable, "-m", child.__name__]  # fmt: skip
    order = json.dumps({"stage": stage, "items": [step], "target": target.as_json()}) + "\n"
    done = subprocess.run(command, input=order, capture_output=True, text=True, timeout=LIMIT)
    lines = [line for line in done.stdout.splitlines() if line.startswith("=========")]
    summary = next((line.strip("= ") for line in reversed(lines) if "SUMMARY" in line), "")
    explained = _explained(lines, summary)
    if explained:
        summary += f", all of them bulk copies, which {TOOL} does not order"
    elif done.returncode == FOUND or not re.search("SUMMARY: 0 (errors|hazards)", summary):
        output = "\n".join(lines[:60]) or done.stderr[-2000:]
        text = summary or f"status {done.returncode}, no summary"
        return Outcome("failed", text, {"output": output})
    # No error of the tool: then the step's own word counts.
    said = done.stdout.splitlines()
    ended = [json.loads(line) for line in said if line.startswith('{"end"')]
    if not ended:
        text = f"the step did not end; status {done.returncode}"
        return Outcome("fault", text, {"stderr": done.stderr[-2000:]})
    own = ended[-1]["outcome"]
    return Outcome(own["state"], f"{summary}; {own.get('text', '')}")


def _explained(lines: list[str], summary: str) -> bool:
    """Return True if all hazards of racecheck are writes of bulk copies without a tensor map.

    racecheck takes such a copy for a write of the thread that issues it, and of an arrival that
    gives the buffer back it orders the arriving lane's own reads alone: it reports correct rings as
    well (docs/silicon.md).
    """
    writes = [
        re.search(r"between Write access at .* in (\S+\.py):(\d+)$", line)
        for line in lines
        if "Race reported between" in line
    ]
    shown = re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed", summary)
    if not writes or shown is None or len(writes) != int(shown[1]):
        return False
    copies = _bulk_copies()
    return all(write is not None and int(write[2]) in copies.get(write[1], ()) for write in writes)


@functools.cache
def _bulk_copies() -> dict[str, set[int]]:
    """File name -> lines of the functions of the kernels that issue such copies."""
    found: dict[str, set[int]] = {}
    for path in Path(kernel_sources.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and any(
                isinstance(inner, ast.Attribute) and inner.attr == "CopyBulkG2SOp"
                for inner in ast.walk(node)
            ):
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                found.setdefault(path.name, set()).update(lines)
    return found


def _simulated(step: str, target: Target, note: Callable[[str], None]) -> Outcome:
    sm100_sim = importlib.import_module("sm100_sim")
    # Reports are kept of a number of launches only, so that how many there are says nothing.
    earlier = sm100_sim.last_reports()
    with mock.patch.dict(os.environ, SM100_SIM_SANITIZE="1"):
        outcome = kernels.run(step, target, note)
    reports = [r for r in sm100_sim.last_reports() if not any(r is e for e in earlier)]
    findings = [str(finding) for report in reports for finding in report.findings]
    if findings:
        return Outcome(
            "failed", f"{len(findings)} findings, first: {findings[0]}", {"findings": findings[:20]}
        )
    return Outcome(outcome.state, f"{len(reports)} launches, no finding; {outcome.text}")
