"""Calls timed on a GPU, provider by provider, their results checked before."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.suite import BACKWARD, Case
from bench.tables.comparison import comparison_row
from bench.tables.table import BASIS, MACHINE

from .checking import Check, check_forward, check_gradients
from .providers import Inputs, Provider, attempt, backward_call, forward_call
from .settings import Sampling
from .timer import CudaTimer, Gpu, Prepared, Samples, interleave_prepared


def prepared_call(
    provider: Provider, inputs: Inputs, direction: str, timer: CudaTimer
) -> tuple[Prepared | None, dict[str, Any]]:
    """Return (what `CudaTimer.prepare` made of the call, None where it failed or its result is
    wrong; what is known of it: `status`, "ok" or why not, `failed`, and where it ran `max_error`,
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


def _checked(provider: Provider, inputs: Inputs, direction: str) -> tuple[Any, Check]:
    """Return (the call to time, how far its result is from the reference)."""
    case = provider.computed(inputs.case)
    if case is not inputs.case:
        inputs = replace(inputs, case=case, expected={}, masks={})
    if direction == BACKWARD:
        check = check_gradients(provider, inputs)
        call = backward_call(provider, inputs)
        call()
        return call, check
    call = forward_call(provider, inputs)
    return call, check_forward(inputs, call())


def measured_row(
    job: tuple[Case, str], providers: Sequence[Provider], timer: CudaTimer, sampling: Sampling,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:  # fmt: skip
    """Check and time a (case, direction) on the timer's GPU; return its row."""
    case, direction = job
    ready, details = _ready(job, providers, timer, dtype)
    found, failed = attempt(partial(interleave_prepared, timer, ready, sampling))
    for provider in (one for one in providers if one.name in ready):
        if failed:
            details[provider.name] |= {"status": f"while timing: {failed}", "failed": True}
        else:
            flop = provider.computed(case).flop(direction)
            details[provider.name] |= _figures(found[provider.name], flop, timer.gpu)
    seconds = {name: np.array(found[name].seconds) for name in ready} if found else {}
    # Graphs and their memory must be gone before the next case allocates its own.
    del ready
    gc.collect()
    timer.release_memory()
    origin = {BASIS: "measured", MACHINE: timer.gpu.text}
    return comparison_row(case, direction, details, seconds) | origin


def _ready(
    job: tuple[Case, str], providers: Sequence[Provider], timer: CudaTimer, dtype: torch.dtype
) -> tuple[dict[str, Prepared], dict[str, dict[str, Any]]]:  # fmt: skip
    """Return (what `CudaTimer.prepare` made of the providers whose results are right, what is known
    of each provider)."""
    case, direction = job
    inputs: Inputs | None = None
    ready: dict[str, Prepared] = {}
    details: dict[str, dict[str, Any]] = {}
    for provider in providers:
        if reason := provider.missing() or provider.refuses(case, direction):
            details[provider.name] = {"status": reason}
            continue
        inputs = inputs or Inputs.random(case, timer.device, dtype)
        prepared, details[provider.name] = prepared_call(provider, inputs, direction, timer)
        if prepared is not None:
            ready[provider.name] = prepared
    return ready, details


def _figures(samples: Samples, flop: float, gpu: Gpu) -> dict[str, Any]:
    """Return the figures of one provider: TFLOPS at the median time, and at that of p80 and p20."""
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
    """Return seconds (median, p20, p80) of the required providers of a measured row. Raises
    RuntimeError if one did not run."""
    details = {name: row["details"][name] for name in required}
    if failed := {n: one["status"] for n, one in details.items() if one["status"] != "ok"}:
        raise RuntimeError(f"{case}: {failed}")
    keys = "median_ms", "p20_ms", "p80_ms"
    return {name: np.array([one[key] for key in keys]) / 1e3 for name, one in details.items()}
