"""Two processes on one GPU: it runs their kernels in turns, and stops one in the middle of a tile.

Each process makes the same call again and again, and each result must have the bits of its first
one. Both begin together, behind their first call. A process that hangs is named by the runner's
limit; its kernels would not give the GPU back.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from bench.bringup.outcome import Outcome, Target
from bench.bringup.stages import kernels
from bench.bringup.stages.kernels import missing as missing

PROCESSES = 2
#: Calls of a process behind its first: on a GPU, and in the simulator.
ON_GPU, IN_SIMULATOR = 300, 1
#: Calls between two signs of life.
SIGNS = 20
#: Several tiles for each pair of a GPU; some of them are at the causal edge.
_ON_GPU = kernels.Call((4096, 4096), (16, 2), {"causal": True})
_IN_SIMULATOR = kernels.Call((257, 255), options={"causal": True})
READY = "ready"


def items(target: Target) -> list[str]:
    return [f"{which} {by}" for which in ("forward", "backward") for by in ("static", "clc")]


def command(item: str, target: Target) -> list[str]:
    return [sys.executable, "-m", __name__, item, json.dumps(target.as_json())]


def run(item: str, target: Target, note: Callable[[str], None]) -> Outcome:
    """Start the processes, let them go on together, and collect what they say."""
    note(f"{item}, {PROCESSES} processes, first calls")
    started = [
        subprocess.Popen(
            command(item, target), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(PROCESSES)
    ]
    try:
        said = [_line(process) for process in started]
        if said != [READY] * PROCESSES:
            return Outcome("fault", f"a process ended in its first call: {said}")
        note(f"{item}, {PROCESSES} processes at once")
        for process in started:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        results = [_result(process, note) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return judged(results)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _result(process: subprocess.Popen[str], note: Callable[[str], None]) -> dict[str, Any] | None:
    """Return the last line of a process; None for one that ended without it."""
    while line := _line(process):
        said = json.loads(line)
        if "calls" in said:
            return said
        note(f"call {said['call']}")
    return None


def judged(results: list[dict[str, Any] | None]) -> Outcome:
    """Return the outcome of what the processes said."""
    ended = [result for result in results if result is not None]
    if len(ended) < len(results):
        lost = len(results) - len(ended)
        return Outcome("fault", f"{lost} of {len(results)} processes ended before their last call")
    different = sum(result["different"] for result in ended)
    calls = sum(result["calls"] for result in ended)
    text = f"{len(ended)} processes, {calls} calls, {different} with other bits than the first"
    return Outcome("failed" if different else "passed", text, {"different": different})


def _work(item: str, target: Target) -> None:
    """Be one of the processes."""
    import torch

    from fa4_hd256 import flash_attn_func

    which, scheduler = item.split()
    call, count = (_ON_GPU, ON_GPU) if target.is_gpu else (_IN_SIMULATOR, IN_SIMULATOR)
    q, k, v, dout = kernels.tensors(call, target.device)
    leaves = [tensor.requires_grad_(which == "backward") for tensor in (q, k, v)]

    def results() -> list[torch.Tensor]:
        out, lse = flash_attn_func(
            *leaves, return_lse=True, use_clc=scheduler == "clc", **call.options
        )
        if which == "forward":
            return [out, lse]
        return [out, lse, *torch.autograd.grad(out, leaves, dout)]

    first = results()
    print(READY, flush=True)
    sys.stdin.readline()
    different = 0
    for number in range(count):
        same = [torch.equal(mine, wanted) for mine, wanted in zip(results(), first, strict=True)]
        different += not all(same)
        if number % SIGNS == 0:
            print(json.dumps({"call": number}), flush=True)
    print(json.dumps({"calls": count, "different": different}), flush=True)


if __name__ == "__main__":
    _work(sys.argv[1], Target.from_json(json.loads(sys.argv[2])))
