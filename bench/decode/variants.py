"""Calls on variants of the same inputs, timed interleaved on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Hashable, Mapping
from typing import Any

from bench.measure.prepared import prepared_call
from bench.measure.providers import Inputs, Provider
from bench.measure.timer import Sampling, Timer, interleave_prepared
from bench.suite import FORWARD
from bench.tables.table import BASIS, MACHINE

__all__ = ["measured_variants"]


def measured_variants(
    variants: Mapping[Any, tuple[Provider, Inputs]],
    first: Hashable,
    timer: Timer,
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
        if reason is not None:
            reasons[key] = reason
            continue
        prepared, details = prepared_call(provider, inputs, FORWARD, timer)
        if prepared is None:
            reasons[key] = details["status"]
        else:
            ready[key] = prepared
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
