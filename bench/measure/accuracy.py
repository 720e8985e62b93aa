"""The forward's error under each degree and share of emulated exp2, in the simulator.

The share of emulated exp2 is counted while the compiled kernel runs and must be that of the
pattern.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

import sm100_sim
from bench.processes import one_simulator_thread, stream
from fa4_hd256.call.forward_problem import Problem
from fa4_hd256.call.options import Options
from fa4_hd256.check import reference
from fa4_hd256.check.single_kernels import launch_forward
from fa4_hd256.kernels.blackwell.forward.config import ForwardConfig
from fa4_hd256.kernels.limits import HEAD_DIM
from fa4_hd256.softmax_emu.pattern import COEFFICIENTS, HARDWARE_ONLY, Ex2Pattern

DTYPES = (torch.bfloat16, torch.float16)
#: freq, res, last fragment on hardware: 18.75 %, 37.5 % and 100 % of a step's columns.
_MIXES = ((14, 4, True), (4, 3, True), (2, 2, False))
#: Hardware only, then every degree at every mix.
PATTERNS = (
    HARDWARE_ONLY,
    *(
        Ex2Pattern(freq, res, 0, last_fragment_hardware=last, degree=degree)
        for (freq, res, last), degree in itertools.product(_MIXES, COEFFICIENTS)
    ),
)


@dataclass(frozen=True)
class Shape:
    """Full attention, batch 1, one head, standard normal q, k, v."""

    seqlen_q: int = 256
    seqlen_k: int = 512


@dataclass(frozen=True)
class Case:
    pattern: Ex2Pattern
    dtype: torch.dtype
    shape: Shape = Shape()


@dataclass(frozen=True)
class Accuracy:
    """Errors of one case. executed_share: of the score elements, counted by the simulator."""

    case: Case
    executed_share: float
    comparison: reference.Comparison


def measure(case: Case) -> Accuracy:
    """Run one case in the simulator. Raises RuntimeError if another share was emulated than the
    pattern says."""
    shape, config = case.shape, ForwardConfig(ex2_pattern=case.pattern)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, seqlen, 1, HEAD_DIM, generator=generator).to(case.dtype)
        for seqlen in (shape.seqlen_q, shape.seqlen_k, shape.seqlen_k)
    )
    options = Options.check(None, False, (None, None), 0.0, False)
    problem = Problem.describe((q, k, v), options, config=config)
    out, lse = launch_forward(problem, (q, k, v))
    share = _executed_share(config, shape)
    if share != case.pattern.true_share(config.block_kv):
        raise RuntimeError(f"{share:.4%} of the score elements were emulated; {case.pattern}")
    return Accuracy(case, share, reference.compare(out, lse, (q, k, v)))


def _executed_share(config: ForwardConfig, shape: Shape) -> float:
    """Return the share of emulated exp2 in the last launch: scores take the flushing form of ex2,
    factors of a row the other."""
    report = sm100_sim.last_reports()[-1]
    steps = -(-shape.seqlen_q // config.tile_q) * -(-shape.seqlen_k // config.block_kv)
    elements = steps * config.tile_q * config.block_kv
    hardware = report.opcodes.get("ex2.approx.ftz.f32", {"lanes": 0})["lanes"]
    return 1 - hardware / elements


def measure_all(cases: Iterable[Case], jobs: int) -> Iterator[Accuracy]:
    """Yield what is found of every case, on `jobs` processes."""
    return stream(measure, list(cases), jobs, one_simulator_thread)


def default_cases() -> list[Case]:
    return [Case(pattern, dtype) for dtype, pattern in itertools.product(DTYPES, PATTERNS)]
