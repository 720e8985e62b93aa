"""Inputs in float32 under autocast are cast as PyTorch's own attention casts them."""

from __future__ import annotations

import pytest
import torch

from fa4_hd256 import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, kv_cache
from fa4_hd256.call.autocast import autocast
from fa4_hd256.integrations.context_parallel import attention as over_ranks
from fa4_hd256.integrations.flex_attention import flex_attention


def inputs(device):
    """Return more rows than a decode tile has: the forward's kernels, which others compile."""
    return [torch.randn(1, 40, heads, 256, device=device) for heads in (2, 1, 1)]


def gradients(call, tensors, cast):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = call(*[leaf.bfloat16() if cast else leaf for leaf in leaves])
    out.float().square().sum().backward()
    return [out, *[leaf.grad for leaf in leaves]]


def dense(q, k, v):
    return flash_attn_func(q, k, v, causal=True)


def packed(q, k, v):
    offsets = torch.tensor([0, 3, 40], dtype=torch.int32, device=q.device)
    options = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "causal": True}
    return flash_attn_varlen_func(q[0], k[0], v[0], max_seqlen_q=37, max_seqlen_k=37, **options)


def flex(q, k, v):
    return flex_attention(*(t.transpose(1, 2) for t in (q, k, v)), enable_gqa=True)


@pytest.mark.parametrize("call", [dense, packed, flex])
def test_results_and_gradients(call, device):
    """Gradients have the dtype of the leaves."""
    given = inputs(device)
    expected = gradients(call, given, True)
    with torch.autocast(device, dtype=torch.bfloat16):
        found = gradients(call, given, False)
        with torch.autocast(device, enabled=False), pytest.raises(TypeError, match="float32"):
            call(*given)
    assert [f.dtype for f in found] == [torch.bfloat16, *[torch.float32] * 3]
    assert all(map(torch.equal, found, expected))
    with pytest.raises(TypeError, match="q has dtype torch.float32"):
        call(*given)


def test_inside_a_graph_and_around_it(device):
    given = inputs(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        expected = dense(*given)

    def inside(*tensors):
        with torch.autocast(device, dtype=torch.bfloat16):
            return dense(*tensors)

    assert torch.equal(torch.compile(inside, backend="eager", fullgraph=True)(*given), expected)
    with torch.autocast(device, dtype=torch.bfloat16):
        found = torch.compile(dense, backend="eager", fullgraph=True)(*given)
    assert torch.equal(found, expected)


def test_operators_called_by_themselves(device, monkeypatch):
    """A graph that was exported outside of autocast calls them so."""
    from operator_calls import forward_arguments

    q, k, v = inputs(device)
    arguments = forward_arguments(*(t.bfloat16() for t in (q, k, v)))
    expected, _ = torch.ops.fa4_hd256.forward(*arguments)
    with torch.autocast(device, dtype=torch.bfloat16):
        found, _ = torch.ops.fa4_hd256.forward(q, k, v, *arguments[3:])
    assert torch.equal(found, expected)


def test_what_is_cast():
    single, half = torch.zeros(1), torch.zeros(1).half()
    double, eight = torch.zeros(1).double(), torch.zeros(1).to(torch.float8_e4m3fn)

    def dtypes(*tensors, fixed=None):
        return [getattr(t, "dtype", None) for t in autocast(*tensors, fixed=fixed)]

    assert dtypes(single) == [torch.float32]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert dtypes(single) == [torch.float32]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert dtypes(single, half, None) == [torch.bfloat16, torch.bfloat16, None]
        assert dtypes(single, double, eight) == [torch.bfloat16, double.dtype, eight.dtype]
        # Beside a cache, or out, which stays as it is.
        assert dtypes(single, half, fixed=half) == [torch.float16, torch.float16]
        assert dtypes(single, half, fixed=eight) == [torch.bfloat16, torch.float16]


def test_caches_and_out_stay_as_they_are(monkeypatch):
    seen = []

    def attend(inputs, *others):
        seen.append([t.dtype for t in inputs[:3]])
        return inputs[0]

    monkeypatch.setattr(kv_cache, "attend_sequences", attend)
    q, k, v = inputs("cpu")
    with torch.autocast("cpu", dtype=torch.float16):
        flash_attn_with_kvcache(q, k.bfloat16(), v.bfloat16())
        with pytest.raises(TypeError, match="dtype"):
            flash_attn_func(q, k, v, out=torch.empty_like(q))
    assert seen == [[torch.bfloat16] * 3]


def test_over_ranks(monkeypatch):
    class Stop(Exception):
        pass

    def batched(*inputs):
        raise Stop([tensor.dtype for tensor in inputs[:3]])

    class Ranks:
        def agree(self, check):
            return check()

    monkeypatch.setattr(over_ranks, "batched", batched)
    q, k, v = inputs("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(Stop, match="bfloat16"):
        over_ranks._attend_over_ranks("ring", (q, k, v), None, Ranks())
