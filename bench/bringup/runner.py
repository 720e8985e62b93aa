"""Runs stages: their steps in child processes with limits, results kept as they come.

The directory of a run holds `target.json` and `results.jsonl`, a line for every step that ended. A
run that is started again goes on behind the last line. A step that neither ends nor says anything
within its limit is a hang: its process is killed, the machine is tested, and the next step goes on
in a new process.
"""

from __future__ import annotations

import fnmatch
import json
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench.bringup.outcome import BAD, Outcome, Target
from bench.bringup.stages import HIDDEN, BringupStage
from bench.processes import Child

#: Seconds until the first step of a process begins: imports, and a context on the GPU.
START_LIMIT = 180.0
#: Seconds before each test whether the machine still answers.
PAUSES = (0.0, 10.0)
RESULTS, TARGET = "results.jsonl", "target.json"

#: Outcomes as JSON by stage and step.
Results = dict[str, dict[str, dict[str, Any]]]


class Stopped(RuntimeError):
    """The machine no longer answers: nothing more is started on it."""


class BringupRun:
    """One bringup: a directory, a target, a listener for every result (stage, item, outcome)."""

    def __init__(
        self, directory: Path, target: Target,
        listen: Callable[[str, str, dict[str, Any]], None] = lambda *_: None,
    ) -> None:  # fmt: skip
        """Raises ValueError for a directory that holds another machine's results."""
        self.directory, self.target, self._listen = directory, target, listen
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / TARGET
        if not path.is_file():
            now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")
            path.write_text(json.dumps({**target.as_json(), "started": now}) + "\n")
        kept = json.loads(path.read_text())
        self.started = kept["started"]
        if Target.from_json(kept) != target:
            raise ValueError(
                f"{directory} holds results of {kept['name']}, and this is {target.name}; name "
                "another directory with --out"
            )
        self.results = read_results(directory)
        self._file = open(directory / RESULTS, "a", encoding="utf-8")

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
        wanted = [
            item
            for item in self._items(stage)
            if not only or any(fnmatch.fnmatchcase(f"{stage.name}/{item}", one) for one in only)
        ]
        while True:
            done = self.results.get(stage.name, {})
            pending = [item for item in wanted if item not in done]
            if not pending or not self._some(stage, pending if stage.batch else pending[:1]):
                return

    def _items(self, stage: BringupStage) -> list[str]:
        """Return names of the steps; none, and an outcome for the whole stage, where it cannot
        run."""
        child = self.start(stage, None)
        try:
            said = child.hear(START_LIMIT)
        except TimeoutError:
            said = None
        child.kill()
        if said is None:
            outcome = Outcome("fault", "its steps cannot be listed", {"stderr": child.last_words()})
        elif said["missing"]:
            outcome = Outcome("skipped", said["missing"])
        else:
            if self.results.get(stage.name, {}).pop("*", None) is not None:
                # The missing thing is there now.
                self._write({"stage": stage.name, "item": "*", "outcome": None})
            found: list[str] = said["items"]
            return found
        self._keep(stage, "*", outcome.as_json())
        return []

    def start(self, stage: BringupStage, items: list[str] | None) -> Child:
        """Start a process that runs steps of a stage, or lists them."""
        log = self.directory / "scratch" / f"{stage.name}.stderr"
        log.parent.mkdir(exist_ok=True)
        child = Child([sys.executable, "-m", f"{__package__}.child"], log)
        child.tell(stage=stage.name, items=items, target=self.target.as_json())
        return child

    def _some(self, stage: BringupStage, items: list[str]) -> bool:
        """Run one process until it has ended, or a step of it has hung. Return False if no step
        began."""
        child = self.start(stage, items)
        current, note, limit, begun, bad = "", "", START_LIMIT, False, False
        hangs = False
        try:
            while (line := child.hear(limit)) is not None:
                limit, begun = stage.limit, True
                if "begin" in line:
                    current, note = line["begin"], ""
                elif "note" in line:
                    note = line["note"]
                else:
                    self._keep(stage, line["end"], line["outcome"])
                    current, bad = "", bad or line["outcome"]["state"] in BAD
        except TimeoutError:
            hangs = True
        finally:
            stays = child.kill()
        if current or not begun:
            where = f"; last it said: {note}" if note else ""
            outcome = Outcome("hang", f"no end within {limit:.0f} s{where}", {"step": note})
            if not hangs:
                text = f"its process ended with status {child.status}{where}"
                outcome = Outcome("fault", text, {"step": note, "stderr": child.last_words()})
            self._keep(stage, current or "*", outcome.as_json())
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


def read_results(directory: Path) -> Results:
    """Return the outcomes in a directory; a line that was cut off is left out."""
    found: Results = {}
    path = directory / RESULTS
    if not path.is_file():
        return found
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end != len(content):
        path.write_bytes(content[:end])
    for line in map(json.loads, content[:end].splitlines()):
        if line.get("again"):
            found.pop(line["stage"], None)
        elif line["outcome"] is None:
            found[line["stage"]].pop(line["item"], None)
        else:
            found.setdefault(line["stage"], {})[line["item"]] = line["outcome"]
    return found
