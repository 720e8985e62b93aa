"""Forward and backward timed on a GPU, provider by provider, their results checked before."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.suite import Case
from bench.tables.comparison import comparison_row
from bench.tables.table import BASIS, MACHINE

from .prepared import computed_case, prepared_call
from .providers import Inputs, Provider, attempt
from .timer import Gpu, Samples, Sampling, Timer, interleave_prepared


def measured_rows(
    cases: Iterable[tuple[Case, str]],
    providers: Sequence[Provider],
    timer: Timer,
    sampling: Sampling,
    dtype: torch.dtype,
) -> Iterator[dict[str, Any]]:
    """Check and time every (case, direction) on the timer's GPU; yield one row for each."""
    missing = {provider.name: provider.missing() for provider in providers}
    by_name = {provider.name: provider for provider in providers}
    for case, direction in cases:
        ready, details = _ready(case, direction, providers, (timer, dtype, missing))
        found, failed = attempt(partial(interleave_prepared, timer, ready, sampling))
        for name in ready:
            if failed:
                details[name] |= {"status": f"while timing: {failed}", "failed": True}
            else:
                flop = computed_case(by_name[name], case).flop(direction)
                details[name] |= _measured(found[name], flop, timer.gpu)
        origin = {BASIS: "measured", MACHINE: timer.gpu.text}
        seconds = {name: np.array(found[name].seconds) for name in ready} if found else {}
        row = comparison_row(case, direction, details, seconds) | origin
        # Graphs and their memory must be gone before the next case allocates its own.
        del ready
        gc.collect()
        timer.release_memory()
        yield row


def _ready(
    case: Case,
    direction: str,
    providers: Sequence[Provider],
    setting: tuple[Timer, torch.dtype, dict[str, str | None]],
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return (what `Timer.prepare` made of the providers whose results are right, what is known of
    each provider)."""
    timer, dtype, missing = setting
    inputs: Inputs | None = None
    ready: dict[str, Any] = {}
    details: dict[str, dict[str, Any]] = {}
    for provider in providers:
        reason = missing[provider.name] or provider.refuses(case, direction)
        if reason is not None:
            details[provider.name] = {"status": reason}
            continue
        inputs = inputs or Inputs.random(case, timer.device, dtype)
        prepared, details[provider.name] = prepared_call(provider, inputs, direction, timer)
        if prepared is not None:
            ready[provider.name] = prepared
    return ready, details


def _measured(samples: Samples, flop: float, gpu: Gpu) -> dict[str, Any]:
    """Figures of one provider: TFLOPS at the median time, and at that of p80 and p20."""
    low, median, high = (samples.quantile(share) for share in (0.2, 0.5, 0.8))
    state, tflops = samples.median_state(), flop / median / 1e12
    peak = gpu.peak_tflops(state.clock_mhz)
    return {
        "median_ms": median * 1e3, "p20_ms": low * 1e3, "p80_ms": high * 1e3,
        "tflops": tflops, "tflops_low": flop / high / 1e12, "tflops_high": flop / low / 1e12,
        "of_peak": None if peak is None else tflops / peak,
        "clock_mhz": state.clock_mhz, "power_watts": state.power_watts,
        "runs": len(samples.seconds), "launch": samples.launch,
    }  # fmt: skip


def times_of(case: Case, row: dict[str, Any], required: Iterable[str]) -> dict[str, np.ndarray]:
    """Provider -> seconds (median, p20, p80) of a measured row, of those that ran. Raises
    RuntimeError if a required one did not."""
    details = row["details"]
    failed = {n: details[n]["status"] for n in required if details[n]["status"] != "ok"}
    if failed:
        raise RuntimeError(f"{case}: {failed}")
    return {
        name: np.array([found[key] for key in ("median_ms", "p20_ms", "p80_ms")]) / 1e3
        for name, found in details.items()
        if found["status"] == "ok"
    }
