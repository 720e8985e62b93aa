"""PyTorch's adapter for flash-attention implementations, over this attention.

The adapter takes CUDA tensors only. On the CPU its checks are lifted and its functions called as
the dispatcher would, so that what it passes and expects back is tested.
"""

from __future__ import annotations

from inspect import signature

import pytest
import torch
from torch.nn import attention as torch_attention
from torch.nn.attention import _fa4 as adapter

from fa4_hd256 import flash_attn_func
from fa4_hd256.call.options import MOST_SPLITS
from fa4_hd256.integrations import given_results, warnings_once
from fa4_hd256.integrations import sdpa as integration
from fa4_hd256.ops.autograd import call_backward

MODULE = integration.__name__


@pytest.fixture
def adapted(monkeypatch):
    """The adapter as `activate_flash_attention_impl` sets it up, without the dispatcher."""
    assert adapter._fa4_import_module(MODULE) is integration
    monkeypatch.setattr(adapter, "_FA4_MODULE_PATH", MODULE)
    monkeypatch.setattr(adapter, "_get_device_major", lambda device: 10)
    monkeypatch.setattr(adapter, "_fa4_common_support_error", lambda *args, **kwargs: None)
    return adapter


def adapter_without(function: str, parameter: str = "") -> bool:
    """Return True if PyTorch's adapter, which grew from version to version, lacks a function of its
    own, or a parameter of it."""
    found = getattr(adapter, function, None)
    return found is None or bool(parameter) and parameter not in signature(found).parameters


def inputs(device, seqlen_q=40, seqlen_k=40, heads=2):
    """More rows than a decode tile has: the forward's kernels, which others compile."""
    shapes = ((heads, seqlen_q), (1, seqlen_k), (1, seqlen_k))
    return tuple(torch.randn(2, h, s, 256).to(device, torch.bfloat16) for h, s in shapes)


def math_attention(q, k, v, **options):
    """PyTorch's own, in float64."""
    with torch_attention.sdpa_kernel(torch_attention.SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), enable_gqa=True, **options
        )


def close(out, expected):
    return (out.double() - expected).abs().max() < 2**-7 * expected.abs().max()


def no_worse(found, expected, own):
    """Return whether the error of found is at most twice that of PyTorch's own result."""
    return (found.double() - expected).abs().max() <= 2 * (own.double() - expected).abs().max()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.sampled("False")
def test_dense(device, adapted, causal):
    q, k, v = inputs(device)
    out, lse, *_, max_q, max_k, seed, offset, _ = (
        adapted._fa4_scaled_dot_product_flash_attention_forward_impl(
            q, k, v, 0.0, causal, False, scale=0.1
        )
    )
    assert out.shape == q.shape and out.stride() == q.stride() and out.dtype == q.dtype
    assert close(out, math_attention(q, k, v, is_causal=causal, scale=0.1))
    assert not close(out, math_attention(q, k, v, is_causal=not causal, scale=0.1))
    scores = q.double() @ k.double().transpose(-1, -2) * 0.1
    if causal:
        scores.masked_fill_(torch.ones(40, 40, device=device).triu(1).bool(), -torch.inf)
    assert lse.shape == (2, 2, 40) and lse.dtype == torch.float32
    assert (lse - scores.logsumexp(-1)).abs().max() < 1e-4
    assert (max_q, max_k) == (40, 40) and seed is not None and offset is not None


@pytest.mark.sampled
def test_packed_sequences_with_a_window(device, adapted):
    """torch.nn.attention.varlen passes offsets, both maxima, a window, seqused_k."""
    lengths = (3, 0, 6)
    offsets = torch.tensor([0, 3, 3, 9], dtype=torch.int32, device=device)
    q, k, v = (torch.randn(9, h, 256).to(device, torch.bfloat16) for h in (2, 1, 1))
    out, lse, *_ = adapted._fa4_flash_attention_forward_impl(
        q, k, v, offsets, offsets, 6, 6, 0.0, False, False, window_size_left=1,
        window_size_right=0,
    )  # fmt: skip
    assert out.shape == q.shape and lse.shape == (2, 9)
    first = 0
    for length in lengths:
        rows = slice(first, first + length)
        distance = torch.arange(length) - torch.arange(length)[:, None]
        band = ((distance <= 0) & (distance >= -1)).to(device)
        if length:
            expected = math_attention(
                *(x[rows].transpose(0, 1)[None] for x in (q, k, v)), attn_mask=band
            )
            assert close(out[rows].transpose(0, 1)[None], expected)
        first += length


@pytest.mark.skipif(
    adapter_without("_fa4_flash_attention_forward_impl", "num_splits"),
    reason="this PyTorch's adapter knows no num_splits",
)
@pytest.mark.parametrize("num_splits", [None, 4])
@pytest.mark.sampled
def test_split_keys(num_splits, device, adapted, combined, monkeypatch):
    """A number is passed on; for None the adapter passes 1."""
    passed, forward = [], integration.flash_attn_varlen_func
    monkeypatch.setattr(
        integration, "flash_attn_varlen_func",
        lambda *call, **options: passed.append(options["num_splits"]) or forward(*call, **options),
    )  # fmt: skip
    q, k, v = (x.transpose(1, 2) for x in inputs(device, 9, 500, heads=8))
    out, lse, *_ = adapted._fa4_flash_attention_forward_impl(
        q, k, v, None, None, 9, 500, 0.0, False, False, scale=0.1, num_splits=num_splits
    )
    divided = [problem.num_splits for problem, _ in combined]
    assert passed == [num_splits or 1] and divided == ([num_splits] if num_splits else [])
    expected = math_attention(*(x.transpose(1, 2) for x in (q, k, v)), scale=0.1)
    assert close(out.transpose(1, 2), expected)
    scores = q.double().transpose(1, 2) @ k.double().permute(0, 2, 3, 1) * 0.1
    assert (lse - scores.logsumexp(-1)).abs().max() < 1e-4


@pytest.mark.skipif(
    adapter_without("_fa4_flash_attention_forward_no_dropout_inplace_impl"),
    reason="this PyTorch's adapter writes to no tensor of its caller's",
)
def test_out_is_written_in_place(device, adapted):
    q, k, v = (x.transpose(1, 2) for x in inputs(device))
    out = torch.empty_like(q)
    lse = adapted._fa4_flash_attention_forward_no_dropout_inplace_impl(
        out, q, k, v, None, None, 40, 40, 0.0, False, False
    )
    result, same = integration._flash_attn_fwd(q, k, v)
    assert torch.equal(out, result) and torch.equal(lse, same)
    assert integration._flash_attn_fwd(q, k, v, return_lse=False)[1] is None


def test_out_that_is_given(device, monkeypatch):
    """The kernels write to it, also where gradients are recorded elsewhere; one of another type or
    shape is refused."""
    seen, forward = [], integration.flash_attn_varlen_func
    monkeypatch.setattr(
        integration, "flash_attn_varlen_func",
        lambda *call, **options: seen.append(options.get("out")) or forward(*call, **options),
    )  # fmt: skip
    q, k, v = (x.transpose(1, 2) for x in inputs(device))
    out = torch.empty_like(q)
    result, _ = integration._flash_attn_fwd(q.clone().requires_grad_(), k, v, out=out)
    assert result is out and seen == [out] and not out.requires_grad
    assert torch.equal(out, integration._flash_attn_fwd(q, k, v)[0])
    for wrong, message in (
        (out.half(), "out has dtype torch.float16; accepted: torch.bfloat16"),
        (out.new_empty(3, *out.shape), r"out has shape \(3, 2, 40, 2, 256\); accepted"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            integration._flash_attn_fwd(q, k, v, out=wrong)


@pytest.mark.skipif(
    adapter_without("_fa4_flash_attention_forward_impl", "num_splits"),
    reason="this PyTorch's adapter knows no num_splits",
)
def test_what_is_not_offered(device, adapted):
    q, k, v = inputs(device)
    dense = (*(x.transpose(1, 2) for x in (q, k, v)), None, None, 40, 40, 0.0, False, False)
    with pytest.raises(ValueError, match=f"num_splits is {MOST_SPLITS + 1}"):
        adapted._fa4_flash_attention_forward_impl(*dense, num_splits=MOST_SPLITS + 1)


@pytest.mark.sampled
def test_packed_sequences_of_unknown_lengths(device, adapted):
    """An adapter that does not say how long they are: the same bits, whatever the bound."""
    offsets = torch.tensor([0, 3, 9], dtype=torch.int32, device=device)
    call = [torch.randn(9, h, 256).to(device, torch.bfloat16) for h in (2, 1, 1)]
    options = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "causal": True}
    known = integration._flash_attn_fwd(*call, max_seqlen_q=6, max_seqlen_k=6, **options)
    unknown = integration._flash_attn_fwd(*call, **options)
    assert all(torch.equal(a, b) for a, b in zip(known, unknown, strict=True))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.sampled("False")
def test_backward(device, adapted, is_causal):
    """dq, dk, dv of the adapter against PyTorch's own in float32."""
    q, k, v = inputs(device)
    out, lse, *_ = adapted._fa4_scaled_dot_product_flash_attention_forward_impl(
        q, k, v, is_causal=is_causal
    )
    dout, empty = torch.randn_like(out), torch.zeros(0, device=device)
    got = adapted._fa4_scaled_dot_product_flash_attention_backward_impl(
        dout, q, k, v, out, lse, None, None, 40, 40, 0.0, is_causal, empty, empty
    )
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *leaves, is_causal=is_causal, enable_gqa=True
    )
    for gradient, wanted in zip(got, torch.autograd.grad(expected, leaves, dout.float())):
        assert gradient.shape == wanted.shape
        assert (gradient.float() - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.sampled
def test_backward_of_packed_sequences(device, adapted, monkeypatch):
    """Gradients equal those of dense sequences one by one; grids follow the longest one, which the
    forward was told."""
    offsets = torch.tensor([0, 3, 9], dtype=torch.int32, device=device)
    q, k, v, dout = (torch.randn(9, h, 256).to(device, torch.bfloat16) for h in (2, 1, 1, 2))
    out, lse, *_ = adapted._fa4_flash_attention_forward_impl(
        q, k, v, offsets, offsets, 6, 6, 0.0, True, False
    )
    bounds = []

    def noted(tensors, values):
        bounds.append((values.forward.max_seqlen_q, values.forward.max_seqlen_k))
        return call_backward(tensors, values)

    monkeypatch.setattr(given_results, "call_backward", noted)
    empty = torch.zeros(0, device=device)

    def run(offsets):
        return adapted._fa4_flash_attention_backward_impl(
            dout, q, k, v, out, lse, offsets, offsets, 6, 6, 0.0, True, empty, empty
        )

    got = run(offsets)
    assert bounds == [(9, 9) if adapter_without("_fa4_run_forward", "max_q") else (6, 6)]
    # Offsets that no forward has seen: any bound will do, and the total is one.
    assert all(torch.equal(a, b) for a, b in zip(got, run(offsets.clone()), strict=True))
    # Offsets that were overwritten since are unknown, too.
    offsets.add_(0)
    run(offsets)
    assert bounds[1:] == [(9, 9), (9, 9)]
    for rows in (slice(0, 3), slice(3, 9)):
        one = [x[rows][None] for x in (q, k, v, out, dout)]
        alone = integration._flash_attn_bwd(*one, lse[None, :, rows], causal=True)
        assert all(torch.equal(a[rows], b[0]) for a, b in zip(got, alone, strict=True))


def test_registration(device, monkeypatch):
    """Registered under its name; activated through the dispatcher where there is a GPU."""
    name = integration.register()
    assert name in torch_attention.list_flash_attention_impls()
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(RuntimeError, match="no CUDA device"):
            torch_attention.activate_flash_attention_impl(name)
        return
    q, k, v = inputs(device)
    torch_attention.activate_flash_attention_impl(name)
    try:
        assert torch_attention.current_flash_attention_impl() == name
        with torch_attention.sdpa_kernel(torch_attention.SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    finally:
        torch_attention.restore_flash_attention_impl()
    expected = integration._flash_attn_fwd(*(x.transpose(1, 2) for x in (q, k, v)))[0]
    assert torch.equal(out, expected.transpose(1, 2))


@pytest.mark.cuda
def test_gradients_through_the_dispatcher(device):
    """The bits of `flash_attn_func`, forward and backward, while the implementation is active."""
    leaves = [x.requires_grad_() for x in inputs(device, 300, 300)]
    dout = torch.randn_like(leaves[0])
    torch_attention.activate_flash_attention_impl(integration.register())
    try:
        with torch_attention.sdpa_kernel(torch_attention.SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(
                *leaves, is_causal=True, enable_gqa=True
            )
            gradients = torch.autograd.grad(out, leaves, dout)
    finally:
        torch_attention.restore_flash_attention_impl()
    expected = flash_attn_func(*(x.transpose(1, 2) for x in leaves), causal=True)
    assert torch.equal(out, expected.transpose(1, 2))
    wanted = torch.autograd.grad(expected, leaves, dout.transpose(1, 2))
    assert all(torch.equal(a, b) for a, b in zip(gradients, wanted, strict=True))


def test_other_pytorch(monkeypatch):
    monkeypatch.delattr(adapter, "register_flash_attention_fa4")
    with pytest.raises(ImportError, match="cannot register flash-attention implementations"):
        integration.register()


@pytest.mark.parametrize("head_dim", [72, 512])
@pytest.mark.parametrize("causal", [False, True])
def test_layers_of_another_head_dim(device, adapted, caplog, head_dim, causal):
    """SDPA's other kernels compute them; a line says so, once for each kind."""
    warnings_once._logged.clear()
    q, k, v = (
        torch.randn(2, heads, 9, head_dim, device=device, dtype=torch.bfloat16).requires_grad_()
        for heads in (2, 1, 1)
    )
    scores = q.double() @ k.double().transpose(-1, -2) * 0.1
    if causal:
        scores = scores.masked_fill(~torch.ones(9, 9, device=device).tril().bool(), -torch.inf)
    expected = scores.softmax(-1) @ v.double()
    for _ in range(2):
        out, lse, *_ = adapted._fa4_scaled_dot_product_flash_attention_forward_impl(
            q.detach(), k.detach(), v.detach(), 0.0, causal, False, scale=0.1
        )
    assert out.dtype == q.dtype and close(out, expected)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-2, atol=1e-2)
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(expected, (q, k, v), dout.double())
    found = integration._flash_attn_bwd(
        *(t.detach().transpose(1, 2) for t in (q, k, v, out, dout)), lse, softmax_scale=0.1,
        causal=causal, deterministic=False,
    )  # fmt: skip
    own = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=0.1, enable_gqa=True
    )
    own = torch.autograd.grad(own, (q, k, v), dout)
    for one, other, theirs in zip(found, wanted, own, strict=True):
        assert no_worse(one.transpose(1, 2), other.double(), theirs)
    lines = [record for record in caplog.records if record.name == "fa4_hd256"]
    assert len(lines) == 1 and f"head_dim {head_dim} take SDPA's other" in lines[0].getMessage()


def test_packed_layers_of_another_head_dim(device):
    q, k, v = (torch.randn(8, heads, 72, device=device).bfloat16() for heads in (2, 1, 1))
    offsets = torch.tensor([0, 3, 8], dtype=torch.int32, device=device)
    given = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "window_size_left": 1}
    out, lse = integration._flash_attn_fwd(q, k, v, causal=True, **given)
    dout = torch.randn_like(out)
    found = integration._flash_attn_bwd(q, k, v, out, dout, lse, causal=True, **given)
    for first, last in ((0, 3), (3, 8)):
        leaves = [t[first:last].double().transpose(0, 1).requires_grad_() for t in (q, k, v)]
        rows = torch.arange(last - first, device=device)
        ahead = rows - rows[:, None]
        scores = leaves[0] @ leaves[1].transpose(-1, -2) / 72**0.5
        scores = scores.masked_fill((ahead > 0) | (ahead < -1), -torch.inf)
        expected = (scores.softmax(-1) @ leaves[2]).transpose(0, 1)
        assert close(out[first:last], expected)
        close_lse = lse[:, first:last].double() - scores.logsumexp(-1)
        assert close_lse.abs().max() < 1e-2
        wanted = torch.autograd.grad(expected, leaves, dout[first:last].double())
        theirs = [t[first:last].transpose(0, 1).detach().requires_grad_() for t in (q, k, v)]
        own = torch.nn.functional.scaled_dot_product_attention(
            *(t[None] for t in theirs), attn_mask=(ahead <= 0) & (ahead >= -1), enable_gqa=True
        )
        own = torch.autograd.grad(own[0], theirs, dout[first:last].transpose(0, 1))
        for one, other, third in zip(found, wanted, own, strict=True):
            assert no_worse(one[first:last].transpose(0, 1), other, third)
    with pytest.raises(NotImplementedError, match="page_table with a head_dim other than 256"):
        integration._flash_attn_fwd(q, k, v, page_table=offsets)
