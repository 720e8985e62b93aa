"""The report of a bringup as text and as JSON, and its figures as a machine of the timing model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from bench.bringup import decisions
from bench.bringup.outcome import STATES, Target
from bench.bringup.runner import BringupRun, Results
from bench.bringup.stages import HIDDEN, STAGES

#: Format of report.json.
VERSION = 2
#: Stages whose passed steps are counted, not listed.
_COUNTED = ("golden", "rules")
#: Constants that a step of the stage `machine` tells: name -> (field, factor, unit).
_OF_THE_DEVICE = {"sms": ("SMs", 1.0, "SMs"), "l2_megabytes": ("L2, bytes", 1e-6, "MB")}


def write_reports(run: BringupRun, stopped: str = "") -> None:
    """Write report.txt and .json into the run's directory. stopped: why it ended early."""
    (run.directory / "report.txt").write_text(text(run.target, run.results, stopped))
    found = content(run.target, run.results, run.started, stopped)
    (run.directory / "report.json").write_text(json.dumps(found, indent=1) + "\n")


def _shown(results: Results) -> Results:
    """Return the results without those of the question whether the machine still computes."""
    return {name: found for name, found in results.items() if name != HIDDEN[0].name}


def content(target: Target, results: Results, started: str, stopped: str = "") -> dict[str, Any]:
    """Return everything as JSON values; of counted stages what passed, and what no decision reads,
    only as a number. started: date and time of the run's first step."""
    stages = {
        name: {
            "counts": dict(Counter(outcome["state"] for outcome in found.values())),
            "seconds": round(sum(o.get("seconds", 0.0) for o in found.values()), 1),
            "steps": {
                item: outcome
                for item, outcome in found.items()
                if name not in _COUNTED
                or outcome["state"] != "passed"
                or outcome.get("text")
                or decisions.is_read(name, item)
            },
        }
        for name, found in _shown(results).items()
    }
    made = {
        "bringup": VERSION, "date": started, "target": target.as_json(), "stopped": stopped,
        "stages": stages,
    }  # fmt: skip
    if target.is_gpu:
        made["decisions"] = [asdict(decision) for decision in decisions.decide(made)]
    described = machine(target, results, started)
    return {**made, "machine": described} if described else made


def _counts(outcomes: Iterable[Mapping[str, Any]]) -> str:
    """Say how many outcomes are in each state."""
    counts = Counter(outcome["state"] for outcome in outcomes)
    return ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])


def summary_line(results: Results, stopped: str = "") -> str:
    """Say how many steps ended in each state."""
    line = _counts(outcome for found in _shown(results).values() for outcome in found.values())
    return f"{line}; stopped: {stopped}" if stopped else line


def text(target: Target, results: Results, stopped: str = "") -> str:
    """Return the report for a terminal or a mail."""
    major, minor = target.capability
    lines = [f"bringup of {target.name}, compute capability {major}.{minor}, {target.sms} SMs"]
    lines += [summary_line(results, stopped), ""]
    names = [stage.name for stage in (*STAGES, *HIDDEN[1:])]
    for name, found in ((name, results[name]) for name in names if name in results):
        seconds = sum(outcome.get("seconds", 0.0) for outcome in found.values())
        lines.append(f"{name}: {_counts(found.values())} ({seconds:.0f} s)")
        for item, outcome in found.items():
            if name not in _COUNTED or outcome["state"] != "passed":
                lines.append(f"  {item}: {outcome['state']}  {outcome.get('text', '')}".rstrip())
        lines.append("")
    if target.is_gpu:
        decided = decisions.decide(content(target, results, ""))
        lines += ["decisions", decisions.text(decided), ""]
    return "\n".join(lines)


def machine(target: Target, results: Results, date: str) -> dict[str, Any] | None:
    """Return a machine file's content; None where nothing was measured on a GPU. `--machine FILE`
    of bench and of sm100_sim.timing takes a report that has it.

    Each constant has value, quartiles as its range, unit and where it was measured. Constants that
    no figure sets are those of the machine it is like: an H200's for compute capability 9.0, a
    B300's for 10.3, else a B200's. A difference of clocks that came out below 0 sets none.
    """
    micro = results.get("micro", {})
    where = f"measured on {target.name}, {date}: bringup"
    constants: dict[str, Any] = {}
    for name, outcome in micro.items():
        values: dict[str, Any] = outcome["values"] if outcome["state"] == "measured" else {}
        if values.get("constant") and values["value"] >= 0:
            constants[values["constant"]] = {
                "value": values["value"], "range": [max(values["low"], 0.0), values["high"]],
                "unit": values["unit"], "source": f"{where}, {name}: {values['what']}",
            }  # fmt: skip
    if not target.is_gpu or not constants:
        return None
    device = results.get("machine", {}).get("device", {}).get("values", {})
    for constant, (field, factor, unit) in _OF_THE_DEVICE.items():
        if field in device:
            value, source = round(device[field] * factor, 3), f"{where}, the driver's answer"
            constants[constant] = {"value": value, "unit": unit, "source": source}
    measured = micro.get("CTA reuse", {}).get("values")
    if measured is not None and "clock_ghz" in constants:
        # `cta_reuse` is in clocks; its step measures time, and another one the clock.
        clock = 1e3 * constants["clock_ghz"]["value"]
        value, *ends = (round(clock * measured[key], 1) for key in ("value", "low", "high"))
        source = f"{where}, CTA reuse: {measured['what']}"
        constants["cta_reuse"] = {"value": value, "range": ends, "unit": "clocks", "source": source}
    other = like(target)
    basis = f"{len(constants)} constants {where}; the others as {other.upper()}"
    return {"name": target.name, "basis": basis, "like": other, "constants": constants}


def like(target: Target) -> str:
    """Return the machine file whose constants stand in for what is not measured."""
    return {(9, 0): "h200", (10, 3): "b300"}.get(target.capability, "b200")
