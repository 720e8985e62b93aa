"""Steps of the decode kernel over keys and values in e4m3 and in bf16, on the timing model.

One CTA with an SM's share of L2 is replayed on one tile of two lengths: their difference is what
steps take, the rest what a tile begins and ends with.  HBM bounds all CTAs together: a step takes
its share of HBM for its bytes at least.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from fa4_hd256.call.forward_problem import Options, Problem
from fa4_hd256.kernels.blackwell.decode.config import BLOCK_KV, DecodeConfig
from fa4_hd256.kernels.limits import HEAD_DIM
from fa4_hd256.run.catalogue import KernelSpec
from fa4_hd256.run.compile import compile_kernel
from fa4_hd256.run.forward import empty_results
from fa4_hd256.run.forward_arguments import CallTensors, call_arguments
from sm100_sim import timing
from sm100_sim.timing import Machine

from .machines import B200, compiling_ours

__all__ = ["Steps", "steps_of"]

ONE_SM = replace(B200, sms=1, pairs=1)
GROUP = 8  # query heads of the KV head
SHORT, LONG = 1024, 3072


@dataclass(frozen=True)
class Steps:
    """Clocks. step: of 128 keys, without a bound by HBM; ends: what a tile takes besides; hbm: an
    SM's share of HBM for the bytes of a step."""

    step: float
    ends: float
    hbm: float

    @property
    def bound(self) -> float:
        """Of a step where all SMs load from HBM."""
        return max(self.step, self.hbm)

    def of_keys(self, keys: int) -> float:
        """Of a tile of so many keys, from HBM."""
        return self.ends + keys // BLOCK_KV * self.bound


def steps_of(config: DecodeConfig, machine: Machine) -> Steps:
    """Of one configuration: a causal tile of 8 heads over one KV head, all rows in use."""
    short, long = (_clocks(config, keys, machine) for keys in (SHORT, LONG))
    step = (long - short) / ((LONG - SHORT) // BLOCK_KV)
    values = machine.values()
    share = values.hbm_terabytes * 1e3 / values.clock_ghz / values.sms
    return Steps(step, short - SHORT // BLOCK_KV * step, config.tiles.step_bytes / share)


def _clocks(config: DecodeConfig, keys: int, machine: Machine) -> float:
    """Of one tile."""
    with compiling_ours(machine):
        compiled, arguments = _call(config, keys)
    return float(timing.predict(compiled, *arguments, machine=machine, draws=0)[-1].clocks[0])


def _call(config: DecodeConfig, keys: int) -> tuple[Any, tuple]:
    generator = torch.Generator().manual_seed(0)
    shapes = (config.rows // GROUP, GROUP), (keys, 1), (keys, 1)
    q, k, v = (
        torch.randn(1, rows, heads, HEAD_DIM, generator=generator).bfloat16()
        for rows, heads in shapes
    )
    if config.e4m3:
        k, v = (tensor.to(torch.float8_e4m3fn) for tensor in (k, v))
    options = Options.check(None, True, (None, None), 0.0, False)
    problem = Problem.describe((q, k, v), options, config=config)
    compiled = compile_kernel(KernelSpec(problem.tiles.kind, config, problem.problem_class))
    if config.e4m3:
        # As kernels take them: bytes in twos.
        k, v = (tensor.view(torch.bfloat16) for tensor in (k, v))
    tensors = CallTensors(q, k, v, *empty_results(problem))
    return compiled, call_arguments(tensors, problem, ONE_SM, 0)
