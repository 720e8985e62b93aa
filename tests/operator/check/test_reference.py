"""The reference against PyTorch's own attention in float64, and the tolerance it sets."""

from __future__ import annotations

import math

import pytest
import torch

from fa4_hd256.check import reference


def inputs(seqlen_q, seqlen_k, heads, heads_kv, batch=2):
    shapes = ((seqlen_q, heads), (seqlen_k, heads_kv), (seqlen_k, heads_kv))
    return [torch.randn(batch, s, h, 256).bfloat16() for s, h in shapes]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 1.0, -0.05, 0.0])
# More keys than queries, fewer (rows that see nothing under causal), equal.
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 9), (9, 5), (7, 7)])
def test_against_pytorch(seqlen_q, seqlen_k, scale, causal):
    q, k, v = inputs(seqlen_q, seqlen_k, 4, 2)
    out, lse = reference.attention(q, k, v, softmax_scale=scale, causal=causal)
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if causal:
        mask = mask.tril(seqlen_k - seqlen_q)
    q, k, v = (t.transpose(1, 2).double() for t in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=True
    ).nan_to_num(0.0)
    assert torch.allclose(out, expected.transpose(1, 2), atol=1e-12)
    scores = (1 / 16 if scale is None else scale) * q @ k.repeat_interleave(2, 1).mT
    expected_lse = scores.masked_fill(~mask, -math.inf).logsumexp(3)
    assert torch.allclose(lse, expected_lse, atol=1e-12)
    assert (lse == -math.inf).any() == (causal and seqlen_q > seqlen_k)


def order_bounds(q, k, v):
    """Return how far out and lse may differ between two orders of float64 sums, at the default
    scale.

    A sum of n products in any order, fused or not, is off by at most n * EPSILON / 2 of the sum of
    the absolute products (Higham, Accuracy and Stability of Numerical Algorithms, 3.1), so two
    orders differ by n * EPSILON of it. No BLAS promises one order for matrices of different shapes.
    """
    epsilon = torch.finfo(torch.float64).eps
    q, k, v = (t.double() for t in (q, k, v))
    products = torch.einsum("bqhd,bkgd->bhqk", q.abs(), k.abs()) / math.sqrt(q.shape[3])
    scores = (q.shape[3] + 1) * epsilon * products.max()  # one more for the scale
    # log(sum(exp(s - top))) + top: beside the sum of the keys, up to 8 roundings of exp, log, and
    # what is added, each of numbers no larger than the scores.
    lse = scores + (k.shape[1] + 8) * epsilon * products.max().clamp(min=1.0)
    # exp(s - lse) is off by the errors of its argument and its own; weights sum to 1.
    out = (scores + lse + (k.shape[1] + 4) * epsilon) * v.abs().max()
    return out, lse


def test_rows_in_parts(monkeypatch):
    q, k, v = inputs(50, 40, 2, 1)
    out, lse = reference.attention(q, k, v, causal=True)
    monkeypatch.setattr(reference, "_ROWS", 7)
    out_parts, lse_parts = reference.attention(q, k, v, causal=True)
    out_bound, lse_bound = order_bounds(q, k, v)
    assert ((out_parts - out).abs() <= out_bound).all()
    assert torch.equal(lse_parts == -math.inf, lse == -math.inf)
    sees = lse != -math.inf
    assert ((lse_parts - lse)[sees].abs() <= lse_bound).all()
    # The bounds tell every row from its neighbours, so that a part put elsewhere is seen.
    assert (out.diff(dim=1).abs().amax(3)[:, 10:] > 1e6 * out_bound).all()
    assert (lse.diff(dim=2)[..., 10:].abs() > 1e3 * lse_bound).all()


def test_comparison_accepts_what_is_right_and_nothing_else():
    q, k, v = inputs(40, 30, 2, 1, batch=1)
    options = {"causal": True}
    exact, exact_lse = reference.attention(q, k, v, **options)
    out, lse = exact.bfloat16(), exact_lse.float()
    good = reference.compare(out, lse, (q, k, v), **options)
    assert good.max_error == good.rounding <= good.tolerance
    assert good.lse_max_error < 1e-6

    wrong = out.clone()
    wrong[0, 39, 1, 3] += 3 * good.tolerance
    assert reference.compare(wrong, lse, (q, k, v), **options).max_error > good.tolerance
    wrong[0, 39, 1, 3] = math.nan
    assert reference.compare(wrong, lse, (q, k, v), **options).max_error == math.inf
    # Row 0 sees no key: a finite lse there is wrong, however small.
    assert exact_lse[0, 0, 0] == -math.inf
    wrong_lse = lse.clone()
    wrong_lse[0, 0, 0] = -1e30
    assert reference.compare(out, wrong_lse, (q, k, v), **options).lse_max_error == math.inf


def leaves(*tensors):
    return [t.double().requires_grad_() for t in tensors]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, -0.05])
# Fewer keys than queries: under causal, rows that see nothing.
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 9), (9, 5)])
def test_gradients_against_pytorch(seqlen_q, seqlen_k, scale, causal):
    inputs_ = inputs(seqlen_q, seqlen_k, 4, 2)
    dout = torch.randn(2, seqlen_q, 4, 256)
    got = reference.gradients(inputs_, dout, softmax_scale=scale, causal=causal)
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if causal:
        mask = mask.tril(seqlen_k - seqlen_q)
    exact = leaves(*inputs_)
    rows = mask.any(dim=1)
    q, k, v = (t.transpose(1, 2) for t in exact)
    out = torch.nn.functional.scaled_dot_product_attention(
        q[:, :, rows], k, v, attn_mask=mask[rows], scale=scale, enable_gqa=True
    )
    (out.transpose(1, 2) * dout[:, rows].double()).sum().backward()
    for name, leaf in zip("qkv", exact):
        assert torch.allclose(got[name], leaf.grad, atol=1e-12), name


def small(seqlen_q, seqlen_k, heads, heads_kv):
    shapes = ((seqlen_q, heads), (seqlen_k, heads_kv), (seqlen_k, heads_kv))
    return leaves(*(torch.randn(1, s, h, 3) for s, h in shapes))


# gradcheck compares with finite differences, so it shares no formula with autograd.
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window_size": (1, 1), "softcap": 2.0},
        {"softmax_scale": -0.7, "window_size": (2, None)},
    ],
    ids=str,
)
def test_gradients_by_finite_differences(options):
    q, k, v = small(4, 3, 2, 1)
    (sink,) = leaves(torch.randn(2))

    def both(q, k, v, sink):
        return reference.attention(q, k, v, learnable_sink=sink, **options)

    assert torch.autograd.gradcheck(both, (q, k, v, sink))


def test_rows_without_a_visible_key_have_no_gradient():
    """Causal, 5 queries of 2 keys: the first three see nothing, whatever their LSE's gradient."""
    q, k, v = (t.detach() for t in small(5, 2, 1, 1))
    dout, dlse = torch.randn(1, 5, 1, 3), torch.randn(1, 1, 5)
    for of in (reference.gradients, reference.same_dtype_gradients):
        whole = of((q, k, v), dout.double(), dlse, causal=True)
        part = of((q[:, 3:], k, v), dout[:, 3:].double(), dlse[..., 3:], causal=True)
        assert (whole["q"][:, :3] == 0).all()
        assert torch.allclose(whole["q"][:, 3:], part["q"], atol=1e-14)
        assert all(torch.allclose(whole[name], part[name], atol=1e-14) for name in "kv")


@pytest.mark.parametrize("with_sink", [False, True])
def test_the_two_sets_of_gradients_agree_in_float64(with_sink):
    """Plain PyTorch and the reference are the same function: in float64 they meet."""
    inputs_ = [t.detach() for t in small(6, 4, 4, 2)]
    options = {"window_size": (2, 1), "softcap": 3.0}
    if with_sink:
        options["learnable_sink"] = torch.randn(4).double()
    dout, dlse = torch.randn(1, 6, 4, 3).double(), torch.randn(1, 4, 6)
    exact = reference.gradients(inputs_, dout, dlse, **options)
    plain = reference.same_dtype_gradients(inputs_, dout, dlse, **options)
    assert list(exact) == list(plain) == ["q", "k", "v", *(["sink"] if with_sink else [])]
    for name in exact:
        # Plain PyTorch's softmax and LSE are in float32.
        assert torch.allclose(exact[name], plain[name], atol=1e-5), name


def test_comparison_of_gradients_accepts_what_is_right_and_nothing_else():
    inputs_ = inputs(20, 30, 2, 1, batch=1)
    dout = torch.randn(1, 20, 2, 256).bfloat16()
    exact = reference.gradients(inputs_, dout, causal=True)
    found = {name: t.bfloat16() for name, t in exact.items()}
    good = reference.compare_gradients(found, inputs_, dout, causal=True)
    assert all(g.max_error == g.rounding <= g.tolerance for g in good.values())
    # The allowance for cancellation is far below the other two here.
    assert all(g.cancellation < 0.01 * g.tolerance for g in good.values())
    found["k"][0, 3, 0, 7] += 3 * good["k"].tolerance
    found["v"][0, 3, 0, 7] = math.nan
    wrong = reference.compare_gradients(found, inputs_, dout, causal=True)
    assert wrong["q"] == good["q"] and wrong["k"].max_error > good["k"].tolerance
    assert wrong["v"].max_error == math.inf


def test_cancellation_allows_float32s_rounding_and_little_more():
    """One key: dQ and dK are 0 in exact arithmetic, and an error of float32 in float32."""
    inputs_ = inputs(20, 1, 2, 1, batch=1)
    dout = torch.randn(1, 20, 2, 256).bfloat16()
    q, k, v = (t.float() for t in inputs_)
    # dP by one order of summation, delta by another.
    dp = torch.einsum("bqhd,bkhd->bqh", dout.float(), v)
    delta = (dout.float() * v).flip(3).cumsum(3)[..., -1]
    ds = (dp - delta)[..., None] / 16
    found = {"q": ds * k, "k": (ds * q).sum(dim=(1, 2), keepdim=True), "v": torch.zeros_like(v)}
    compared = reference.compare_gradients(found, inputs_, dout)
    for name in "qk":
        exact = compared[name]
        assert exact.rounding < 1e-12 and exact.pytorch_max_error < 1e-12
        assert 0 < exact.max_error <= exact.tolerance <= 100 * exact.max_error
