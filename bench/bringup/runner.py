"""Runs stages: their steps in child processes with limits, results kept as they come.

The directory of a run holds `target.json` and `results.jsonl`, a line for every step that ended. A
run that is started again goes on behind the last line. A step that neither ends nor says anything
within its limit is a hang: its process is killed, the machine is tested, and the next step goes on
in a new process.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench.bringup.outcome import BAD, Outcome, Target
from bench.bringup.stages import HIDDEN, BringupStage

#: Seconds until the first step of a process begins: imports, and a context on the GPU.
START_LIMIT = 180.0
#: Seconds that a killed process may take to go; the driver first ends what it has on the GPU.
KILL_LIMIT = 60.0
POLL = 0.02
#: Seconds before each test whether the machine still answers.
PAUSES = (0.0, 10.0)
RESULTS, TARGET = "results.jsonl", "target.json"


class Stopped(RuntimeError):
    """The machine no longer answers: nothing more is started on it."""


class Child:
    """A child process and what it has said."""

    def __init__(self, directory: Path, order: dict[str, Any]) -> None:
        scratch = directory / "scratch"
        scratch.mkdir(parents=True, exist_ok=True)
        self._progress = scratch / "progress.jsonl"
        self._progress.write_bytes(b"")
        self._read = 0
        self.errors = scratch / f"{order['stage']}.stderr"
        order_file = scratch / "order.json"
        order_file.write_text(json.dumps({**order, "progress": str(self._progress)}))
        with open(self.errors, "ab") as sink:
            # A session of its own: what the child starts is killed with it.
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.child", str(order_file)],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines written since the last call."""
        content = self._progress.read_bytes()
        end = content.rfind(b"\n") + 1
        fresh, self._read = content[self._read : end], end
        return [json.loads(line) for line in fresh.splitlines()]

    @property
    def status(self) -> int | None:
        return self._process.poll()

    def kill(self) -> str:
        """End the process and all that it started; what to say if it does not go, or nothing."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(KILL_LIMIT)
        except subprocess.TimeoutExpired:
            return (
                f"process {self._process.pid} was killed and is still there after "
                f"{KILL_LIMIT:.0f} s: the driver does not let go of it"
            )
        return ""

    def last_words(self) -> str:
        """The end of what it wrote to stderr."""
        return self.errors.read_text(errors="replace")[-2000:].strip()


class BringupRun:
    """One bringup: a directory, a target, a listener for every result (stage, item, outcome)."""

    def __init__(
        self,
        directory: Path,
        target: Target,
        listen: Callable[[str, str, dict[str, Any]], None] = lambda *_: None,
    ) -> None:
        self.directory, self.target, self._listen = directory, target, listen
        directory.mkdir(parents=True, exist_ok=True)
        self._check_target()
        self.results = read_results(directory)
        self._file = open(directory / RESULTS, "a", encoding="utf-8")

    def _check_target(self) -> None:
        """The directory's machine and when its run began; it is written once."""
        path = self.directory / TARGET
        if not path.is_file():
            path.write_text(json.dumps({**self.target.as_json(), "started": now()}) + "\n")
        kept = json.loads(path.read_text())
        self.started = kept["started"]
        if Target.from_json(kept) != self.target:
            raise ValueError(
                f"{self.directory} holds results of {kept['name']}, and this is "
                f"{self.target.name}; name another directory with --out"
            )

    def forget(self, stage: str) -> None:
        """Drop the results of a stage, so that it runs again."""
        self.results.pop(stage, None)
        self._write({"stage": stage, "again": True})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def _keep(self, stage: BringupStage, item: str, outcome: dict[str, Any]) -> None:
        self.results.setdefault(stage.name, {})[item] = outcome
        self._write({"stage": stage.name, "item": item, "outcome": outcome})
        self._listen(stage.name, item, outcome)

    def stage(self, stage: BringupStage, only: Sequence[str] = ()) -> None:
        """Run the steps of a stage that have no result; only: patterns of STAGE/STEP."""
        items = self._items(stage)
        if items is None:
            return
        wanted = [
            item
            for item in items
            if not only
            or any(fnmatch.fnmatchcase(f"{stage.name}/{item}", pattern) for pattern in only)
        ]
        while True:
            done = self.results.get(stage.name, {})
            pending = [item for item in wanted if item not in done]
            if not pending:
                return
            if not self._some(stage, pending if stage.batch else pending[:1]):
                return

    def _items(self, stage: BringupStage) -> list[str] | None:
        """Names of the steps; None, and an outcome for all of it, where there are none."""
        child = self._start(stage, None)
        said = self._listing(child)
        if said is None:
            outcome = Outcome("fault", "its steps cannot be listed", {"stderr": child.last_words()})
        elif said["missing"]:
            outcome = Outcome("skipped", said["missing"])
        else:
            if self.results.get(stage.name, {}).pop("*", None) is not None:
                # The missing thing is there now.
                self._write({"stage": stage.name, "item": "*", "outcome": None})
            return said["items"]
        self._keep(stage, "*", outcome.as_json())
        return None

    def _start(self, stage: BringupStage, items: list[str] | None) -> Child:
        return Child(
            self.directory, {"stage": stage.name, "items": items, "target": self.target.as_json()}
        )

    @staticmethod
    def _listing(child: Child) -> dict[str, Any] | None:
        end = time.monotonic() + START_LIMIT
        while child.status is None and time.monotonic() < end:
            time.sleep(POLL)
        if child.status is None:
            child.kill()
        lines = child.lines()
        return lines[0] if lines else None

    def _some(self, stage: BringupStage, items: list[str]) -> bool:
        """One process: until it has ended, or a step of it has hung. False if no step began."""
        child = self._start(stage, items)
        current, note, limit, begun, bad = "", "", START_LIMIT, False, False
        last = time.monotonic()
        try:
            while True:
                ended = child.status is not None
                for line in child.lines():
                    last, limit, begun = time.monotonic(), stage.limit, True
                    if "begin" in line:
                        current, note = line["begin"], ""
                    elif "note" in line:
                        note = line["note"]
                    else:
                        self._keep(stage, line["end"], line["outcome"])
                        current, bad = "", bad or line["outcome"]["state"] in BAD
                if ended or time.monotonic() - last > limit:
                    break
                time.sleep(POLL)
        finally:
            stays = child.kill()
        if current or not begun:
            self._keep(stage, current or "*", _ending(child, ended, note, limit).as_json())
        if stays:
            raise Stopped(stays)
        if stage.checked and (current or not begun or bad):
            self._check_answers()
        return begun

    def _check_answers(self) -> None:
        """Raise Stopped unless the machine still computes; it is tested twice."""
        answers = HIDDEN[0]
        for pause in PAUSES:
            time.sleep(pause)
            self.results.pop(answers.name, None)
            self._some(answers, ["triples"])
            said = self.results.get(answers.name, {}).get("triples", {})
            if said.get("state") == "passed":
                return
        raise Stopped(f"{self.target.name} no longer answers; the stages that are left did not run")


def _ending(child: Child, ended: bool, note: str, limit: float) -> Outcome:
    """Return the outcome of a step whose process ended, or was killed, while it ran."""
    where = f"; last it said: {note}" if note else ""
    if not ended:
        return Outcome("hang", f"no end within {limit:.0f} s{where}", {"step": note})
    return Outcome(
        "fault",
        f"its process ended with status {child.status}{where}",
        {"step": note, "stderr": child.last_words()},
    )


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")


def read_results(directory: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Outcomes by stage and item of a directory; a line that was cut off is left out."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    path = directory / RESULTS
    if not path.is_file():
        return found
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end != len(content):
        path.write_bytes(content[:end])
    for raw in content[:end].splitlines():
        line = json.loads(raw)
        if line.get("again"):
            found.pop(line["stage"], None)
        elif line["outcome"] is None:
            found[line["stage"]].pop(line["item"], None)
        else:
            found.setdefault(line["stage"], {})[line["item"]] = line["outcome"]
    return found
