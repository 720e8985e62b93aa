"""Numbers that graphs know by a symbol alone, and those of NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fa4_hd256 import flash_attn_func, flash_attn_varlen_func, get_scheduler_metadata, masks
from fa4_hd256.call.options import Options, requested_splits


def packed(device):
    """Return more rows than a decode tile has: the forward's kernels, which others compile."""
    rows = [torch.randn(80, heads, 256, device=device).bfloat16() for heads in (2, 1, 1)]
    return *rows, torch.tensor([0, 30, 80], dtype=torch.int32, device=device)


def attend(q, k, v, offsets):
    """Call attention like users who have offsets alone."""
    longest = offsets.diff().max().item()
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest,
        max_seqlen_k=longest, causal=True,
    )  # fmt: skip


@pytest.mark.parametrize("checked", [False, True], ids=["no hint", "bounds"])
def test_a_longest_sequence_that_a_graph_reads(device, checked):
    def call(q, k, v, offsets):
        longest = offsets.diff().max().item()
        if checked:
            torch._check(longest >= 1)
            torch._check(longest <= 80)
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest,
            max_seqlen_k=longest, causal=True,
        ).sin()  # fmt: skip

    given = packed(device)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(*given), attend(*given).sin())
        leaves = [tensor.clone().requires_grad_() for tensor in given[:3]]
        compiled(*leaves, given[3]).float().sum().backward()
    assert all(leaf.grad is not None for leaf in leaves)


@pytest.mark.parametrize("strict", [False, True])
def test_it_is_exported(device, strict):
    class Layer(torch.nn.Module):
        def forward(self, *given):
            return attend(*given)

    program = torch.export.export(Layer(), packed(device), strict=strict)
    targets = [str(node.target) for node in program.graph.nodes]
    assert "fa4_hd256.forward.default" in targets


def test_scalars_of_numpy():
    """Each is what Python's own would be."""
    options = Options.check(np.float32(0.5), np.bool_(True), (np.int64(4), np.int32(0)), 0.0)
    assert options == Options.check(0.5, True, (4, 0), 0.0)
    assert type(requested_splits(np.int64(2), np.bool_(False))) is int
    assert requested_splits(np.int64(0), np.bool_(True)) == requested_splits(0, True)
    assert masks.sliding_window(np.int64(3), np.int64(8)).lengths == (8, 8)
    masks.documents(torch.zeros(8, dtype=torch.int64), causal=np.bool_(True))
    lengths = torch.tensor([5], dtype=torch.int32)
    get_scheduler_metadata(lengths, np.int64(1), np.int64(8), np.int64(1), np.int64(1))
    with pytest.raises(TypeError, match="causal must be True or False"):
        Options.check(None, np.int64(1), (None, None), 0.0)


def test_calls_with_scalars_of_numpy(device):
    q, k, v, offsets = packed(device)
    expected = attend(q, k, v, offsets)
    found = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=np.int64(50),
        max_seqlen_k=np.int32(50), causal=np.bool_(True), num_splits=np.int64(1),
        use_clc=np.bool_(False),
    )  # fmt: skip
    assert torch.equal(found, expected)
    dense = [tensor[None] for tensor in (q, k, v)]
    assert torch.equal(
        flash_attn_func(*dense, causal=np.bool_(True)), flash_attn_func(*dense, causal=True)
    )
