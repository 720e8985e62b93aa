"""The command `bringup`: whom it asks for the GPU, which stages it runs, what it prints."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.bringup import decisions
from bench.bringup.outcome import BAD, Target, simulated
from bench.bringup.report import summary_line, write_reports
from bench.bringup.runner import TARGET, BringupRun, Stopped
from bench.bringup.stages import HIDDEN, named
from sm100_sim import device as simulated_device

#: Seconds that querying the driver for its GPU may take.
ASK_LIMIT = 120
_ASK = (
    f"import json; from {__package__}.stages.machine import find_target; "
    "print(json.dumps(find_target().as_json()))"
)


def find_target(simulate: bool) -> Target:
    """The GPU of this machine, or the simulator; a separate process queries the driver. Raises
    ValueError for a driver that does not answer, one whose GPU cannot be used, or a GPU that the
    simulator does not know."""
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
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or ["no reason given"])[-1]
        if _has_driver():
            raise ValueError(
                f"this machine has NVIDIA's driver, but its GPU cannot be used: {last}; mend that "
                "(cuda-bindings and numpy must be installed), or pass --simulate"
            )
        print(f"no GPU here ({last}); running in the simulator", file=sys.stderr)
        return simulated(simulated_device())
    return Target.from_json(json.loads(asked.stdout))


def _has_driver() -> bool:
    """Return True if this machine has, or should have, an NVIDIA GPU."""
    return Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None


def _kept_target(directory: Path) -> Target:
    """The machine whose results a directory holds: a report may be written anywhere."""
    path = directory / TARGET
    if not path.is_file():
        raise ValueError(f"{directory} holds no results of a bringup; name another one with --out")
    return Target.from_json(json.loads(path.read_text()))


def _report(path: Path) -> dict[str, Any]:
    """Return a report.json. Raises ValueError for a file that is not there, or no JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a bringup's report.json: {error}") from None


def _say(stage: str, item: str, outcome: dict) -> None:
    if outcome["state"] == "passed" and stage in ("golden", "rules", "answers"):
        return
    print(f"{stage}/{item}: {outcome['state']}  {outcome.get('text', '')[:160]}", flush=True)


def main(arguments: argparse.Namespace) -> int:
    """Run the command: 0, 1 if a step failed, faulted or hung, 3 if the machine is silent."""
    if arguments.decide is not None:
        print(decisions.text(decisions.decide(_report(arguments.decide))))
        return 0
    target = _kept_target(arguments.out) if arguments.report else find_target(arguments.simulate)
    run = BringupRun(arguments.out, target, _say)
    print(f"bringup of {target.name} in {arguments.out}", flush=True)
    for name in arguments.again:
        run.forget(name)
    stopped = ""
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
    if stopped:
        return 3
    judged = {
        name: found
        for name, found in run.results.items()
        if name not in [stage.name for stage in HIDDEN]
    }
    bad = any(o["state"] in BAD for found in judged.values() for o in found.values())
    return 1 if bad else 0
