"""Packed sequences, few of them long: blocks of queries, or of keys, numbered in a row."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from paged_cases import offsets
from replays import forget

from fa4_hd256 import flash_attn_varlen_func
from fa4_hd256.check import reference
from fa4_hd256.kernels.backward.common import BackwardEntry
from fa4_hd256.run import compile

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


def gradients(heads, device, **options):
    """Return the gradients of q, k and v, causal, with as many keys as queries."""
    torch.manual_seed(5)
    tensors, lengths = packed(heads, device)
    tensors = tuple(tensor.requires_grad_() for tensor in tensors)
    out = flash_attn_varlen_func(*tensors, **lengths, causal=True, **options)
    return torch.autograd.grad(out, tensors, torch.randn_like(out))


@pytest.mark.parametrize("memory", ["0", None], ids=["recomputed", "stored"])
@pytest.mark.sampled
def test_gradients_have_the_bits_of_those_of_a_grid(device, planted, tmp_path, memory):
    """A grid has as many blocks for each sequence as the longest one has; and numbers that leave a
    long sequence too few are seen, wherever a kernel has numbers: some kernels that store dS have
    none."""
    if memory is not None:
        planted.setenv("FA4_HD256_DS_BYTES", memory)
    in_a_row, numbered = BackwardEntry._in_a_row, []

    def with_larger_blocks(self, *arguments):
        problem = in_a_row(self, *arguments)
        if problem.packed is None:
            return problem
        numbered.append(type(self))
        return replace(problem, packed=replace(problem.packed, rows=2 * problem.packed.rows))

    found = {}
    for name, entry in (
        ("grid", lambda self, problem, *rest: problem), ("row", in_a_row),
        ("too few", with_larger_blocks),
    ):  # fmt: skip
        planted.setattr(BackwardEntry, "_in_a_row", entry)
        planted.setenv("FA4_HD256_CACHE_DIR", str(tmp_path / name))
        found[name] = gradients((1, 1), device, use_clc=name == "row")
        compile.forget()
        # On a GPU a call that came before is launched again as it was.
        forget()
    assert all(map(torch.equal, found["grid"], found["row"]))
    assert numbered or memory is None
    assert all(map(torch.equal, found["grid"], found["too few"])) == (not numbered)
