"""The reference against PyTorch's own attention in float64, and the tolerance it sets."""

from __future__ import annotations

import math

import pytest
import torch

from fa4_hd256 import reference


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


def test_rows_in_parts(monkeypatch):
    q, k, v = inputs(50, 40, 2, 1)
    whole = reference.attention(q, k, v, causal=True)
    monkeypatch.setattr(reference, "_ROWS", 7)
    parts = reference.attention(q, k, v, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts))


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
