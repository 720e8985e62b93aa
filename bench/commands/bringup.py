"""`python -m bench bringup`: the first hour on a GPU (docs/bringup.md).

Here is whom it asks for the GPU, which stages it runs, and what it prints.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.bringup import decisions
from bench.bringup.outcome import BAD, Target, simulated
from bench.bringup.report import summary_line, write_reports
from bench.bringup.runner import TARGET, BringupRun, Stopped
from bench.bringup.stages import HIDDEN, named
from fa4_hd256.run.bug_report import has_driver
from sm100_sim import device as simulated_device

#: Seconds that querying the driver for its GPU may take.
ASK_LIMIT = 120
_ASK = (
    "import json; from bench.bringup.stages.machine import find_target; "
    "print(json.dumps(find_target().as_json()))"
)


def find_target(simulate: bool) -> Target:
    """Return the GPU of this machine, or the simulator; a separate process queries the driver.
    Raises ValueError for a driver that does not answer, one whose GPU cannot be used, or a GPU that
    the simulator does not know."""
    if simulate:
        return simulated(simulated_device())
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=ASK_LIMIT
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"the CUDA driver has not named its GPU within {ASK_LIMIT} s: it hangs, or another "
            "process holds it; look at nvidia-smi, or run in the simulator with --simulate"
        ) from None
    if not asked.returncode:
        return Target.from_json(json.loads(asked.stdout))
    last = (asked.stderr.strip().splitlines() or ["no reason given"])[-1]
    if has_driver():
        raise ValueError(
            f"this machine has NVIDIA's driver, but its GPU cannot be used: {last}; mend that "
            "(cuda-bindings and numpy must be installed), or pass --simulate"
        )
    print(f"no GPU here ({last}); running in the simulator", file=sys.stderr)
    return simulated(simulated_device())


def _read(path: Path, lacking: str) -> Any:
    """Return a file's JSON. Raises ValueError with `lacking` where it cannot be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{lacking} ({error})") from None


def _say(stage: str, item: str, outcome: dict) -> None:
    if outcome["state"] == "passed" and stage in ("golden", "rules", "answers"):
        return
    print(f"{stage}/{item}: {outcome['state']}  {outcome.get('text', '')[:160]}", flush=True)


def main(arguments: argparse.Namespace) -> int:
    """Run the command: 0, 1 if a step failed, faulted or hung, 3 if the machine is silent."""
    if arguments.decide is not None:
        lacking = f"{arguments.decide} cannot be read as a bringup's report.json"
        print(decisions.text(decisions.decide(_read(arguments.decide, lacking))))
        return 0
    if arguments.report:
        # A report may be written anywhere, of the machine whose results the directory holds.
        lacking = f"{arguments.out} holds no results of a bringup; name another one with --out"
        target = Target.from_json(_read(arguments.out / TARGET, lacking))
    else:
        target = find_target(arguments.simulate)
    run, stopped = BringupRun(arguments.out, target, _say), ""
    print(f"bringup of {target.name} in {arguments.out}", flush=True)
    for name in arguments.again:
        run.forget(name)
    stages = [*([named("planted")] if arguments.plant else []), *map(named, arguments.stages)]
    try:
        for stage in [] if arguments.report else stages:
            print(f"stage {stage.name}: {stage.settles}", flush=True)
            run.stage(stage, arguments.only)
            write_reports(run)
    except Stopped as error:
        stopped = str(error)
    write_reports(run, stopped)
    print(summary_line(run.results, stopped), flush=True)
    hidden = [stage.name for stage in HIDDEN]
    judged = [found for name, found in run.results.items() if name not in hidden]
    bad = any(outcome["state"] in BAD for found in judged for outcome in found.values())
    return 3 if stopped else int(bad)
