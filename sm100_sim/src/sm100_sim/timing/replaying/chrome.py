"""A Chrome trace (chrome://tracing, Perfetto) of a replayed cluster.

A row for each warp with what it does between its waits, and for each SM's tensor core, TMA unit and
the transfers from L2. A clock counts as a nanosecond.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ..machine_code.resources import Action
from ..prediction import Prediction
from .state import REASONS

_WAITS = (Action.WAIT, Action.BAR_SYNC, Action.CLUSTER_WAIT, Action.BULK_WAIT)
#: Gaps between two instructions of a warp from which on they are drawn as a stall, in clocks.
_STALL = 40


def _slice(name: str, track: tuple[int, int], begin: int, end: int, **more: Any) -> dict:
    return {
        "name": name, "ph": "X", "pid": track[0], "tid": track[1], "ts": begin / 1000,
        "dur": max(end - begin, 1) / 1000, "args": more,
    }  # fmt: skip


def events(prediction: Prediction) -> list[dict]:
    """The trace's events: slices of warps and units, and the names of their rows."""
    compiled, run = prediction.compiled, prediction.central
    program = compiled.program
    found: list[dict] = []
    units = {"tensor core": 100, "TMA unit": 101, "L2 to SM": 102}
    for sm in range(program.sms):
        found.append(_named("process_name", sm, 0, f"CTA {sm}"))
        found += [_named("thread_name", sm, row, name) for name, row in units.items()]
    for row, (sm, warp) in enumerate(compiled.warps):
        found.append(_named("thread_name", sm, warp, f"warp {warp}"))
        found += _warp(prediction, row, (sm, warp))
        place = np.arange(program.first[row], program.last[row])
        for event in program.event[place][program.event[place] >= 0]:
            action = program.action[event]
            start, done = int(run.started[event]), int(run.done[event])
            if action[0] == Action.MMA:
                cost = compiled.mma[int(event)]
                found.append(_slice("mma", (sm, units["tensor core"]), start, start + cost.compute))
            elif action[0] == Action.TMA_LOAD:
                found.append(
                    _slice("load", (sm, units["L2 to SM"]), start, done, bytes=int(action[3]))
                )
            elif action[0] == Action.TMA_STORE:
                found.append(
                    _slice("store", (sm, units["TMA unit"]), start, done, bytes=int(action[1]))
                )
    return found


def _named(kind: str, pid: int, tid: int, name: str) -> dict:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _warp(prediction: Prediction, row: int, track: tuple[int, int]) -> list[dict]:
    compiled, run = prediction.compiled, prediction.central
    program = compiled.program
    found = []
    first, last = int(program.first[row]), int(program.last[row])
    issued = run.issued[first:last]
    begin = int(issued[0])
    for place in np.flatnonzero(np.diff(issued) >= _STALL):
        end, resumed = int(issued[place]), int(issued[place + 1])
        why = REASONS[run.reason[first + place + 1]]
        if end > begin:
            found.append(_slice("execute", track, begin, end))
        number = int(program.numbers[first + place + 1])
        text = compiled.function.instructions[number].text
        found.append(_slice(f"wait: {why}", track, end, resumed, before=text))
        begin = resumed
    found.append(_slice("execute", track, begin, int(issued[-1])))
    return found


def write(path: str | Path, prediction: Prediction) -> None:
    """Write the trace of a prediction's central replay."""
    Path(path).write_text(json.dumps({"traceEvents": events(prediction)}))
