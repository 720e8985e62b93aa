"""A provider's call, its result checked, ready to be timed: for every command that times calls."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from bench.suite import BACKWARD, Case

from .checking import Check, check_forward, check_gradients
from .providers import Inputs, Provider, attempt, backward_call, forward_call
from .timer import Timer


def prepared_call(
    provider: Provider, inputs: Inputs, direction: str, timer: Timer
) -> tuple[Any | None, dict[str, Any]]:
    """Return (what `Timer.prepare` made of the call, None where it failed or its result is wrong;
    what is known of it: `status`, "ok" or why not, `failed`, and where it ran `max_error`,
    `tolerance`)."""
    with timer.on_stream():
        checked, reason = attempt(partial(_checked, provider, inputs, direction))
    if reason is not None:
        return None, {"status": reason, "failed": True}
    call, check = checked
    figures = {"max_error": check.error, "tolerance": check.tolerance}
    if not check.passed:
        return None, {"status": check.failure, "failed": True, **figures}
    prepared, reason = attempt(partial(timer.prepare, call))
    return prepared, {"status": reason or "ok", "failed": reason is not None, **figures}


def computed_case(provider: Provider, case: Case) -> Case:
    """Return the case that a provider computes for a case, such as all tiles of a masked one."""
    found: Case = getattr(provider, "computed", lambda given: given)(case)
    return found


def _checked(provider: Provider, inputs: Inputs, direction: str) -> tuple[Any, Check]:
    """Return (the call to time, how far its result is from the reference)."""
    case = computed_case(provider, inputs.case)
    if case is not inputs.case:
        inputs = replace(inputs, case=case, expected={}, masks={})
    if direction == BACKWARD:
        check = check_gradients(provider, inputs)
        call = backward_call(provider, inputs)
        call()
        return call, check
    call = forward_call(provider, inputs)
    return call, check_forward(inputs, call())
