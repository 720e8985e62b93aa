"""Every scheduler runs the same forward kernel: each tile once, the same bits."""

from __future__ import annotations

import math

import pytest
import torch
from cross_compile import compile_sm100
from gpus import gpu
from paged_cases import offsets

import sm100_sim
from fa4_hd256.call.forward_problem import Problem
from fa4_hd256.call.options import Options
from fa4_hd256.kernels.blackwell.forward.config import ForwardConfig
from fa4_hd256.kernels.blackwell.forward.kernel import ForwardKernel
from fa4_hd256.run.arguments import CallTensors, call_arguments, compile_arguments
from fa4_hd256.run.catalogue import KernelSpec
from fa4_hd256.run.compile import compile_kernel
from fa4_hd256.schedulers import ClcScheduler, StaticPersistentScheduler

pytestmark = [pytest.mark.simulator, pytest.mark.architecture("sm_100a")]

SCHEDULERS = (StaticPersistentScheduler, ClcScheduler)
LENGTHS_Q, LENGTHS_K = (300, 0, 5, 700, 1, 64), (200, 9, 0, 700, 300, 64)


def default_kernel():
    """Return the causal varlen kernel of calls without use_clc."""
    return compile_kernel(KernelSpec("forward", ForwardConfig(), call()[0].problem_class))


@pytest.fixture(scope="module", params=SCHEDULERS, ids=lambda s: s.__name__)
def kernel(request):
    """(scheduler, compiled causal varlen kernel)."""
    problem_class = call()[0].problem_class
    assert not problem_class.use_clc
    if request.param is StaticPersistentScheduler:
        return request.param, default_kernel()
    traced = ForwardKernel(ForwardConfig(), problem_class, request.param)
    return request.param, compile_sm100(traced, *compile_arguments(problem_class))


def call():
    """Return (problem, tensors) of a ragged batch whose results are still NaN."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(1, sum(n), h, 256, generator=generator).bfloat16()
        for n, h in ((LENGTHS_Q, 3), (LENGTHS_K, 1), (LENGTHS_K, 1))
    )
    cu_q, cu_k = offsets(LENGTHS_Q), offsets(LENGTHS_K)
    problem = Problem.describe(
        (q, k, v), Options.check(None, True, (None, None), 0.0, False),
        ragged={"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}, max_seqlen_q=max(LENGTHS_Q),
    )  # fmt: skip
    out = torch.full_like(q, math.nan)
    lse = torch.full((1, 3, sum(LENGTHS_Q)), math.nan)
    return problem, CallTensors(q, k, v, out, lse, (cu_q, cu_k))


@pytest.fixture(scope="module")
def expected():
    """Results under the default scheduler."""
    problem, tensors = call()
    sm100_sim.launch(default_kernel(), *call_arguments(tensors, problem, gpu(), 0))
    assert not tensors.out.isnan().any() and not tensors.lse.isnan().any()
    return tensors.out, tensors.lse


# One cluster does everything; fewer than tiles; more than tiles exist (30: in a row, of 256 rows
# each, where each sequence as many as the longest has would be 54). Seeds: adversarial.
@pytest.mark.parametrize(
    "options",
    [{"clusters": 1}, {"clusters": 5}, {"clusters": 60}, {"clusters": 3, "seed": 1},
     {"clusters": 4, "seed": 2}],
    ids=str,
)  # fmt: skip
@pytest.mark.sampled("Clc*'seed': 1}")
def test_the_same_bits_under_every_scheduler(kernel, options, expected):
    scheduler, compiled = kernel
    problem, tensors = call()
    report = sm100_sim.launch(compiled, *call_arguments(tensors, problem, gpu(7), 0), **options)
    assert torch.equal(tensors.out, expected[0]) and torch.equal(tensors.lse, expected[1])
    tiles = 3 * (sum(LENGTHS_Q) // 256 + len(LENGTHS_Q))
    stolen = max(0, tiles - options["clusters"]) if scheduler is ClcScheduler else 0
    # For each request that a seed refuses, a cluster is launched that would have been stolen.
    refused = report.clc["refused"]
    assert (refused > 0) == ("seed" in options and stolen > 0)
    assert stolen - refused <= report.clc["stolen"] <= stolen
    assert report.clc["try_cancel"] == (tiles if scheduler is ClcScheduler else 0)


def test_try_cancel_is_in_the_dynamic_kernel_alone(kernel):
    scheduler, compiled = kernel
    ptx = sm100_sim.host.ptx_of(compiled)
    assert ("clusterlaunchcontrol.try_cancel" in ptx) == (scheduler is ClcScheduler)


def test_one_tile(kernel):
    """Batch and heads of 1: the smallest grid, from which nothing can be stolen."""
    scheduler, compiled = kernel
    q, k, v = (torch.randn(1, 9, 1, 256).bfloat16() for _ in range(3))
    cu = offsets((9,))
    problem = Problem.describe(
        (q, k, v), Options.check(None, True, (None, None), 0.0, False),
        ragged={"cu_seqlens_q": cu, "cu_seqlens_k": cu}, max_seqlen_q=9,
    )  # fmt: skip
    tensors = CallTensors(q, k, v, torch.full_like(q, math.nan), torch.empty(1, 1, 9), (cu, cu))
    report = sm100_sim.launch(compiled, *call_arguments(tensors, problem, gpu(), 0))
    assert report.grid == (2, 1, 1) and report.clc["stolen"] == 0
    assert not tensors.out.isnan().any()
