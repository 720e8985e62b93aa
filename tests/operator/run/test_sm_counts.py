"""GPUs with any number of SMs: grids follow, bits do not."""

from __future__ import annotations

import pytest
import torch
from backward_cases import gradients, inputs

import sm100_sim
from fa4_hd256 import ForwardConfig, flash_attn_func
from fa4_hd256.run import compile

pytestmark = [pytest.mark.simulator, pytest.mark.architecture("sm_100a")]

# One pair; an odd number, whose last SM has no peer; H100, a GPU with a group less; B200, GB200; a
# full chip. 90 tiles are more than any of them holds.
COUNTS = (2, 19, 132, 146, 148, 152, 160)
TILES = 90


@pytest.fixture(scope="module")
def tensors():
    torch.manual_seed(0)
    return inputs((5, 130), (6, 6), batch=15)


def attend(*tensors, **options):
    """Attend in the forward's tiles, for pairs of SMs, however few the rows."""
    return flash_attn_func(*tensors, causal=True, num_splits=1, config=ForwardConfig(), **options)


def grids():
    """CTAs of the launches since the last call of the operator."""
    return [report.grid[0] for report in sm100_sim.last_reports()]


def test_forward(tensors, monkeypatch):
    results, kernels, compiled = [], set(), set()
    for sms in COUNTS:
        monkeypatch.setenv("SM100_SIM_DEVICE", f"b200:{sms}")
        results.append(attend(*tensors, use_clc=False, return_lse=True))
        assert grids()[-1] == 2 * min(TILES, sms // 2)
        kernels.add(sm100_sim.last_reports()[-1].kernel)
        compiled.add(compile.counters["compiled"])
    # One kernel for all of them: what the GPU is, it is told at the launch.
    assert len(kernels) == len(compiled) == 1
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


@pytest.mark.parametrize("use_clc", [False, True], ids=["static", "CLC"])
@pytest.mark.sampled
def test_backward(use_clc, tensors, monkeypatch):
    """A key/value head for each query head: there is nothing to split by the number of SMs."""
    dout = torch.randn_like(tensors[0])
    results = []
    for sms in (19, 160):
        monkeypatch.setenv("SM100_SIM_DEVICE", f"gb300:{sms}")
        results.append(gradients(tensors, dout, use_clc=use_clc))
    for found in results[1:]:
        assert all(torch.equal(gradient, results[0][name]) for name, gradient in found.items())


@pytest.mark.parametrize("reserved", [0, 1, 16, 147])
@pytest.mark.sampled("1")
def test_sms_that_are_left_to_others(reserved, tensors, monkeypatch):
    """A smaller grid, the same bits; and the grid of the dynamic scheduler is as ever."""
    expected = attend(*tensors, use_clc=False)
    monkeypatch.setenv("FA4_HD256_RESERVED_SMS", str(reserved))
    assert torch.equal(attend(*tensors, use_clc=False), expected)
    assert grids()[-1] == 2 * max(1, 74 - (reserved + 1) // 2)
    assert torch.equal(attend(*tensors, use_clc=True), expected)
    assert grids()[-1] == 2 * TILES
