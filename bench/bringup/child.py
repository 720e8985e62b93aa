"""One process of the bringup: `python -m bench.bringup.child ORDER`.

ORDER is a JSON file: stage, target, items (None to list them only), progress. The file `progress`
gets a line of JSON before each event. The runner reads it while this process lives, and after it
was killed.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.bringup.outcome import Outcome, Target
from bench.bringup.stages import named

#: Exit status after an outcome that may have left a broken context behind.
BROKEN = 3


class Progress:
    """Lines of the progress file, each on its way to the disk before the next step."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "a", encoding="utf-8")

    def write(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def attempt(module: Any, item: str, target: Target, progress: Progress) -> Outcome:
    """Run one step; an exception is a fault, or a hang: one that the simulator has proved, or a
    command that took too long."""
    begin = time.perf_counter()
    try:
        outcome = module.run(item, target, lambda text: progress.write(note=text))
    except Exception as error:  # whatever went wrong belongs into the report
        is_hang = type(error).__name__ in ("Hang", "TimeoutExpired")
        place = traceback.extract_tb(error.__traceback__)[-1]
        outcome = Outcome(
            "hang" if is_hang else "fault",
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}",
            {"message": str(error)[:4000], "at": f"{Path(place.filename).name}:{place.lineno}"},
        )
    return replace(outcome, seconds=round(time.perf_counter() - begin, 3))


def _nothing(target: Target) -> str:
    """`missing` of a stage that needs nothing."""
    return ""


def main(path: str) -> int:
    """Run an order; the exit status."""
    order = json.loads(Path(path).read_text())
    progress = Progress(Path(order["progress"]))
    module = named(order["stage"]).module
    target = Target.from_json(order["target"])
    if order["items"] is None:
        missing = getattr(module, "missing", _nothing)(target)
        progress.write(missing=missing, items=[] if missing else list(module.items(target)))
        return 0
    for item in order["items"]:
        progress.write(begin=item)
        outcome = attempt(module, item, target, progress)
        progress.write(end=item, outcome=outcome.as_json())
        if outcome.state in ("fault", "hang") or outcome.values.get("broken"):
            # A context that has seen an error answers every call with it; nothing is torn down.
            os._exit(BROKEN)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
