"""Host time of a call: what Python, checks and launch take before the call returns."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from bench.bringup.outcome import Outcome, Target
from bench.bringup.stages import kernels

#: Calls of a repetition: few enough that the GPU's queue does not fill up.
CALLS, REPETITIONS = 20, 15
_CALL = kernels.Call((128, 128), (2, 1), {"causal": True})


def missing(target: Target) -> str:
    """Return why host time cannot be measured here: a simulated call runs the kernel before it
    returns."""
    return (
        kernels.missing(target)
        if target.is_gpu
        else ("a simulated call returns when the kernel has run; host time needs a GPU")
    )


def items(target: Target) -> list[str]:
    """A forward alone, and with its backward."""
    return ["forward", "forward and backward"]


def run(item: str, target: Target, note: Callable[[str], None]) -> Outcome:
    """Microseconds from call to return, the GPU idle before each repetition."""
    import torch

    from fa4_hd256 import flash_attn_func

    q, k, v, dout = kernels.tensors(_CALL, target.device)
    needs_gradient = item != "forward"
    inputs = [t.requires_grad_(needs_gradient) for t in (q, k, v)]

    def call() -> None:
        out = flash_attn_func(*inputs, **_CALL.options)
        if needs_gradient:
            torch.autograd.grad(out, inputs, dout)

    note(f"{item}, warm-up")
    for _ in range(3):
        call()
    found = []
    for repetition in range(REPETITIONS):
        torch.cuda.synchronize()
        note(f"{item}, repetition {repetition}")
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - begin) / CALLS * 1e6)
    low, middle, high = (round(float(x), 1) for x in np.percentile(found, (25, 50, 75)))
    values = {"value": middle, "low": low, "high": high, "unit": "microseconds", "constant": ""}
    return Outcome("measured", f"{middle} us a call ({low} to {high})", values)
