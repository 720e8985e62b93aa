"""Rows of packed tensors behind the last offset belong to no sequence: results there are 0, the LSE
-inf, whatever the memory held."""

from __future__ import annotations

import math

import pytest
import torch
from backward_cases import packed
from paged_cases import offsets

from fa4_hd256 import flash_attn_varlen_func, get_scheduler_metadata
from fa4_hd256.call import backward_problem, checks
from fa4_hd256.call.checks import reads_contents

LENGTHS = (70, 3), (90, 5)
TAIL = 9, 13


def unchecked(monkeypatch):
    """Look at contents of CPU tensors as little as at those of a GPU."""
    monkeypatch.setattr(checks, "check_contents", lambda *given: None)
    monkeypatch.setattr(checks, "check_max_seqlen", lambda side, tensor, ragged, longest: longest)


def with_tails(tensors, tails=TAIL):
    """Append rows of NaN to the tensors."""
    sides = (tails[0], tails[1], tails[1])
    return [
        torch.cat([t, t.new_full((rows, *t.shape[1:]), math.nan)])
        for t, rows in zip(tensors, sides)
    ]


def call_of(device, lengths=LENGTHS):
    cu_q, cu_k = (offsets(n, device) for n in lengths)
    longest = (max(n, default=0) for n in lengths)
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    return dict(zip(names, (cu_q, cu_k, *longest))) | {"causal": True}


def check_rows(found, expected, value):
    """found has the bits of expected, then rows of a value."""
    rows = expected.shape[0]
    assert torch.equal(found[:rows], expected)
    tail = found[rows:]
    assert len(tail) and (tail == value).all()


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.sampled("2")
def test_results(device, num_splits):
    tensors = packed(LENGTHS, (2, 1), torch.bfloat16, device)
    call = call_of(device) | {"num_splits": num_splits, "return_lse": True}
    out, lse = flash_attn_varlen_func(*tensors, **call)
    found, found_lse = flash_attn_varlen_func(*with_tails(tensors), **call)
    check_rows(found, out, 0)
    check_rows(found_lse.T, lse.T, -math.inf)


@pytest.mark.sampled
def test_listed_parts(device):
    """The kernel that combines them has rows of the sequences alone."""
    queries, used, pages = (1, 1, 0), (300, 40, 0), 6
    q = torch.randn(sum(queries), 2, 256, dtype=torch.bfloat16, device=device)
    k, v = torch.randn(2, pages, 128, 1, 256, dtype=torch.bfloat16, device=device)
    lengths = torch.tensor(used, dtype=torch.int32, device=device)
    table = torch.arange(9, dtype=torch.int32, device=device).view(3, 3) % pages
    call = {
        "cu_seqlens_q": offsets(queries, device), "max_seqlen_q": 1, "max_seqlen_k": 384,
        "seqused_k": lengths, "page_table": table, "return_lse": True,
        "scheduler_metadata": get_scheduler_metadata(lengths, 1, 384, 2, 1),
    }  # fmt: skip
    out, lse = flash_attn_varlen_func(q, k, v, **call)
    padded = torch.cat([q, q.new_full((3, 2, 256), math.nan)])
    found, found_lse = flash_attn_varlen_func(padded, k, v, **call)
    check_rows(found, out, 0)
    check_rows(found_lse.T, lse.T, -math.inf)


def gradients(tensors, dout, **call):
    leaves = [t.detach().requires_grad_() for t in tensors]
    return torch.autograd.grad(flash_attn_varlen_func(*leaves, **call), leaves, dout)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.sampled("2")
def test_gradients(device, monkeypatch, parts):
    """All gradients are right, with parts of dK and dV and without; whatever dO and out hold behind
    the rows."""
    monkeypatch.setattr(backward_problem, "choose_head_parts", lambda *given: parts)
    tensors = packed(LENGTHS, (2, 1), torch.bfloat16, device)
    dout = torch.randn_like(tensors[0])
    expected = gradients(tensors, dout, **call_of(device))
    padded = with_tails([*tensors, dout][:3]), with_tails([dout, dout, dout])[0]
    for found, wanted in zip(gradients(*padded, **call_of(device)), expected, strict=True):
        check_rows(found, wanted, 0)


@pytest.mark.parametrize("lengths", [((0, 0), (0, 0)), ((), ())], ids=["empty", "none"])
def test_all_rows_behind_the_last_offset(device, lengths):
    """No sequence has a row, or there is none: results are 0."""
    tensors = packed(((4,), (5,)), (2, 1), torch.bfloat16, device)
    call = call_of(device, lengths) | {"max_seqlen_q": 40, "max_seqlen_k": 1}
    dout = torch.randn_like(tensors[0])
    assert not any(g.any() for g in gradients(tensors, dout, **call))
    out, lse = flash_attn_varlen_func(*tensors, **call, return_lse=True)
    assert not out.any() and (lse == -math.inf).all()


def test_a_sequence_longer_than_max_seqlen(device, monkeypatch):
    """NaN in all results, dK and dV among them; an error where contents are read."""
    tensors = packed(LENGTHS, (2, 1), torch.bfloat16, device)
    short = call_of(device) | {"max_seqlen_q": 40, "return_lse": True}
    with monkeypatch.context() as environment:
        environment.setenv("FA4_HD256_CHECK", "1")
        with pytest.raises(ValueError, match="max_seqlen_q is 40, but a sequence has 70"):
            flash_attn_varlen_func(*tensors, **short)
    unchecked(monkeypatch)
    out, lse = flash_attn_varlen_func(*tensors, **short)
    assert out.isnan().all() and lse.isnan().all()
    dout = torch.randn_like(tensors[0])
    found = gradients(tensors, dout, **call_of(device) | {"max_seqlen_k": 20})
    assert all(gradient.isnan().all() for gradient in found)


def test_what_is_read_of_a_gpu(monkeypatch):
    device = torch.device("cuda", 0)
    assert reads_contents(torch.device("cpu")) and not reads_contents(device)
    monkeypatch.setenv("FA4_HD256_CHECK", "1")
    monkeypatch.setattr(checks, "is_captured", lambda device: False)
    assert reads_contents(device)
    monkeypatch.setattr(checks, "is_captured", lambda device: True)
    with pytest.raises(RuntimeError, match="FA4_HD256_CHECK is set: .* cannot capture"):
        reads_contents(device)
    monkeypatch.setenv("FA4_HD256_CHECK", "yes")
    with pytest.raises(ValueError, match="FA4_HD256_CHECK is 'yes'; accepted: 0 or 1"):
        reads_contents(device)


#: Offsets of queries and keys that contradict the tensors or each other.
WRONG = {
    "beyond the rows": ((0, 70, 80), (0, 90, 95)), "descending": ((0, 73, 70), (0, 90, 95)),
    "negative": ((0, -5, 73), (0, 90, 95)), "keys beyond": ((0, 70, 73), (0, 90, 300)),
    "not from 0": ((3, 70, 73), (0, 90, 95)),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_offsets_write_nothing_outside(device, monkeypatch, wrong):
    """NaN in all results.  Rows around out keep their values, and the simulator refuses stores
    outside of a launch's tensors."""
    unchecked(monkeypatch)
    tensors = packed(LENGTHS, (2, 1), torch.bfloat16, device)
    offsets_of = [torch.tensor(o, dtype=torch.int32, device=device) for o in wrong]
    call = call_of(device) | dict(zip(("cu_seqlens_q", "cu_seqlens_k"), offsets_of))
    dout = torch.randn_like(tensors[0])
    assert all(g.isnan().all() for g in gradients(tensors, dout, **call))
    buffer = torch.ones(73 + 2 * 300, 2, 256, dtype=torch.bfloat16, device=device)
    out = buffer[300:373]
    _, lse = flash_attn_varlen_func(*tensors, **call, return_lse=True, out=out)
    assert out.isnan().all() and lse.isnan().all()
    assert (buffer[:300] == 1).all() and (buffer[373:] == 1).all()
