"""KV splits that are joined by a kernel launched while they still run, and rows of a decode tile.

A causal call over KV splits lets its combining kernel be launched at once, and under the dynamic
scheduler asks for further tiles at the same time. Neither Hopper nor the simulator can show what a
GPU does where both meet, so the call is repeated many times. The static scheduler's bits are right.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from bench.bringup.outcome import Outcome, Target
from bench.bringup.stages import choices, graph, kernels
from bench.bringup.stages.kernels import missing as missing

#: Calls, or replays of a graph of one call: on a GPU, and in the simulator.
ON_GPU, IN_SIMULATOR = 10_000, 1
#: Calls between two comparisons with the right bits; results between them are overwritten.
COMPARED = 10
#: Calls between two signs of life, and seconds after which no further call is made.
SIGNS, LONGEST = 500, 240.0
_ON_GPU = kernels.Call((512, 65536), (8, 2), {"causal": True, "num_splits": 8})
_IN_SIMULATOR = kernels.Call((128, 512), (2, 1), {"causal": True, "num_splits": 2})
#: Rows of a decode tile: query heads of a KV head, with one query each.
ROWS = (16, 32, 64)
_TIMED = "rows of a tile"


def items(target: Target) -> list[str]:
    """Graphs and times need a GPU."""
    return ["repeated calls", *(("repeated replays", _TIMED) if target.is_gpu else ())]


def run(item: str, target: Target, note: Callable[[str], None]) -> Outcome:
    """Repeat the call under the dynamic scheduler, or time tiles of different rows."""
    if item == _TIMED:
        note("16, 32 and 64 rows")
        return judged_rows(choices.medians(partial(_of_rows, target)))
    call, count = (_ON_GPU, ON_GPU) if target.is_gpu else (_IN_SIMULATOR, IN_SIMULATOR)
    note(f"{item}, first calls")
    inputs = kernels.tensors(call, target.device)[:3]
    wanted = _results(inputs, call, use_clc=False)
    if item == "repeated calls":
        return repeated(lambda: _results(inputs, call, use_clc=True), wanted, count, note)
    return repeated(_replay(inputs, call), wanted, count, note)


def repeated(
    results: Callable[[], Any], wanted: Any, count: int, note: Callable[[str], None]
) -> Outcome:
    """Call `results` `count` times and compare every tenth with `wanted`, and the last. What ends
    early, after `LONGEST` seconds, has settled nothing unless a call differed."""
    import torch

    different = compared = done = 0
    begin = time.monotonic()
    for number in range(count):
        taken = time.monotonic() - begin
        if taken > LONGEST:
            break
        if number % SIGNS == 0:
            note(f"call {number} of {count}, {taken:.1f} s")
        found = results()
        done += 1
        if number % COMPARED == 0 or number == count - 1:
            compared += 1
            different += not all(map(torch.equal, found, wanted))
    text = f"{done} calls, {different} of {compared} compared with other bits than the static ones"
    values = {"different": different, "calls": done}
    if done < count and not different:
        text += f"; {count} were to be made, {LONGEST:.0f} s have passed"
        return Outcome("not measured", text, values)
    return Outcome("failed" if different else "passed", text, values)


def judged_rows(found: dict[str, float]) -> Outcome:
    """Return the outcome of the seconds by rows; the timing model expects them to be equal."""
    base = found[str(ROWS[0])]
    text = ", ".join(f"{rows} rows {1e6 * time:.1f} us" for rows, time in found.items())
    ratios = {f"of {rows} rows": round(time / base, 3) for rows, time in found.items()}
    return Outcome("measured", f"{text}; the model says equal times", ratios)


def _results(inputs: Any, call: kernels.Call, use_clc: bool) -> Any:
    from fa4_hd256 import flash_attn_func

    return flash_attn_func(*inputs, return_lse=True, use_clc=use_clc, **call.options)


def _replay(inputs: Any, call: kernels.Call) -> Callable[[], Any]:
    """Return a replay of a graph of the call under the dynamic scheduler. It writes over zeros, or
    results of the replay before would stand for those that it leaves out."""
    captured_graph, results = graph.capture(lambda: _results(inputs, call, use_clc=True))

    def replay() -> Any:
        for tensor in results:
            tensor.zero_()
        captured_graph.replay()
        return results

    return replay


def _of_rows(target: Target) -> dict[str, Callable[[], Any]]:
    """Return a call for each number of rows: 16 sequences of 8,192 keys under 8 KV heads."""
    from fa4_hd256 import flash_attn_func

    calls: dict[str, Callable[[], Any]] = {}
    for rows in ROWS:
        call = kernels.Call((1, 8192), (8 * rows, 8), batch=16)
        q, k, v, _ = kernels.tensors(call, target.device)
        calls[str(rows)] = partial(flash_attn_func, q, k, v)
    return calls
