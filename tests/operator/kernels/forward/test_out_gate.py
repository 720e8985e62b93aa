"""out_gate: out * sigmoid(out_gate), forward and backward, in every kernel that makes a result."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch

from fa4_hd256 import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
    masks,
)
from fa4_hd256.check import reference


class Case(NamedTuple):
    """Lengths, heads and what else a call has. of_heads: one gate for each query and head."""

    lengths: tuple[int, int]
    heads: tuple[int, int]
    options: dict[str, Any]
    of_heads: bool = False


CASES = {
    "causal": Case((130, 200), (2, 1), {"causal": True}),
    "of heads": Case((130, 200), (2, 1), {"causal": True}, True),
    "split": Case((20, 600), (2, 1), {"num_splits": 3}),
    "split, of heads": Case((150, 600), (2, 2), {"num_splits": 3}, True),
    "few queries": Case((2, 300), (16, 2), {"causal": True}),
    "few, split, of heads": Case((2, 600), (16, 2), {"num_splits": 4}, True),
}


def tensors(case, device, batch=2):
    """Return (q, k, v), gate: standard normal in bf16, the gate times three."""
    torch.manual_seed(0)
    (seqlen_q, seqlen_k), (heads, heads_kv) = case.lengths, case.heads
    q = torch.randn(batch, seqlen_q, heads, 256)
    k, v = (torch.randn(batch, seqlen_k, heads_kv, 256) for _ in "kv")
    gate = 3 * torch.randn(q.shape[:3] if case.of_heads else q.shape)
    q, k, v, gate = (tensor.bfloat16().to(device) for tensor in (q, k, v, gate))
    return (q, k, v), gate


def accurate(out, lse, inputs, **options):
    options.pop("num_splits", None)
    found = reference.compare(out, lse, inputs, **options)
    assert found.max_error <= found.tolerance and found.lse_max_error <= 1e-4, found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled("split, of heads")
def test_forward(name, device):
    case = CASES[name]
    inputs, gate = tensors(case, device)
    out, lse = flash_attn_func(*inputs, out_gate=gate, return_lse=True, **case.options)
    accurate(out, lse, inputs, out_gate=gate, **case.options)


@pytest.mark.parametrize("name", ["causal", "of heads"])
@pytest.mark.sampled("causal")
def test_gradients(name, device):
    """The gate has the same bits with the gradients of q, k and v, and alone."""
    case = CASES[name]
    inputs, gate = tensors(case, device)
    leaves = [tensor.requires_grad_() for tensor in (*inputs, gate)]
    out = flash_attn_func(*leaves[:3], out_gate=gate, **case.options)
    dout = torch.randn_like(out)
    found = dict(zip(("q", "k", "v", "out_gate"), torch.autograd.grad(out, leaves, dout)))
    given = tuple(leaf.detach() for leaf in leaves)
    compared = reference.compare_gradients(
        found, given[:3], dout, out_gate=given[3], **case.options
    )
    assert compared.keys() == found.keys()
    for gradient, errors in compared.items():
        assert errors.max_error <= errors.tolerance, (gradient, errors)
    alone = given[3].requires_grad_()
    out = flash_attn_func(*given[:3], out_gate=alone, **case.options)
    (of_gate,) = torch.autograd.grad(out, alone, dout)
    assert torch.equal(of_gate, found["out_gate"])


@pytest.mark.sampled
def test_a_gate_of_heads_may_have_any_strides(device):
    """One that lies (batch, heads, seqlen), as scores do, with its gradient."""
    case = CASES["of heads"]
    inputs, gate = tensors(case, device)
    turned = gate.transpose(1, 2).contiguous().transpose(1, 2)
    found = []
    for given in (gate, turned):
        leaf = given.requires_grad_()
        out = flash_attn_func(*inputs, out_gate=leaf, **case.options)
        found.append((out, *torch.autograd.grad(out, leaf, torch.ones_like(out))))
    assert all(map(torch.equal, *found))


@pytest.mark.sampled
def test_packed_sequences(device):
    """Rows behind the last offset belong to no sequence: their gate has no gradient."""
    (q, k, v), gate = tensors(CASES["causal"], device, batch=1)
    q, gate, k, v = (tensor[0, :130].contiguous() for tensor in (q, gate, k, v))
    offsets = torch.tensor([0, 50, 120], dtype=torch.int32, device=device)
    options = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 70}
    leaves = [tensor.requires_grad_() for tensor in (q, k, v, gate)]
    out = flash_attn_varlen_func(*leaves[:3], out_gate=gate, causal=True, **options)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, dout)
    assert not any(gradient[120:].any() for gradient in (*found, out))
    for begin, end in ((0, 50), (50, 120)):
        rows = [tensor.detach()[None, begin:end] for tensor in leaves]
        of_rows = [gradient[None, begin:end] for gradient in found]
        named = dict(zip(("q", "k", "v", "out_gate"), of_rows))
        compared = reference.compare_gradients(
            named, tuple(rows[:3]), dout[None, begin:end], out_gate=rows[3], causal=True
        )
        assert all(errors.max_error <= errors.tolerance for errors in compared.values()), compared


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.sampled
def test_a_cache_with_new_rows(kv_dtype, device):
    """The gate is that of the queries alone, also of the kernels for few rows."""
    (q, k, v), gate = tensors(CASES["few queries"], device)
    new = k[:, :2].clone(), v[:, :2].clone()
    caches = [tensor.to(kv_dtype, copy=True) for tensor in (k, v)]
    lengths = torch.tensor([290, 40], dtype=torch.int32, device=device)
    options = {"cache_seqlens": lengths, "causal": True}
    out, lse = flash_attn_with_kvcache(q, *caches, *new, out_gate=gate, return_lse=True, **options)
    for entry, length in enumerate(lengths.tolist()):
        rows = [tensor[entry : entry + 1] for tensor in (q, gate, out, lse)]
        seen = [cache[entry : entry + 1, : length + 2].to(torch.float64) for cache in caches]
        of_row = {"causal": True, "out_gate": rows[1]}
        accurate(rows[2], rows[3], (rows[0], *seen), **of_row)


@pytest.mark.sampled
def test_listed_parts(device):
    """The kernel that combines listed splits has the gate, too."""
    (q, k, v), gate = tensors(CASES["few queries"], device)
    lengths = torch.tensor([300, 260], dtype=torch.int32, device=device)
    listed = get_scheduler_metadata(lengths, 2, 300, 16, 2)
    options = {"seqused_k": lengths, "return_lse": True, "causal": True}
    out, lse = flash_attn_varlen_func(q, k, v, out_gate=gate, scheduler_metadata=listed, **options)
    for entry, length in enumerate(lengths.tolist()):
        rows = [tensor[entry : entry + 1] for tensor in (q, k[:, :length], v[:, :length])]
        own = [tensor[entry : entry + 1] for tensor in (out, lse, gate)]
        accurate(*own[:2], tuple(rows), out_gate=own[2], causal=True)


def test_what_is_refused(device):
    (q, k, v), gate = tensors(CASES["causal"], device)
    for wrong, error, message in (
        (gate.float(), TypeError, r"out_gate has dtype torch.float32; accepted: that of q"),
        (gate[:, 1:], ValueError, r"out_gate has shape .*; accepted: that of q, .* or one value"),
        (0.5, TypeError, r"out_gate must be a torch.Tensor or None, got 0.5"),
    ):
        with pytest.raises(error, match=message):
            flash_attn_func(q, k, v, out_gate=wrong)
    with pytest.raises(NotImplementedError, match="out= has no gradients"):
        flash_attn_func(q, k, v, out_gate=gate.requires_grad_(), out=torch.empty_like(q))


def test_a_gate_that_is_none_is_refused_under_a_block_mask(device):
    """Packed sequences of a block mask are one row, which the gate joins."""
    row = torch.zeros(9, 2, 256, dtype=torch.bfloat16, device=device)
    begins = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    with pytest.raises(TypeError, match=r"out_gate must be a torch.Tensor or None, got 0.5"):
        flash_attn_varlen_func(
            row, row, row, cu_seqlens_q=begins, cu_seqlens_k=begins, max_seqlen_q=5, out_gate=0.5,
            block_mask=masks.prefix_lm(2, 9, 9, device=device),
        )  # fmt: skip


EXTREMES = (math.nan, math.inf, -math.inf, -19.0, -20.0, -21.0, -60.0, -200.0, 200.0, 0.0)


@pytest.mark.parametrize("name", ["causal", "split", "few queries"])
@pytest.mark.sampled("causal")
def test_extreme_gates_leave_their_neighbours_alone(name, device):
    """Each element is that of its own gate, NaN where that is, and no other one."""
    case = CASES[name]
    inputs, gate = tensors(case, device)
    plain, _ = flash_attn_func(*inputs, return_lse=True, **case.options)
    # Of each row other columns, and rows without any.
    for row in range(0, gate.shape[1], 3):
        for number, value in enumerate(EXTREMES):
            gate[:, row, :, (17 * row + 23 * number) % 256] = value
    out, _ = flash_attn_func(*inputs, out_gate=gate, return_lse=True, **case.options)
    expected = plain.double() * torch.sigmoid(gate.double())
    assert torch.equal(out.isnan(), gate.isnan())
    # Both are rounded once, by half an ulp; results below float32's range are 0.
    torch.testing.assert_close(
        out.double(), expected, rtol=2**-7, atol=1e-6 * 2**-8, equal_nan=True
    )
    tiny = (gate < -50) & ~gate.isnan()
    assert (out[tiny].abs() <= 1.01 * expected[tiny].abs().to(out.dtype) + 1e-37).all()
