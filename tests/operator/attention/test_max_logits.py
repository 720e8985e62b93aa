"""The greatest logit of each head, `return_max_logits=True`, against the float64 reference.

Queries meet several key tiles (128 keys on Blackwell, 64 to 128 on Hopper), so that the running
maximum of the online softmax lags behind the true one: it moves by the rescaling threshold or not
at all.
"""

from __future__ import annotations

import math

import pytest
import torch
from paged_cases import offsets

from fa4_hd256 import flash_attn_func, flash_attn_varlen_func, masks
from fa4_hd256.check import reference
from fa4_hd256.score_mods import alibi

#: Rounding of float32 sums of 256 products, relative to logits of a few units.
TOLERANCE = 2e-5


def dense(lengths=(150, 300), heads=(4, 2), batch=2, device="cpu"):
    torch.manual_seed(0)
    shapes = [(batch, lengths[i > 0], heads[i > 0], 256) for i in range(3)]
    return [torch.randn(shape).to(device, torch.bfloat16) for shape in shapes]


def check(found, q, k, **options):
    assert found.shape == (q.shape[2],) and found.dtype == torch.float32
    assert not found.requires_grad
    wanted = reference.max_logits(q, k, **options)
    torch.testing.assert_close(found.cpu().double(), wanted, atol=TOLERANCE, rtol=TOLERANCE)


# Packed heads; queries that see no key; parts; a scale that reverses the order, so that the least
# product is the greatest logit; a sink above all logits, which is none of them.
@pytest.mark.parametrize(
    ("options", "call"),
    [({"causal": True}, {}),
     ({"causal": True, "use_clc": True}, {"lengths": (300, 150), "heads": (3, 3)}),
     ({"num_splits": 3}, {"lengths": (20, 400)}),
     ({"softmax_scale": -0.1, "window_size": (60, 20)}, {}),
     ({"softcap": 3.0, "learnable_sink": torch.full((4,), 50.0)}, {})],
    ids=["causal", "dynamic", "parts", "negative", "softcap"],
)  # fmt: skip
@pytest.mark.sampled("causal")
def test_dense(options, call, device):
    q, k, v = dense(device=device, **call)
    options = {n: o.to(device) if n == "learnable_sink" else o for n, o in options.items()}
    out, lse, found = flash_attn_func(q, k, v, return_lse=True, return_max_logits=True, **options)
    of_maths = {n: o for n, o in options.items() if n not in ("use_clc", "num_splits")}
    check(found, q, k, **of_maths)
    compared = reference.compare(out, lse, (q, k, v), **of_maths)
    assert compared.max_error <= compared.tolerance


def test_a_score_that_is_no_number_shows(device):
    """A NaN shows in its own head; the others have their maxima."""
    q, k, v = dense(device=device)
    q[1, 7, 2, 5] = math.nan
    _, found = flash_attn_func(q, k, v, causal=True, return_max_logits=True)
    assert found.isnan().tolist() == [False, False, True, False]
    check(found[[0, 1, 3]], q[:, :, [0, 1, 3]], k[:, :, [0, 0, 1]], causal=True)


@pytest.mark.sampled
def test_packed_sequences_and_padding(device):
    """One sequence without queries, one without keys; rows behind the last offset are not read."""
    lengths_q, lengths_k = (0, 140, 33, 5), (70, 290, 0, 6)
    q, k, v = (torch.randn(rows, 2, 256).to(device, torch.bfloat16) for rows in (200, 400, 400))
    q[178:], k[366:] = 100.0, 100.0
    bounds = [offsets(lengths, device) for lengths in (lengths_q, lengths_k)]
    out, found = flash_attn_varlen_func(
        q[:178], k[:366], v[:366], cu_seqlens_q=bounds[0], cu_seqlens_k=bounds[1],
        max_seqlen_q=140, max_seqlen_k=290, causal=True, return_max_logits=True,
    )  # fmt: skip
    assert out.shape == (178, 2, 256)
    wanted, first_q, first_k = torch.full((2,), -math.inf, dtype=torch.float64), 0, 0
    for rows, keys in zip(lengths_q, lengths_k, strict=True):
        one = q[None, first_q : first_q + rows], k[None, first_k : first_k + keys]
        wanted = torch.maximum(wanted, reference.max_logits(*one, causal=True))
        first_q, first_k = first_q + rows, first_k + keys
    torch.testing.assert_close(found.cpu().double(), wanted, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.sampled
def test_queries_past_those_in_use_and_a_head_that_sees_nothing(device):
    q, k, v = dense((70, 40), (2, 1), device=device)
    used = torch.tensor([0, 9], dtype=torch.int32, device=device)
    call = {"seqused_q": used, "return_max_logits": True}
    _, found = flash_attn_varlen_func(q, k, v, **call)
    check(found, q[1:, :9], k[1:])
    _, found = flash_attn_varlen_func(q, k, v, **{**call, "seqused_q": torch.zeros_like(used)})
    assert found.tolist() == [-math.inf] * 2
    nothing = torch.zeros(2, dtype=torch.int32, device=device)
    _, found = flash_attn_varlen_func(
        q[0, :0], k[0, :0], v[0, :0], cu_seqlens_q=nothing, cu_seqlens_k=nothing, max_seqlen_q=1,
        return_max_logits=True,
    )  # fmt: skip
    assert found.tolist() == [-math.inf] * 2


@pytest.mark.sampled
def test_a_block_mask_and_a_score_mod(device):
    q, k, v = dense((140, 280), (2, 2), device=device)
    seen = torch.rand(1, 1, 140, 280) < 0.01
    slopes = torch.tensor([0.5, 0.01])
    out, found = flash_attn_func(
        q, k, v, block_mask=masks.from_dense(seen.to(device)), score_mod=alibi(slopes.to(device)),
        return_max_logits=True,
    )  # fmt: skip
    assert out.shape == q.shape

    def biased(score, batch, head, query, key):
        return score - slopes[head] * (query + 140 - key).abs()

    check(found, q, k, mask=seen, score_mod=biased)


@pytest.mark.sampled
def test_gradients_are_those_without(device):
    q, k, v = (t.requires_grad_() for t in dense((130, 130), (2, 1), 1, device=device))
    dout = torch.randn_like(q)
    plain = torch.autograd.grad(flash_attn_func(q, k, v, causal=True), (q, k, v), dout)
    out, found = flash_attn_func(q, k, v, causal=True, return_max_logits=True)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    check(found, q, k, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients, strict=True))
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_lse=True, return_max_logits=True)
    assert lse.requires_grad and out.requires_grad


def test_what_is_refused():
    q, k, v = dense((3, 9), (2, 1))
    with pytest.raises(ValueError, match="out is given with return_max_logits=True; accepted"):
        flash_attn_func(q, k, v, out=torch.empty_like(q), return_max_logits=True)
    k, v = (t.to(torch.float8_e4m3fn) for t in (k, v))
    with pytest.raises(NotImplementedError, match="return_max_logits: the kernel .*accepted"):
        flash_attn_func(q, k, v, return_max_logits=True)
