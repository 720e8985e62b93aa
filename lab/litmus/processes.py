"""Runs the probes and litmus kernels on a GPU, each in a process of its own with a time limit."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

from sm100_sim.interrupt import starting_workers
from sm100_sim.tools.golden.record import Gpu

from .probes import PROBES

LIMIT = 120.0


def _work(connection: Any, name: str, seconds: float) -> None:
    try:
        connection.send(PROBES[name](Gpu(), seconds))
    except Exception as error:  # reported by the parent
        connection.send({"failed": f"{type(error).__name__}: {error}"})


def run(out: Path, seconds: float, names: list[str] | None = None) -> dict[str, Any]:
    """Run the probes; return their results, also written to `out` as JSON; seconds: of each litmus
    kernel.

    A probe that fails or hangs has {"failed": why}.
    """
    found: dict[str, Any] = {"machine": Gpu().description()}
    context = multiprocessing.get_context("spawn")
    for name in names or PROBES:
        mine, other = context.Pipe()
        process = context.Process(target=_work, args=(other, name, seconds), daemon=True)
        with starting_workers():
            process.start()
        other.close()
        try:
            found[name] = mine.recv() if mine.poll(LIMIT) else {"failed": f"over {LIMIT:.0f} s"}
        except EOFError:
            found[name] = {"failed": "its process ended"}
        process.kill()
        process.join()
        print(name, json.dumps(found[name])[:1500], flush=True)
        out.write_text(json.dumps(found, indent=1) + "\n")
    return found
