"""The rungs of the optimisation ladder: configurations of the forward, checked and timed.

Every rung is a configuration of the kernel that is shipped (`ForwardConfig`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch

from bench.measure.checking import check_forward
from bench.measure.providers import Inputs, Provider, attempt, forward_call
from bench.measure.timer import Sampling, Timer, interleave
from bench.suite import FORWARD, Case
from fa4_hd256 import flash_attn_func
from fa4_hd256.check import reference
from fa4_hd256.kernels.blackwell.forward.config import ForwardConfig
from fa4_hd256.kernels.limits import HEAD_DIM
from fa4_hd256.softmax_emu.pattern import Ex2Pattern
from lab.paths import Paths

#: The field's mix: 37.5 % of a step's columns.
PATTERN = Ex2Pattern(4, 3)
#: (queries, keys) of the simulated check: several tiles, ends inside a tile.
CHECKED = (520, 600)


@dataclass(frozen=True)
class Rung:
    """One configuration; `name` is what it adds to the one before."""

    name: str
    config: ForwardConfig
    use_clc: bool = False

    def call(self, inputs: Inputs) -> torch.Tensor:
        """out of the operator, as `Provider.call`."""
        case = inputs.case
        out = flash_attn_func(
            *inputs.leaves, causal=case.causal, window_size=case.window, config=self.config,
            use_clc=self.use_clc,
        )  # fmt: skip
        return cast(torch.Tensor, out)


def rungs(pattern: Ex2Pattern = PATTERN) -> list[Rung]:
    """The ladder: each rung has the switches of those before it.

    pattern: of the rung that emulates exp2. The last rung is the default configuration, where that
    is another one.
    """
    config = ForwardConfig(
        ex2_pattern=Ex2Pattern(), arithmetic="plain", s_stages=1, rescale_threshold=0.0,
        ordered_tiles=False,
    )  # fmt: skip
    found = [Rung("plain exp2", config)]
    for name, switch in (
        ("folded scale", {"arithmetic": "folded"}),
        ("packed f32x2", {"arithmetic": "packed"}),
        ("double-buffered S", {"s_stages": 2}),
        ("conditional rescale", {"rescale_threshold": ForwardConfig().rescale_threshold}),
        ("emulation ratio", {"ex2_pattern": pattern}),
        ("tile order", {"ordered_tiles": True}),
    ):
        config = replace(config, **switch)
        found.append(Rung(name, config))
    found.append(Rung("CLC", config, use_clc=True))
    if config != ForwardConfig():
        found.append(Rung("default configuration", ForwardConfig()))
    return found


@dataclass(frozen=True)
class Error:
    """Against the reference. error: of out; tolerance: of it; lse_error: in nats, None if not
    known."""

    error: float
    tolerance: float
    lse_error: float | None = None

    @property
    def correct(self) -> bool:
        return self.error <= self.tolerance and (self.lse_error or 0.0) <= 1e-3


def simulated_error(rung: Rung, causal: bool) -> Error:
    """Run the compiled kernel of a rung in the simulator: two heads that share one of keys."""
    generator = torch.Generator().manual_seed(0)
    seqlen_q, seqlen_k = CHECKED
    q, k, v = (
        torch.randn(1, seqlen, heads, HEAD_DIM, generator=generator).bfloat16()
        for seqlen, heads in ((seqlen_q, 2), (seqlen_k, 1), (seqlen_k, 1))
    )
    out, lse = flash_attn_func(
        q,
        k,
        v,
        causal=causal,
        return_lse=True,
        config=rung.config,
        use_clc=rung.use_clc,
        num_splits=1,
    )
    found = reference.compare(out, lse, (q, k, v), causal=causal)
    return Error(found.max_error, found.tolerance, found.lse_max_error)


@dataclass(frozen=True)
class Timing:
    """A rung's time. seconds: float64, of paired conditions: the first is the central one of the
    model's drawn machines, or the median, p20 and p80 of a measurement. error: see `Error`.
    step_clocks, paths: of a step of one CTA pair, and of the replays; modelled only."""

    rung: Rung
    seconds: np.ndarray
    error: Error
    step_clocks: float | None = None
    paths: Paths | None = None


def measure_all(
    chosen: Sequence[Rung],
    case: Case,
    timer: Timer,
    sampling: Sampling,
    pytorch: Iterable[Provider],
) -> tuple[list[Timing], dict[str, float | str]]:
    """Return (timings of the rungs, median seconds of PyTorch's implementations or why they did not
    run).

    All of them are timed, interleaved, on the same inputs.
    """
    inputs = Inputs.random(case, timer.device, torch.bfloat16)
    calls: dict[str, Any] = {}
    errors: dict[str, Error] = {}
    others: dict[str, float | str] = {}
    for rung in chosen:
        calls[rung.name] = forward_call(rung, inputs)
        check = check_forward(inputs, calls[rung.name]())
        errors[rung.name] = Error(check.error, check.tolerance)
    for provider in pytorch:
        call = forward_call(provider, inputs)
        reason = provider.missing() or provider.refuses(case, FORWARD) or attempt(call)[1]
        if reason:
            others[provider.name] = reason
        else:
            calls[provider.name] = call
    found = interleave(timer, calls, sampling)
    timings = []
    for rung in chosen:
        samples = found[rung.name]
        seconds = np.array([samples.quantile(share) for share in (0.5, 0.2, 0.8)])
        timings.append(Timing(rung, seconds, errors[rung.name]))
    others |= {
        provider.name: found[provider.name].quantile(0.5)
        for provider in pytorch
        if provider.name in found
    }
    return timings, others
