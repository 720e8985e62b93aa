"""Waits without a time hint (`EdgeTable.polling`): a configuration with the same results."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from fa4_hd256 import BackwardConfig, ForwardConfig, flash_attn_func
from fa4_hd256.kernels.problem_class import ProblemClass
from fa4_hd256.run.catalogue import KernelSpec
from fa4_hd256.run.compile import compile_kernel

pytestmark = [pytest.mark.simulator, pytest.mark.architecture("sm_100a")]

BACKWARD = BackwardConfig()
POLLING = BackwardConfig(
    dv=replace(BACKWARD.dv, polls=True), products=replace(BACKWARD.products, polls=True)
)


def waits(ptx: str) -> tuple[int, int]:
    """Count attempts at a wait: (with a time hint, without one)."""
    found = re.findall(r"mbarrier\.try_wait\.parity\S*\s+[^;]*;", ptx)
    operands = [len(one.split(",")) for one in found]
    return operands.count(4), operands.count(3)


def test_a_forward_that_polls():
    """Waits of a tile alone keep their hint, and no bit of a result changes."""
    torch.manual_seed(0)
    q = torch.randn(1, 300, 2, 256).bfloat16()
    k, v = torch.randn(2, 1, 330, 1, 256).bfloat16()
    config = ForwardConfig(polls=True)
    assert torch.equal(
        flash_attn_func(q, k, v, causal=True, config=config),
        flash_attn_func(q, k, v, causal=True, config=ForwardConfig()),
    )
    of_call = ProblemClass(torch.bfloat16, bounded_right=True, packed_heads=2)
    spec = KernelSpec("forward", config, of_call)
    hinted, polling = waits(compile_kernel(spec).ptx)
    assert 0 < hinted < polling


@pytest.mark.sampled
def test_a_backward_that_polls():
    """No bit of a gradient changes."""
    torch.manual_seed(0)
    q, dout = torch.randn(2, 1, 300, 2, 256).bfloat16()
    k, v = torch.randn(2, 1, 330, 1, 256).bfloat16()

    def gradients(config: BackwardConfig) -> tuple[torch.Tensor, ...]:
        leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        out = flash_attn_func(*leaves, causal=True, backward_config=config)
        return torch.autograd.grad(out, leaves, dout)

    assert all(map(torch.equal, gradients(POLLING), gradients(BACKWARD)))
