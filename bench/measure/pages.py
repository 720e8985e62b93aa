"""Keys and values in pages timed beside none, on a GPU, ours and flash-attn-4's by turns."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from bench.suite import FORWARD, Case
from bench.tables.table import BASIS, MACHINE

from .checking import check_forward
from .providers import FlashAttention4, Inputs, Ours, Provider, attempt, forward_call
from .timer import Sampling, Timer, interleave_prepared


def measured_row(
    case: Case, sizes: Sequence[int | None], timer: Timer, sampling: Sampling
) -> dict[str, Any]:
    """One case in pages of each size, None for keys in no pages.

    `times`: (provider, size) -> (p20, median, p80) in seconds of all that ran and were right;
    `reasons`: the same -> why it did not; clock in MHz and power in watts.
    """
    print(f"{case}", file=sys.stderr, flush=True)
    ready: dict[tuple[str, int | None], Any] = {}
    reasons: dict[tuple[str, int | None], str] = {}
    whole = Inputs.random(case, timer.device, torch.bfloat16)
    providers: tuple[Provider, ...] = (Ours(), FlashAttention4())
    for size in sizes:
        # Both read the same pages: a cache of a GPU's size has no room for copies.
        inputs = replace(whole, case=replace(case, page_size=size))
        for provider in providers:
            reason = provider.missing() or provider.refuses(inputs.case, FORWARD)
            if reason is None:
                with timer.on_stream():
                    found, reason = attempt(partial(_checked, provider, inputs, timer))
            if reason is None:
                ready[provider.name, size] = found
            else:
                reasons[provider.name, size] = reason
    samples = interleave_prepared(timer, ready, sampling)
    state = samples[Ours().name, None].median_state() if samples else None
    times = {
        name: tuple(found.quantile(share) for share in (0.2, 0.5, 0.8))
        for name, found in samples.items()
    }
    del ready, inputs, whole
    gc.collect()
    timer.release_memory()
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
