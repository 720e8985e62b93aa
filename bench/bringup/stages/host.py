"""Host time of a call: what Python, checks and launch take before the call returns."""

from __future__ import annotations

from collections.abc import Callable

from bench.bringup.outcome import Outcome, Target
from bench.bringup.stages import kernels


def missing(target: Target) -> str:
    """Return why host time cannot be measured here: a simulated call runs the kernel before it
    returns."""
    if target.is_gpu:
        return kernels.missing(target)
    return "a simulated call returns when the kernel has run; host time needs a GPU"


def items(target: Target) -> list[str]:
    from bench.measure.host import CASES

    return [case.name for case in CASES]


def run(item: str, target: Target, note: Callable[[str], None]) -> Outcome:
    """Measure microseconds from call to return, the GPU idle before each repetition."""
    import torch

    from bench.measure import host

    case = next(case for case in host.CASES if case.name == item)
    note(item)
    inputs = host.inputs_of(case, torch.device(target.device))
    low, median, high, _ = host.microseconds(case, inputs, host.our_call(case, inputs))
    values = {"value": median, "low": low, "high": high, "unit": "microseconds", "constant": ""}
    return Outcome("measured", f"{median:.1f} us a call ({low:.1f} to {high:.1f})", values)
