"""Calls that came before: repeated from packed arguments, with the same result."""

from __future__ import annotations

import pytest
import torch
from replays import forget, simulated

from fa4_hd256 import flash_attn_func, flash_attn_varlen_func

pytestmark = pytest.mark.simulator


@pytest.fixture
def launched(monkeypatch):
    yield simulated(monkeypatch)
    forget()


def tensors(*shapes, dtype=torch.bfloat16):
    return [torch.randn(shape).to(dtype) for shape in shapes]


def dense(seqlen_q=70, seqlen_k=90, heads=(2, 1), batch=1):
    shapes = ((seqlen_q, heads[0]), (seqlen_k, heads[1]), (seqlen_k, heads[1]))
    return tensors(*((batch, s, h, 256) for s, h in shapes))


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


FORWARDS = {
    "causal": (flash_attn_func, dense, {"causal": True}),
    "dynamic": (flash_attn_func, dense, {"causal": True, "use_clc": True}),
    "split": (flash_attn_func, lambda: dense(3, 300), {"num_splits": 3}),
    "sink": (
        flash_attn_func,
        dense,
        {"learnable_sink": lambda: torch.randn(2, dtype=torch.bfloat16)},
    ),
    "packed": (
        flash_attn_varlen_func,
        lambda: tensors((40, 2, 256), (60, 1, 256), (60, 1, 256)),
        {
            "cu_seqlens_q": lambda: int32(0, 15, 40), "cu_seqlens_k": lambda: int32(0, 33, 60),
            "max_seqlen_q": 25, "max_seqlen_k": 33, "causal": True,
        },
    ),
    "used": (
        flash_attn_varlen_func,
        lambda: dense(30, 50, batch=2),
        {"seqused_q": lambda: int32(30, 11), "seqused_k": lambda: int32(17, 50)},
    ),
}  # fmt: skip


def options_of(given):
    return {name: value() if callable(value) else value for name, value in given.items()}


@pytest.mark.parametrize("case", FORWARDS.values(), ids=FORWARDS)
def test_a_repeated_forward_equals_one_that_was_not(case, launched):
    function, make, given = case
    options = options_of(given)
    function(*make(), **options, return_lse=True)
    inputs, options = make(), options_of(given)
    before = len(launched)
    found = function(*inputs, **options, return_lse=True)
    assert len(launched) > before, "nothing was repeated"
    forget()
    count = len(launched)
    expected = function(*inputs, **options, return_lse=True)
    assert len(launched) == count
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()


BACKWARDS = {
    "causal": (flash_attn_func, dense, {"causal": True}),
    "grouped in parts": (flash_attn_func, lambda: dense(130, 70, (4, 1)), {"softcap": 9.0}),
    "sink": (flash_attn_func, dense, {"learnable_sink": lambda: torch.randn(2)}),
    "packed": FORWARDS["packed"],
}


def gradients(case, inputs, options, dout, lse_gradient=None):
    function, _, _ = case
    leaves = [t.detach().requires_grad_() for t in inputs]
    out, lse = function(*leaves, **options, return_lse=True)
    given = (dout,) if lse_gradient is None else (dout, lse_gradient)
    results = (out,) if lse_gradient is None else (out, lse)
    return torch.autograd.grad(results, leaves, given)


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("case", BACKWARDS.values(), ids=BACKWARDS)
def test_a_repeated_backward_equals_one_that_was_not(case, with_lse, launched):
    _, make, given = case
    options = options_of(given)
    inputs = make()
    dout = torch.randn_like(inputs[0])
    rows = inputs[0].shape[:-1]
    dlse = torch.randn(rows).transpose(-1, -2).contiguous() if with_lse else None
    gradients(case, make(), options, torch.randn_like(dout), dlse)
    before = len(launched)
    found = gradients(case, inputs, options, dout, dlse)
    assert len(launched) >= before + 4, launched
    forget()
    count = len(launched)
    expected = gradients(case, inputs, options, dout, dlse)
    assert len(launched) == count
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
