"""Calls on variants of the same inputs, timed by turns on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any

from bench.suite import FORWARD
from bench.tables.table import BASIS, MACHINE

from .checking import check_forward
from .providers import Inputs, Provider, attempt, forward_call
from .timer import Sampling, Timer, interleave_prepared

__all__ = ["measured_variants"]


def measured_variants(
    variants: Mapping[Any, tuple[Provider, Inputs]], first: Hashable, timer: Timer,
    sampling: Sampling,
) -> dict[str, Any]:
    """Forwards of all variants; first: the one whose clock and power are reported.

    `times`: variant -> (p20, median, p80) in seconds of all that ran and were right; `reasons`: the
    same -> why it did not; clock in MHz and power in watts.  The caller holds the inputs, and lets
    go of their memory (`Timer.release_memory`).
    """
    ready: dict[Any, Any] = {}
    reasons: dict[Any, str] = {}
    for key, (provider, inputs) in variants.items():
        reason = provider.missing() or provider.refuses(inputs.case, FORWARD)
        if reason is None:
            with timer.on_stream():
                found, reason = attempt(partial(_checked, provider, inputs, timer))
        if reason is None:
            ready[key] = found
        else:
            reasons[key] = reason
    samples = interleave_prepared(timer, ready, sampling)
    state = samples[first].median_state() if first in samples else None
    times = {
        key: tuple(found.quantile(share) for share in (0.2, 0.5, 0.8))
        for key, found in samples.items()
    }
    del ready
    gc.collect()
    return {
        "times": times, "reasons": reasons,
        "clock_mhz": state and state.clock_mhz, "power_watts": state and state.power_watts,
        BASIS: "measured", MACHINE: timer.gpu.text,
    }  # fmt: skip


def _checked(provider: Provider, inputs: Inputs, timer: Timer) -> Any:
    """What `Timer.prepare` makes of the call. Raises RuntimeError where its result is wrong."""
    call = forward_call(provider, inputs)
    check = check_forward(inputs, call())
    if not check.passed:
        raise RuntimeError(check.failure)
    return timer.prepare(call)
