"""Pairs of configurations that give the same results, timed against each other: `decisions` takes
the faster one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.bringup.outcome import Outcome, Target
from bench.bringup.stages import kernels
from bench.measure.settings import WARM, Sampling
from bench.measure.timer import CudaTimer, interleave_prepared

#: Timed runs of each configuration.
RUNS = 60
#: Longer than the host takes to launch it.
_CALL = kernels.Call((4096, 4096), (16, 2), batch=4)


@dataclass(frozen=True)
class Choice:
    """usual: options of the call as it is by default; other: those of what it is compared with."""

    direction: str
    options: dict[str, Any]
    usual: dict[str, Any]
    other: dict[str, Any]


def choices() -> dict[str, Choice]:
    causal = {"causal": True}
    static, dynamic = {"use_clc": False}, {"use_clc": True}
    hinted, polling = {"polls": False}, {"polls": True}
    return {
        "scheduler of the causal forward": Choice("forward", causal, dynamic, static),
        "scheduler of the causal backward": Choice("backward", causal, dynamic, static),
        "dS of the full backward": Choice("backward", {}, {}, {"stores_ds": False}),
        "dS of the causal backward": Choice("backward", causal, {}, {"stores_ds": False}),
        "waits of the full forward": Choice("forward", {}, hinted, polling),
        "waits of the causal forward": Choice("forward", causal, hinted, polling),
        "waits of the full backward": Choice("backward", {}, hinted, polling),
        "waits of the causal backward": Choice("backward", causal, hinted, polling),
    }


def missing(target: Target) -> str:
    """Times need a GPU."""
    return kernels.missing(target) if target.is_gpu else "the simulator has no times; a GPU has"


def items(target: Target) -> list[str]:
    return list(choices())


def run(item: str, target: Target, note: Callable[[str], None]) -> Outcome:
    """Medians of interleaved runs of both."""
    choice = choices()[item]
    note(f"{item}, both ways")
    ways = {"usual": choice.usual, "other": choice.other}
    return outcome(
        medians(lambda: {n: _call(choice, dict(way), target) for n, way in ways.items()})
    )


def medians(
    make: Callable[[], dict[str, Callable[[], Any]]], timer: CudaTimer | None = None
) -> dict[str, float]:
    """Return the median seconds of each call that `make` returns, with what the run before left in
    L2. timer: that of this GPU by default."""
    timer = timer or CudaTimer(l2=WARM)
    with timer.on_stream():
        calls = {name: (call, "plain launch") for name, call in make().items()}
    found = interleave_prepared(timer, calls, Sampling(RUNS // 3, RUNS))
    return {name: samples.quantile(0.5) for name, samples in found.items()}


def outcome(found: dict[str, float]) -> Outcome:
    ratio = found["usual"] / found["other"]
    text = (
        f"usual {1e6 * found['usual']:.1f} us, other {1e6 * found['other']:.1f} us: "
        f"the other is {ratio:.3f} times as fast"
    )
    return Outcome("measured", text, {"ratio": round(ratio, 4)})


def configured(direction: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of a call. options: some of `use_clc`, which is one; `stores_ds`; `polls`,
    whether waits have no time hint."""
    from fa4_hd256 import BackwardConfig, ForwardConfig
    from fa4_hd256.kernels.blackwell.backward.config import DvPlan, ProductsPlan

    found = {name: value for name, value in options.items() if name == "use_clc"}
    if not options.get("stores_ds", True):
        found["backward_config"] = BackwardConfig(ds_bytes=0)
    if "polls" in options:
        polls = options["polls"]
        if direction == "forward":
            found["config"] = ForwardConfig(polls=polls)
        else:
            found["backward_config"] = BackwardConfig(
                dv=DvPlan(polls=polls), products=ProductsPlan(polls=polls)
            )
    return found


def _call(choice: Choice, options: dict[str, Any], target: Target) -> Callable[[], Any]:
    """Return a forward, or the gradients of one that was run before."""
    import torch

    from fa4_hd256 import flash_attn_func

    options = configured(choice.direction, options)
    q, k, v, dout = kernels.tensors(_CALL, target.device)
    if choice.direction == "forward":
        return lambda: flash_attn_func(q, k, v, **choice.options, **options)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    out = flash_attn_func(q, k, v, **choice.options, **options)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
