"""`python -m sm100_sim SCRIPT.py [args...]`: run a GPU script in the simulator and sum up."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterable

from ..report import Report
from . import attached

_HELP = """usage: python -m sm100_sim SCRIPT.py [args...]

Runs a CuTe DSL script that was written for a B200 on this machine's CPU: device queries answer as
a B200, CUDA tensors lie in host memory, compiled functions launch in the simulator. A summary of
all launches is printed at the end. SM100_SIM_* environment variables apply (sm100_sim/settings.py).
"""


def summary(reports: Iterable[Report]) -> str:
    """One line for each kernel: launches, grid, seconds, warp instructions, findings."""
    kernels: dict[str, list[Report]] = {}
    for report in reports:
        kernels.setdefault(report.kernel, []).append(report)
    if not kernels:
        return "sm100_sim: no kernel was launched"
    lines = [f"sm100_sim: {sum(map(len, kernels.values()))} launches of {len(kernels)} kernels",
             f"{'launches':>8} {'translate s':>11} {'run s':>8} {'warp instr.':>12}  kernel"]
    for name, launches in kernels.items():
        count = sum(part["warps"] for r in launches for part in r.instructions.values())
        last = launches[-1]
        shape = f"grid {last.grid}, cluster {last.cluster}, block {last.block}"
        lines.append(
            f"{len(launches):8} {sum(r.translate_seconds for r in launches):11.2f} "
            f"{sum(r.wall_seconds for r in launches):8.2f} {count:12}  {name[:80]} ({shape})"
        )
        findings = dict.fromkeys(text for report in launches for text in report.findings)
        lines += [f"{'':8} finding: {text}" for text in findings]
    return "\n".join(lines)


def run_script(arguments: list[str]) -> int:
    """Run the script `arguments[0]` with the rest as its arguments; returns the exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_HELP, file=sys.stderr if not arguments else sys.stdout)
        return 0 if arguments else 2
    script = arguments[0]
    if not os.path.isfile(script):
        print(f"sm100_sim: {script!r} is not a file", file=sys.stderr)
        return 2
    saved = sys.argv, list(sys.path)
    sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.abspath(script))
    try:
        with attached() as session:
            try:
                runpy.run_path(script, run_name="__main__")
            finally:
                print(summary(session.reports))
    finally:
        sys.argv, sys.path[:] = saved
    return 0
