"""Windows, softcap, sinks and varlen, under both schedulers, against the float64 reference."""

from __future__ import annotations

import math

import pytest
import torch
from paged_cases import accurate, offsets

from fa4_hd256 import flash_attn_func, flash_attn_varlen_func


def inputs(seqlen_q, seqlen_k, heads=2, heads_kv=1, batch=1, dtype=torch.bfloat16, device="cpu"):
    shapes = ((seqlen_q, heads), (seqlen_k, heads_kv), (seqlen_k, heads_kv))
    return tuple(torch.randn(batch, s, h, 256).to(device, dtype) for s, h in shapes)


def check(tensors, use_clc, **options):
    out, lse = flash_attn_func(*tensors, **options, return_lse=True, use_clc=use_clc)
    accurate(out, lse, tensors, **options)
    return out, lse


# Left only; right only; both, wider and narrower than a step of 128 keys; a single key; the
# field's causal (-1, 0); unequal lengths so that some tiles see nothing on either side.
@pytest.mark.parametrize(
    ("lengths", "window"),
    [
        ((600, 600), (130, None)),
        ((600, 500), (None, 70)),
        ((520, 900), (200, 50)),
        ((600, 600), (5, 3)),
        ((300, 300), (0, 0)),
        ((300, 400), (-1, 0)),
        ((700, 200), (100, 0)),
        ((300, 300), (10**9, 10**9)),
    ],
)
@pytest.mark.sampled(
    "static-lengths1-window1", "static-lengths2-window2", "static-lengths4-window4",
)  # fmt: skip
def test_windows(lengths, window, use_clc, device):
    check(inputs(*lengths, device=device), use_clc, window_size=window)


@pytest.mark.sampled("static")
def test_causal_with_a_left_window(use_clc, device):
    """Gemma's local layers."""
    check(inputs(500, 500, 4, 2, device=device), use_clc, causal=True, window_size=(127, 0))


# 50 is Gemma 2's; 3 bends nearly every score; with scale -1 the tensor core negates first.
@pytest.mark.parametrize(("softcap", "scale"), [(50.0, None), (3.0, 0.0625), (20.0, -1.0)])
@pytest.mark.sampled
def test_softcap(softcap, scale, use_clc, device):
    tensors = inputs(200, 300, device=device)
    check(tensors, use_clc, softcap=softcap, softmax_scale=scale, causal=True)


# Sinks like the scores, far above all of them, far below, and none; rows without a visible key have
# only it.
@pytest.mark.parametrize("logits", [(0.5, -2.0), (200.0, 90.0), (-300.0, -40.0), (-math.inf, 0.5)])
@pytest.mark.sampled("static-*")
def test_sinks(logits, use_clc, device):
    sink = torch.tensor(logits, device=device)
    check(inputs(200, 130, device=device), use_clc, causal=True, learnable_sink=sink)


@pytest.mark.sampled("static")
def test_a_sink_of_infinity(use_clc, device):
    """The limit of a growing logit: it takes all of the weight."""
    sink = torch.tensor((math.inf, 0.5), device=device)
    tensors = inputs(200, 130, device=device)
    out, lse = flash_attn_func(
        *tensors, causal=True, learnable_sink=sink, return_lse=True, use_clc=use_clc
    )
    assert (out[:, :, 0] == 0).all() and (lse[:, 0] == math.inf).all()
    other = [t[:, :, 1:] if t.shape[2] > 1 else t for t in tensors]
    accurate(out[:, :, 1:], lse[:, 1:], other, causal=True, learnable_sink=sink[1:])


def check_packed(lengths_q, lengths_k, use_clc, device, heads=(2, 1), **options):
    """Packed sequences against the reference of each; returns (out, lse)."""
    q = torch.randn(sum(lengths_q), heads[0], 256).to(device, torch.bfloat16)
    k, v = (torch.randn(sum(lengths_k), heads[1], 256).to(device, torch.bfloat16) for _ in "kv")
    out, lse = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=offsets(lengths_q, device), cu_seqlens_k=offsets(lengths_k, device),
        max_seqlen_q=max(*lengths_q, 1), max_seqlen_k=max(*lengths_k, 1), return_lse=True,
        use_clc=use_clc, **options,
    )  # fmt: skip
    assert out.shape == q.shape and lse.shape == (heads[0], q.shape[0])
    start_q = start_k = 0
    for n, m in zip(lengths_q, lengths_k, strict=True):
        rows, keys = slice(start_q, start_q + n), slice(start_k, start_k + m)
        part = (q[rows][None], k[keys][None], v[keys][None])
        accurate(out[rows][None], lse[:, rows][None], part, **options)
        start_q, start_k = start_q + n, start_k + m
    return out, lse


# Zero lengths on either side and both, first and last; rests of a tile, whole tiles, several.
RAGGED = [
    ((300, 5, 0, 129, 64), (200, 70, 33, 0, 300)),
    ((0, 256, 0), (0, 256, 7)),
    ((1, 1, 1), (1, 130, 0)),
]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", RAGGED)
@pytest.mark.sampled("static-lengths0-causal", "static-lengths1-causal")
def test_packed_sequences(lengths, causal, use_clc, device):
    check_packed(*lengths, use_clc, device, causal=causal)


@pytest.mark.sampled
def test_packed_with_every_option(use_clc, device):
    check_packed(
        (150, 0, 300), (150, 20, 280), use_clc, device, heads=(4, 2), window_size=(60, 10),
        softcap=20.0, learnable_sink=torch.randn(4, device=device),
    )  # fmt: skip


@pytest.mark.sampled
def test_rows_past_the_used_ones_may_hold_anything(use_clc, device):
    """Padded sequences: NaN past seqused must not reach a result, nor be overwritten as one."""
    q, k, v = inputs(200, 300, batch=3, device=device)
    used_q, used_k = (200, 77, 0), (0, 131, 300)
    for b in range(3):
        q[b, used_q[b] :] = math.nan
        k[b, used_k[b] :] = math.nan
        v[b, used_k[b] :] = math.nan
    out, lse = flash_attn_varlen_func(
        q, k, v,
        seqused_q=torch.tensor(used_q, dtype=torch.int32, device=device),
        seqused_k=torch.tensor(used_k, dtype=torch.int32, device=device),
        causal=True, return_lse=True, use_clc=use_clc,
    )  # fmt: skip
    for b in range(3):
        n, m = used_q[b], used_k[b]
        part = (q[b : b + 1, :n], k[b : b + 1, :m], v[b : b + 1, :m])
        accurate(out[b : b + 1, :n], lse[b : b + 1, :, :n], part, causal=True)
        assert (out[b, n:] == 0).all() and (lse[b, :, n:] == -math.inf).all()


def test_neighbours_in_a_pack_do_not_leak(device):
    """A sequence full of NaN and infinities leaves the others' bits alone."""
    lengths = (70, 90, 200)
    tensors = [torch.randn(sum(lengths), h, 256).to(device, torch.bfloat16) for h in (2, 1, 1)]
    cu = offsets(lengths, device)
    clean = flash_attn_varlen_func(
        *tensors, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=200, max_seqlen_k=200, causal=True,
        return_lse=True,
    )  # fmt: skip
    for tensor in tensors[1:]:
        tensor[70:160] = math.inf
    dirty = flash_attn_varlen_func(
        *tensors, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=200, max_seqlen_k=200, causal=True,
        return_lse=True,
    )  # fmt: skip
    for rows in (slice(0, 70), slice(160, 360)):
        assert torch.equal(clean[0][rows], dirty[0][rows])
        assert torch.equal(clean[1][:, rows], dirty[1][:, rows])


def packed_layouts(device):
    """q, k, v of 220 rows, none contiguous: three that are read in place, two that are copied."""
    fused = torch.randn(220, 2 + 1 + 1, 256).to(device, torch.bfloat16)
    yield fused.split((2, 1, 1), dim=1)
    yield [torch.randn(h, 220, 256).to(fused).transpose(0, 1) for h in (2, 1, 1)]
    yield [torch.randn(220, h, 512).to(fused)[..., 8:264] for h in (2, 1, 1)]
    yield [torch.randn(220, h, 512).to(fused)[..., ::2] for h in (2, 1, 1)]
    yield [torch.randn(220, h, 260).to(fused)[..., 1:257] for h in (2, 1, 1)]


@pytest.mark.sampled("static")
def test_packed_layouts(use_clc, device):
    cu = offsets((70, 150), device)
    for q, k, v in packed_layouts(device):
        assert not q.is_contiguous()
        out, lse = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=150, max_seqlen_k=150,
            causal=True, return_lse=True, use_clc=use_clc,
        )  # fmt: skip
        for rows in (slice(0, 70), slice(70, 220)):
            part = tuple(t[rows][None] for t in (q, k, v))
            accurate(out[rows][None], lse[:, rows][None], part, causal=True)


@pytest.mark.sampled
def test_nothing_to_do(device):
    empty = offsets((0, 0), device)
    q, k = torch.zeros(0, 2, 256).to(device, torch.bfloat16), torch.zeros(0, 1, 256).bfloat16()
    k = k.to(device)
    out, lse = flash_attn_varlen_func(
        q, k, k, cu_seqlens_q=empty, cu_seqlens_k=empty, max_seqlen_q=1, max_seqlen_k=1,
        return_lse=True,
    )  # fmt: skip
    assert out.shape == (0, 2, 256) and lse.shape == (2, 0)
    q = torch.randn(5, 2, 256).to(device, torch.bfloat16)
    out, lse = flash_attn_varlen_func(
        q, k, k, cu_seqlens_q=offsets((5,), device), cu_seqlens_k=empty[:2], max_seqlen_q=5,
        max_seqlen_k=1, return_lse=True,
    )  # fmt: skip
    assert (out == 0).all() and (lse == -math.inf).all()
