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
#: More keys than queries, fewer, or none of either.
KEYS = (130, 260, 5, 300, 1, 0, 17, *[2] * 40, 129)


def packed(heads, device, keys=LENGTHS):
    """Return (q, k, v; other arguments by name) of sequences. keys: of each of them."""
    sides = (LENGTHS, heads[0]), (keys, heads[1]), (keys, heads[1])
    tensors = tuple(torch.randn(sum(of), h, 256).to(device, torch.bfloat16) for of, h in sides)
    of_q, of_k = offsets(LENGTHS, device), offsets(keys, device)
    lengths = {"max_seqlen_q": max(LENGTHS), "max_seqlen_k": max(keys)}
    return tensors, {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k, **lengths}


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
    has_gradients((2, 1), device, LENGTHS, causal=True, use_clc=use_clc)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.sampled
def test_gradients_with_other_lengths_of_keys(device, causal):
    """Offsets of queries and of keys give the tiles of dQ and of dK."""
    has_gradients((2, 1), device, KEYS, causal=causal)


def has_gradients(heads, device, keys, **options):
    """Check the gradients of each sequence. keys: of each of them."""
    tensors, lengths = packed(heads, device, keys)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    out = flash_attn_varlen_func(*leaves, **lengths, **options)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, dout)
    sides = (itertools.pairwise(offsets(of).tolist()) for of in (LENGTHS, keys))
    for of_q, of_k in zip(*sides, strict=True):
        rows, *_ = of_each = tuple(slice(*of) for of in (of_q, of_k, of_k))
        few = min(end - begin for begin, end in (of_q, of_k))
        if few > 16:  # of a few rows PyTorch's own error is often next to none
            own = {name: one[of][None] for name, one, of in zip("qkv", found, of_each)}
            given = tuple(tensor.detach()[of][None] for tensor, of in zip(tensors, of_each))
            accurate(own, given, dout[rows][None], causal=options["causal"])
        assert all(one[of].isfinite().all() for one, of in zip(found, of_each))
