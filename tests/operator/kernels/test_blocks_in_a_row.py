"""Packed sequences, few of them long: blocks of queries, or of keys, numbered in a row."""

from __future__ import annotations

import itertools

import pytest
import torch
from backward_cases import accurate
from paged_cases import offsets

from fa4_hd256 import flash_attn_varlen_func
from fa4_hd256.check import reference

#: A long one at each end, none, one row, and more of them than a warp has lanes.
LENGTHS = (300, 1, 0, 17, 130, 260, 5, *[2] * 40, 129)


def packed(heads, device):
    """Return (q, k, v; other arguments by name) of sequences with as many keys as queries."""
    tensors = tuple(torch.randn(sum(LENGTHS), h, 256).to(device, torch.bfloat16)
                    for h in (heads[0], heads[1], heads[1]))  # fmt: skip
    cu_seqlens, longest = offsets(LENGTHS, device), max(LENGTHS)
    lengths = {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return tensors, {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, **lengths}


def attend(heads, device, **options):
    """Return (tensors, out, lse)."""
    tensors, lengths = packed(heads, device)
    return tensors, *flash_attn_varlen_func(*tensors, **lengths, return_lse=True, **options)


def is_right(tensors, out, lse, **options):
    """Return True if each sequence equals the reference."""
    for begin, end in itertools.pairwise(offsets(LENGTHS).tolist()):
        rows = slice(begin, end)
        operands = tuple(t[rows][None] for t in tensors)
        compared = reference.compare(out[rows][None], lse[:, rows][None], operands, **options)
        if not compared.max_error <= compared.tolerance:
            return False
    return True


@pytest.mark.parametrize("use_clc", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("heads", [(2, 1), (3, 1), (2, 2)], ids=str)
@pytest.mark.sampled("(2, 1)-static")
def test_every_row_is_computed(device, heads, use_clc):
    found = attend(heads, device, causal=True, use_clc=use_clc)
    assert is_right(*found, window_size=(None, 0))


@pytest.mark.sampled
def test_full_attention_and_windows(device):
    for window in ((None, None), (20, None), (3, 40)):
        found = attend((2, 2), device, window_size=window)
        assert is_right(*found, window_size=window)


@pytest.mark.parametrize("memory", ["0", None], ids=["recomputed", "stored"])
@pytest.mark.sampled
def test_gradients(device, use_clc, monkeypatch, memory):
    if memory is not None:
        monkeypatch.setenv("FA4_HD256_DS_BYTES", memory)
    tensors, lengths = packed((2, 1), device)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    out = flash_attn_varlen_func(*leaves, **lengths, causal=True, use_clc=use_clc)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, dout)
    for begin, end in itertools.pairwise(offsets(LENGTHS).tolist()):
        rows = slice(begin, end)
        if end - begin > 16:  # of a few rows PyTorch's own error is often next to none
            own = {name: gradient[rows][None] for name, gradient in zip("qkv", found)}
            given = tuple(tensor.detach()[rows][None] for tensor in tensors)
            accurate(own, given, dout[rows][None], causal=True)
        assert all(gradient[rows].isfinite().all() for gradient in found)
