"""torch.compile with code generation, and with CUDA graphs of its own."""

from __future__ import annotations

import pytest
import torch
from cuda_cases import CASES, differing

from fa4_hd256 import flash_attn_func, flash_attn_varlen_func, masks

pytestmark = pytest.mark.cuda

MODES = pytest.mark.parametrize("mode", ["default", "reduce-overhead"])


@pytest.fixture(autouse=True)
def _recompiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def through(layer, tensors):
    """Return out and the gradients of q, k, v."""
    torch.compiler.cudagraph_mark_step_begin()
    leaves = [tensors[name].detach().clone().requires_grad_() for name in "qkv"]
    out = layer(*leaves, *(tensors[name] for name in ("cu_q", "cu_k") if name in tensors))
    gradients = torch.autograd.grad(out, leaves, tensors["dout"])
    return {name: t.detach().clone() for name, t in zip(("out", "dq", "dk", "dv"),
                                                        (out, *gradients))}  # fmt: skip


@MODES
def test_a_layer(mode, device):
    """Forward and backward, inputs that change: the bits of eager calls, and graphs are used."""
    case = CASES["dense"]

    def layer(q, k, v):
        return flash_attn_func(q * 2, k, v, causal=True) + 1

    skips = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    for seed in range(4):
        tensors = case.tensors(device, seed)
        assert differing(through(compiled, tensors), through(layer, tensors)) == [], seed
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == skips


@MODES
def test_packed_sequences(mode, device):
    case = CASES["packed"]
    longest = [max(side) for side in zip(*case.lengths)]

    def layer(q, k, v, cu_q, cu_k):
        return flash_attn_varlen_func(
            q * 2, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=longest[0],
            max_seqlen_k=longest[1], causal=True,
        ) + 1  # fmt: skip

    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    for seed in range(4):
        tensors = case.tensors(device, seed)
        assert differing(through(compiled, tensors), through(layer, tensors)) == [], seed


@MODES
def test_a_block_mask(mode, device):
    """A graph of two layers and more calls owns what it makes of the mask, and an eager call after
    it is unchanged."""
    mask = masks.sliding_window(300, 1100, device=device)

    def layers(q, k, v):
        once = flash_attn_func(q * 2, k, v, block_mask=mask)
        return flash_attn_func(once, k, v, block_mask=mask) + 1

    compiled = torch.compile(layers, fullgraph=True, mode=mode)
    found = []
    for seed in range(3):
        tensors = CASES["dense"].tensors(device, seed)
        found.append((tensors, through(compiled, tensors)))
    for tensors, results in found:
        assert differing(results, through(layers, tensors)) == []


@MODES
def test_divided_keys(mode, device):
    tensors = CASES["split"].tensors(device)

    def layer(q, k, v):
        return flash_attn_func(q * 2, k, v, num_splits=8) + 1

    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    wanted = layer(*(tensors[name] for name in "qkv"))
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(*(tensors[name] for name in "qkv")), wanted)
