"""Switches of the forward that only serve to be compared with: what each does, the same result."""

from __future__ import annotations

import pytest
import torch
from cross_compile import opcode_counts
from test_kernel_structure import launch

from fa4_hd256 import ForwardConfig
from fa4_hd256.check import reference
from fa4_hd256.kernels.problem_class import ProblemClass
from fa4_hd256.run.catalogue import KernelSpec
from fa4_hd256.run.compile import compile_kernel

pytestmark = [pytest.mark.simulator, pytest.mark.architecture("sm_100a")]

# Two kernels show all of them; the default one is compiled for other tests anyway.
FOLDED_ONE_S = ForwardConfig(arithmetic="folded", s_stages=1)
PLAIN_UNORDERED = ForwardConfig(arithmetic="plain", ordered_tiles=False, rescale_threshold=0.0)


@pytest.mark.parametrize("config", [FOLDED_ONE_S, PLAIN_UNORDERED], ids=["folded", "plain"])
@pytest.mark.sampled
def test_results_and_races(config):
    """Several tiles a cluster, ends inside a tile, an adversarial schedule, the sanitizer."""
    q, k, v = (torch.randn(1, s, h, 256).bfloat16() for s, h in ((520, 2), (600, 1), (600, 1)))
    out, lse = torch.empty_like(q), torch.empty(1, 2, 520)
    report = launch((q, k, v, out, lse), True, 2, config, seed=1, sanitize=True)
    assert report.findings == []
    found = reference.compare(out, lse, (q, k, v), causal=True)
    assert found.max_error <= found.tolerance and found.lse_max_error <= 1e-3, found


@pytest.mark.sampled
def test_arithmetic_of_the_exponents():
    """Opcodes of the two loops, with a mask and without, that have 128 scores a thread each."""

    def counts(config):
        problem_class = ProblemClass(torch.bfloat16, bounded_right=True)
        compiled = compile_kernel(KernelSpec("forward", config, problem_class))
        found = opcode_counts(compiled)
        names = ("sub.f32", "fma.rn.f32", "fma.rn.f32x2", "add.rn.f32x2")
        return [found[name] // 128 for name in names]

    assert counts(PLAIN_UNORDERED) == [2, 0, 0, 0]
    assert counts(FOLDED_ONE_S) == [0, 2, 0, 0]
    # Two scores an instruction.
    assert counts(ForwardConfig()) == [0, 0, 1, 1]
