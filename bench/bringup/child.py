"""One process of the bringup: `python -m bench.bringup.child`.

Its order is a line of JSON on stdin: stage, target, items (None to list them only). It says a line
of JSON before each event, which whoever started it reads while it lives, and after it was killed.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.bringup.outcome import Outcome, Target
from bench.bringup.stages import named
from bench.processes import answers

#: Exit status after an outcome that may have left a broken context behind.
BROKEN = 3


def attempt(module: Any, item: str, target: Target, note: Callable[[str], None]) -> Outcome:
    """Run one step; an exception is a fault, or a hang: one that the simulator has proved, or a
    command that took too long."""
    begin = time.perf_counter()
    try:
        outcome = module.run(item, target, note)
    except Exception as error:  # whatever went wrong belongs into the report
        is_hang = type(error).__name__ in ("Hang", "TimeoutExpired")
        place = traceback.extract_tb(error.__traceback__)[-1]
        outcome = Outcome(
            "hang" if is_hang else "fault",
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}",
            {"message": str(error)[:4000], "at": f"{Path(place.filename).name}:{place.lineno}"},
        )
    return replace(outcome, seconds=round(time.perf_counter() - begin, 3))


def main() -> int:
    """Run an order; the exit status."""
    order, said = json.loads(sys.stdin.readline()), answers()

    def say(**line: Any) -> None:
        print(json.dumps(line), file=said, flush=True)

    module = named(order["stage"]).module
    target = Target.from_json(order["target"])
    if order["items"] is None:
        missing = module.missing(target) if hasattr(module, "missing") else ""
        say(missing=missing, items=[] if missing else list(module.items(target)))
        return 0
    for item in order["items"]:
        say(begin=item)
        outcome = attempt(module, item, target, lambda text: say(note=text))
        say(end=item, outcome=outcome.as_json())
        if outcome.state in ("fault", "hang") or outcome.values.get("broken"):
            # A context that has seen an error answers every call with it; nothing is torn down.
            os._exit(BROKEN)
    return 0


if __name__ == "__main__":
    sys.exit(main())
