"""Pairs of configurations that give the same results, timed against each other: `decisions` takes
the faster one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.bringup.outcome import Outcome, Target
from bench.bringup.stages import kernels

_CALL = kernels.Call((4096, 4096), (16, 2), batch=4)


@dataclass(frozen=True)
class Choice:
    """usual: options of the call as it is by default; other: those of what it is compared with."""

    direction: str
    options: dict[str, Any]
    usual: dict[str, Any]
    other: dict[str, Any]


def choices() -> dict[str, Choice]:
    """Return the choices by the names of their steps."""
    causal = {"causal": True}
    static, dynamic = {"use_clc": False}, {"use_clc": True}
    return {
        "scheduler of the causal forward": Choice("forward", causal, dynamic, static),
        "scheduler of the causal backward": Choice("backward", causal, dynamic, static),
        "dS of the full backward": Choice("backward", {}, {}, {"stores_ds": False}),
        "dS of the causal backward": Choice("backward", causal, {}, {"stores_ds": False}),
    }


def missing(target: Target) -> str:
    """Times need a GPU."""
    return kernels.missing(target) if target.is_gpu else "the simulator has no times; a GPU has"


def items(target: Target) -> list[str]:
    """Names of the choices."""
    return list(choices())


def run(item: str, target: Target, note: Callable[[str], None]) -> Outcome:
    """Medians of interleaved runs of both."""
    from bench.measure.timer import CudaTimer, Sampling, interleave

    choice = choices()[item]
    note(f"{item}, both ways")
    timer = CudaTimer()
    with timer.on_stream():
        calls = {
            name: _call(choice, dict(options), target)
            for name, options in (("usual", choice.usual), ("other", choice.other))
        }
    samples = interleave(timer, calls, Sampling(16, 64, 20.0))
    return outcome({name: found.quantile(0.5) for name, found in samples.items()})


def outcome(medians: dict[str, float]) -> Outcome:
    """Return the outcome of both medians, in seconds."""
    ratio = medians["usual"] / medians["other"]
    text = (
        f"usual {1e6 * medians['usual']:.1f} us, other {1e6 * medians['other']:.1f} us: "
        f"the other is {ratio:.3f} times as fast"
    )
    return Outcome("measured", text, {"ratio": round(ratio, 4)})


def _call(choice: Choice, options: dict[str, Any], target: Target) -> Callable[[], Any]:
    """Return a forward, or the gradients of one that was run before."""
    import torch

    from fa4_hd256 import BackwardConfig, flash_attn_func

    if not options.pop("stores_ds", True):
        options["backward_config"] = BackwardConfig(ds_bytes=0)
    q, k, v, dout = kernels.tensors(_CALL, target.device)
    if choice.direction == "forward":
        return lambda: flash_attn_func(q, k, v, **choice.options, **options)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    out = flash_attn_func(*leaves, **choice.options, **options)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
