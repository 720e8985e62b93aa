"""Instructions that the forward kernel executes, and their order, as the simulator's trace shows
it."""

from __future__ import annotations

import math

import pytest
import torch
from gpus import gpu

import sm100_sim
from fa4_hd256.call.forward_problem import Problem
from fa4_hd256.call.options import Options
from fa4_hd256.check.single_kernels import launch_values
from fa4_hd256.kernels.blackwell.forward.config import ForwardConfig
from fa4_hd256.run.arguments import CallTensors, call_arguments
from fa4_hd256.run.catalogue import KernelSpec
from fa4_hd256.run.compile import compile_kernel

pytestmark = [pytest.mark.simulator, pytest.mark.architecture("sm_100a")]

CONFIG = ForwardConfig()
QK_INSTRUCTIONS, PV_INSTRUCTIONS = 256 // 16, 128 // 16


def launch(operands, causal=False, clusters=74, config=CONFIG, **options):
    """Launch on (q, k, v, out, lse); returns the report."""
    problem = Problem.describe(operands[:3], Options.check(None, causal, (None, None), 0.0, False))
    compiled = compile_kernel(KernelSpec("forward", config, problem.problem_class))
    arguments = launch_values(call_arguments(CallTensors(*operands), problem, gpu(clusters)))
    return sm100_sim.launch(compiled, *arguments, **options)


def run(seqlen_q, seqlen_k, causal=False, heads=1, **options):
    """Launch on random tensors; returns the report."""
    shapes = ((seqlen_q, heads), (seqlen_k, 1), (seqlen_k, 1), (seqlen_q, heads))
    operands = [torch.randn(1, s, h, 256).to(torch.bfloat16) for s, h in shapes]
    return launch((*operands, torch.empty(1, heads, seqlen_q)), causal, **options)


def steps(seqlen_q, seqlen_k, causal, packed=1):
    """KV tiles that some row of each query block sees, from the definition of the mask; packed:
    heads that share a block."""
    counts = []
    for first in range(0, seqlen_q, CONFIG.tile_q // packed):
        last_row = min(first + CONFIG.tile_q // packed, seqlen_q) - 1
        visible = min(seqlen_k, last_row + 1 + seqlen_k - seqlen_q) if causal else seqlen_k
        counts.append(max(0, math.ceil(visible / CONFIG.block_kv)))
    return counts


# Whole tiles, a rest, lengths that differ both ways; causal: a tile without any visible key.
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(512, 512), (300, 700), (700, 300), (515, 131)])
@pytest.mark.parametrize("heads", [2, 3])
@pytest.mark.sampled("2-512-512-causal", "3-512-512-full")
def test_mma_count_is_the_closed_form(seqlen_q, seqlen_k, causal, heads):
    """16 + 8 instructions for every KV tile that some row sees, none for the others.

    Two heads of one KV head share a block; three do not divide a CTA's rows, each has its own.
    """
    report = run(seqlen_q, seqlen_k, causal, heads=heads)
    if heads == 2:
        expected = sum(steps(seqlen_q, seqlen_k, causal, packed=2))
    else:
        expected = 3 * sum(steps(seqlen_q, seqlen_k, causal))
    # The MMA warp passes its instructions with all lanes; the elected one issues.
    issued = sum(
        counts["warps"] for name, counts in report.opcodes.items() if name.startswith("tcgen05.mma")
    )
    assert issued == expected * (QK_INSTRUCTIONS + PV_INSTRUCTIONS)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("options", [{"schedule": "lazy"}, {"seed": 1}, {"seed": 2}])
@pytest.mark.sampled("options0-full", "options0-causal", "options1-causal")
def test_results_do_not_depend_on_the_schedule(causal, options):
    """Any order of warps and completions gives the same bits."""
    results = []
    for chosen in ({}, options):
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, s, 2, 256).to(torch.bfloat16) for s in (600, 400, 400))
        out, lse = torch.full_like(q, math.nan), torch.full((1, 2, 600), math.nan)
        launch((q, k, v, out, lse), causal, clusters=2, **chosen)
        results.append((out, lse))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
