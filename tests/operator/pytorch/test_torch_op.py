"""The torch operator behind the public function."""

from __future__ import annotations

import pytest
import torch
from operator_calls import forward_arguments

from fa4_hd256 import flash_attn_func
from fa4_hd256.call.options import FIXED_SPLITS, MOST_SPLITS


def inputs(device, heads=2):
    shapes = ((4, heads), (20, 1), (20, 1))
    return tuple(torch.randn(1, s, h, 256).to(device, torch.bfloat16) for s, h in shapes)


@pytest.mark.parametrize("num_splits", [FIXED_SPLITS - 1, MOST_SPLITS + 1])
def test_the_operator_refuses_a_number_of_splits(num_splits, device):
    with pytest.raises(ValueError, match=f"num_splits is {num_splits}; accepted"):
        torch.ops.fa4_hd256.forward(*forward_arguments(*inputs(device), num_splits=num_splits))


def test_shapes_without_running():
    """The meta device can run nothing; shapes, dtypes and errors still come out."""
    q, k, v = (
        torch.empty(2, s, h, 256, dtype=torch.float16, device="meta")
        for s, h in ((5, 6), (7, 2), (7, 2))
    )
    out, lse = torch.ops.fa4_hd256.forward(*forward_arguments(q, k, v))
    assert out.shape == q.shape and out.dtype == torch.float16
    assert lse.shape == (2, 6, 5) and lse.dtype == torch.float32
    with pytest.raises(ValueError, match="6 query heads over 4"):
        wrong = torch.empty(2, 7, 4, 256, dtype=torch.float16, device="meta")
        torch.ops.fa4_hd256.forward(*forward_arguments(q, wrong, wrong))


def test_fake_results_are_laid_out_like_real_ones(device):
    """A transposed q must not give a transposed out in one of the two."""
    q, k, v = inputs(device)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    real, fake = (
        torch.ops.fa4_hd256.forward(
            *forward_arguments(*(t.to(where) for t in (q, k, v)), window_right=0)
        )
        for where in (device, "meta")
    )
    assert [t.stride() for t in real] == [t.stride() for t in fake]


def test_one_graph_serves_all_lengths(device):
    """Dynamic shapes trace nothing again, as no kernel is compiled again."""

    def layer(q, k, v):
        return flash_attn_func(q, k, v, causal=True)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seqlen in (40, 70):
            tensors = [torch.randn(1, seqlen, h, 256).to(device, torch.bfloat16) for h in (2, 1, 1)]
            assert torch.equal(compiled(*tensors), layer(*tensors))
