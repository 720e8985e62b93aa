"""Gradients of ragged sequences, packed and padded, against the reference of each sequence."""

from __future__ import annotations

import math

import pytest
import torch
from backward_cases import accurate, check_each, inputs, last_reports, packed
from paged_cases import offsets

from fa4_hd256 import flash_attn_varlen_func
from fa4_hd256.call import backward_problem
from fa4_hd256.check import reference


def gradients(tensors, dout, dlse=None, sink=None, **options):
    """Gradients by autograd through `flash_attn_varlen_func`, by name."""
    leaves = dict(zip("qkv", (t.detach().requires_grad_() for t in tensors)))
    call = (leaves["q"], leaves["k"], leaves["v"])
    if sink is not None:
        leaves["sink"] = sink.detach().requires_grad_()
        options["learnable_sink"] = leaves["sink"]
    out, lse = flash_attn_varlen_func(*call, return_lse=True, **options)
    dlse = torch.zeros_like(lse) if dlse is None else dlse
    found = torch.autograd.grad((out, lse), tuple(leaves.values()), (dout, dlse))
    return dict(zip(leaves, found))


# Zero lengths on either side and both, first and last; rests of a tile, whole tiles, several.
RAGGED = [
    ((300, 5, 0, 129, 64), (200, 70, 33, 0, 300)),
    ((0, 256, 0), (0, 256, 7)),
    ((1, 1, 1), (1, 130, 0)),
]


def lengths_of(lengths, device):
    cu_q, cu_k = (offsets(n, device) for n in lengths)
    return {
        "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k,
        "max_seqlen_q": max(lengths[0]), "max_seqlen_k": max(lengths[1]),
    }  # fmt: skip


@pytest.mark.parametrize("lengths", RAGGED, ids=str)
@pytest.mark.sampled("((300, 5, 0, 129, 64), (200, 70, 33, 0, 300))", "((0, 256, 0), (0, 256, 7))")
def test_packed_sequences(lengths, device):
    tensors = packed(lengths, (2, 1), torch.bfloat16, device)
    dout = torch.randn_like(tensors[0])
    found = gradients(tensors, dout, causal=True, **lengths_of(lengths, device))
    check_each(found, tensors, dout, lengths, causal=True)


@pytest.mark.parametrize("longest", [1000, (1 << 31) - 1, 1 << 40])
@pytest.mark.sampled
def test_bounds_beyond_all_rows(longest, device):
    """A bound of keys may be any number; grids have room for the rows that there are."""
    lengths = (5, 3), (4, 4)
    tensors = packed(lengths, (2, 1), torch.bfloat16, device)
    dout, options = torch.randn_like(tensors[0]), lengths_of(lengths, device)
    expected = gradients(tensors, dout, **options | {"max_seqlen_q": 8, "max_seqlen_k": 8})
    found = gradients(tensors, dout, **options | {"max_seqlen_q": 1000, "max_seqlen_k": longest})
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.sampled
def test_every_option_at_once(device):
    """Packed fp16 with windows, softcap, negative scale, a sink and the gradient of LSE."""
    lengths = ((150, 0, 300), (150, 20, 280))
    tensors = packed(lengths, (4, 2), torch.float16, device)
    dout, dlse = torch.randn_like(tensors[0]), torch.randn(4, 450, device=device)
    sink = torch.randn(4, device=device)
    options = {"window_size": (60, 10), "softcap": 20.0, "softmax_scale": -0.1}
    found = gradients(tensors, dout, dlse, sink, **options, **lengths_of(lengths, device))
    total = torch.zeros(4, dtype=torch.float64)
    for b in (0, 2):
        rows, keys = (slice(sum(n[:b]), sum(n[: b + 1])) for n in lengths)
        part = (tensors[0][rows][None], *(t[keys][None] for t in tensors[1:]))
        given = {
            "q": found["q"][rows][None], "k": found["k"][keys][None], "v": found["v"][keys][None]
        }  # fmt: skip
        cotangents = (dout[rows][None], dlse[:, rows][None])
        accurate(given, part, *cotangents, learnable_sink=sink, **options)
        total += reference.gradients(part, *cotangents, learnable_sink=sink, **options)["sink"]
    # The sink's gradient is a sum over all rows of all sequences.
    assert torch.allclose(found["sink"].cpu().double(), total, rtol=1e-2, atol=1e-2)


def test_neighbours_in_a_pack_do_not_leak(device):
    """A sequence full of NaN and infinities leaves the others' bits alone."""
    lengths = (70, 90, 200)
    tensors = packed((lengths, lengths), (2, 1), torch.bfloat16, device)
    dout = torch.randn_like(tensors[0])
    call = {"causal": True, **lengths_of((lengths, lengths), device)}
    clean = gradients(tensors, dout, **call)
    for tensor in (*tensors, dout):
        tensor[70:160] = math.inf
    dirty = gradients(tensors, dout, **call)
    for rows in (slice(0, 70), slice(160, 360)):
        assert all(torch.equal(clean[name][rows], dirty[name][rows]) for name in "qkv")


def test_the_longest_key_sequence_need_not_be_given(device):
    """Same bits; with one tensor of offsets for both sides its grid follows max_seqlen_q."""
    lengths = ((70, 90, 200),) * 2
    tensors = packed(lengths, (2, 1), torch.bfloat16, device)
    dout = torch.randn_like(tensors[0])
    call = {"causal": True, **lengths_of(lengths, device)}
    expected = gradients(tensors, dout, **call)
    del call["max_seqlen_k"]
    for shared in (False, True):
        if shared:
            call["cu_seqlens_k"] = call["cu_seqlens_q"]
        got = gradients(tensors, dout, **call)
        assert all(torch.equal(got[name], expected[name]) for name in "qkv")


@pytest.mark.sampled
def test_rows_past_the_used_ones_may_hold_anything(device):
    """Padded sequences: NaN past seqused must not reach a gradient; there it is 0."""
    q, k, v = inputs((200, 300), batch=3, device=device)
    dout = torch.randn_like(q)
    used_q, used_k = (200, 77, 0), (0, 131, 300)
    for b in range(3):
        for tensor in (q, dout):
            tensor[b, used_q[b] :] = math.nan
        for tensor in (k, v):
            tensor[b, used_k[b] :] = math.nan
    used = {
        name: torch.tensor(n, dtype=torch.int32, device=device)
        for name, n in (("seqused_q", used_q), ("seqused_k", used_k))
    }
    found = gradients((q, k, v), dout, causal=True, **used)
    for b in range(3):
        n, m = used_q[b], used_k[b]
        part = (q[b : b + 1, :n], k[b : b + 1, :m], v[b : b + 1, :m])
        given = {
            "q": found["q"][b : b + 1, :n], "k": found["k"][b : b + 1, :m],
            "v": found["v"][b : b + 1, :m],
        }  # fmt: skip
        accurate(given, part, dout[b : b + 1, :n], causal=True)
        assert (found["q"][b, n:] == 0).all()
        assert (found["k"][b, m:] == 0).all() and (found["v"][b, m:] == 0).all()


@pytest.mark.sampled
def test_packed_queries_with_padded_keys(device):
    """cu_seqlens on one side only, as a prefill against a cache has it."""
    lengths = (60, 130)
    q = torch.randn(sum(lengths), 2, 256).to(device, torch.bfloat16)
    _, k, v = inputs((1, 200), batch=2, device=device)
    dout = torch.randn_like(q)
    used = torch.tensor([100, 200], dtype=torch.int32, device=device)
    found = gradients(
        (q, k, v), dout, cu_seqlens_q=offsets(lengths, device), max_seqlen_q=130, seqused_k=used,
        causal=True,
    )  # fmt: skip
    for b, rows in enumerate((slice(0, 60), slice(60, 190))):
        m = int(used[b])
        part = (q[rows][None], k[b : b + 1, :m], v[b : b + 1, :m])
        given = {
            "q": found["q"][rows][None], "k": found["k"][b : b + 1, :m],
            "v": found["v"][b : b + 1, :m],
        }  # fmt: skip
        accurate(given, part, dout[rows][None], causal=True)
        assert (found["k"][b, m:] == 0).all() and (found["v"][b, m:] == 0).all()


def test_packed_slices_of_a_fused_projection(device):
    """Packed q, k, v and their gradients as slices of one buffer, read in place."""
    lengths = (70, 150)
    fused = torch.randn(sum(lengths), 2 + 1 + 1, 256).to(device, torch.bfloat16)
    leaf = fused.detach().requires_grad_()
    cu = offsets(lengths, device)
    q, k, v = leaf.split((2, 1, 1), dim=1)
    dout = torch.randn(2, sum(lengths), 256).to(fused).transpose(0, 1)
    out = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=150, max_seqlen_k=150, causal=True
    )
    (gradient,) = torch.autograd.grad(out, leaf, dout)
    found = dict(zip("qkv", gradient.split((2, 1, 1), dim=1)))
    check_each(found, fused.split((2, 1, 1), dim=1), dout, (lengths, lengths), causal=True)


@pytest.mark.sampled
def test_nothing_to_do(device):
    """No rows at all; queries without keys; keys without queries."""
    sink = torch.randn(2, device=device)
    for lengths in (((0, 0), (0, 0)), ((5,), (0,)), ((0,), (7,))):
        tensors = packed(lengths, (2, 1), torch.bfloat16, device)
        dlse = torch.ones(2, sum(lengths[0]), device=device)
        found = gradients(
            tensors, torch.randn_like(tensors[0]), dlse, sink, **lengths_of(lengths, device)
        )
        assert all((found[name] == 0).all() for name in "qkv")
        # The LSE of a query without keys is the sink's logit.
        assert torch.allclose(found["sink"], torch.full_like(sink, float(sum(lengths[0]))))


@pytest.mark.architecture("sm_100a")
@pytest.mark.simulator
@pytest.mark.sampled
def test_schedulers_give_the_same_bits(monkeypatch):
    """FA_CLC and use_clc select the same kernels; clusters really take tiles from others."""
    monkeypatch.setattr(backward_problem, "choose_head_parts", lambda work, group, *rest: group)
    lengths = ((300, 0, 5, 700, 64), (200, 9, 0, 300, 64))
    tensors = packed(lengths, (4, 2), torch.bfloat16, "cpu")
    dout = torch.randn_like(tensors[0])
    call = {"causal": True, **lengths_of(lengths, "cpu")}
    expected = gradients(tensors, dout, use_clc=False, **call)
    check_each(expected, tensors, dout, lengths, causal=True)
    for setting, argument, resident in (("1", None, 3), ("0", True, 1), ("1", None, 74)):
        monkeypatch.setenv("FA_CLC", setting)
        monkeypatch.setenv("SM100_SIM_CLUSTERS", str(resident))
        got = gradients(tensors, dout, use_clc=argument, **call)
        assert all(torch.equal(got[name], expected[name]) for name in "qkv")
        dv, products = last_reports(2)
        # dV has blocks of 256 keys x the heads of each KV head's group, a part each, x batch. The
        # GEMMs have as many, and blocks of 256 queries x heads x batch.
        of_keys, of_queries = 2 * 4 * 5, 3 * 4 * 5
        for report, tiles in ((dv, of_keys), (products, of_keys + of_queries)):
            assert report.grid == (2 * tiles, 1, 1)
            stolen = max(0, tiles - resident)
            assert report.clc == {"try_cancel": tiles, "stolen": stolen, "refused": 0}
