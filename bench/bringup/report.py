"""The report of a bringup as text and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import Any

from bench.bringup import decisions
from bench.bringup.machine_file import machine
from bench.bringup.outcome import STATES, Target
from bench.bringup.runner import BringupRun
from bench.bringup.stages import HIDDEN, STAGES

Results = dict[str, dict[str, dict[str, Any]]]
#: Format of report.json.
VERSION = 2
#: Stages whose passed steps are counted, not listed.
_COUNTED = ("golden", "rules")


def write_reports(run: BringupRun, stopped: str = "") -> None:
    """Write report.txt and .json into the run's directory. stopped: why it ended early."""
    directory, target, results = run.directory, run.target, run.results
    (directory / "report.txt").write_text(text(target, results, stopped))
    found = content(target, results, run.started, stopped)
    (directory / "report.json").write_text(json.dumps(found, indent=1) + "\n")


def content(target: Target, results: Results, started: str, stopped: str = "") -> dict[str, Any]:
    """Everything as JSON values; of counted stages what passed, and what no decision reads, only as
    a number. started: date and time of the run's first step."""
    stages: dict[str, Any] = {}
    for name, found in results.items():
        if name == HIDDEN[0].name:
            continue
        kept = {
            item: outcome
            for item, outcome in found.items()
            if name not in _COUNTED
            or outcome["state"] != "passed"
            or outcome.get("text")
            or decisions.is_read(name, item)
        }
        stages[name] = {
            "counts": dict(Counter(outcome["state"] for outcome in found.values())),
            "seconds": round(sum(o.get("seconds", 0.0) for o in found.values()), 1),
            "steps": kept,
        }
    made = {
        "bringup": VERSION,
        "date": started,
        "target": target.as_json(),
        "stopped": stopped,
        "stages": stages,
    }
    if target.is_gpu:
        made["decisions"] = [asdict(decision) for decision in decisions.decide(made)]
    described = machine(target, results, started)
    return {**made, "machine": described} if described else made


def summary_line(results: Results, stopped: str = "") -> str:
    """Return how many steps ended in each state."""
    counts = Counter(
        outcome["state"]
        for name, found in results.items()
        if name != HIDDEN[0].name
        for outcome in found.values()
    )
    line = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    return f"{line}; stopped: {stopped}" if stopped else line


def text(target: Target, results: Results, stopped: str = "") -> str:
    """The report for a terminal or a mail."""
    major, minor = target.capability
    lines = [f"bringup of {target.name}, compute capability {major}.{minor}, {target.sms} SMs"]
    lines += [summary_line(results, stopped), ""]
    order = [stage.name for stage in (*STAGES, *HIDDEN[1:])]
    for name in order:
        if name not in results:
            continue
        found = results[name]
        counts = Counter(outcome["state"] for outcome in found.values())
        seconds = sum(outcome.get("seconds", 0.0) for outcome in found.values())
        states = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
        lines.append(f"{name}: {states} ({seconds:.0f} s)")
        for item, outcome in found.items():
            if name in _COUNTED and outcome["state"] == "passed":
                continue
            lines.append(f"  {item}: {outcome['state']}  {outcome.get('text', '')}".rstrip())
        lines.append("")
    if target.is_gpu:
        decided = decisions.decide(content(target, results, ""))
        lines += ["decisions", decisions.text(decided), ""]
    return "\n".join(lines)
