"""Operators as graphs call them, through PyTorch's dispatcher: their bodies find the plans of calls
that came before."""

from __future__ import annotations

import pytest
import torch
from operator_calls import backward_arguments, forward_arguments
from paged_cases import int32, offsets
from replays import forget

from fa4_hd256 import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, masks, plans

pytestmark = pytest.mark.simulator


@pytest.fixture(autouse=True)
def _recompiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def normal(*shape, grad=False):
    return torch.randn(shape).bfloat16().requires_grad_(grad)


def dense(q, k, v):
    return flash_attn_func(q, k, v, causal=True)


def divided(q, k, v):
    return flash_attn_func(q, k, v, num_splits=3)


def packed(q, k, v):
    begins = offsets([70, 130])
    flat = (t.flatten(0, 1) for t in (q, k, v))
    return flash_attn_varlen_func(
        *flat, cu_seqlens_q=begins, cu_seqlens_k=begins, max_seqlen_q=130, max_seqlen_k=130,
        causal=True,
    ).view(q.shape)  # fmt: skip


MASK = masks.sliding_window(64, 100)


def masked(q, k, v):
    return flash_attn_func(q, k, v, block_mask=MASK)


def with_sink(q, k, v):
    return flash_attn_func(q, k, v, causal=True, learnable_sink=q[0, 0, :, 0])


FUNCTIONS = [dense, divided, packed, masked, with_sink]


def through(function, tensors, gradients):
    """out, and the gradients of q, k, v."""
    leaves = [t.detach().clone().requires_grad_(gradients) for t in tensors]
    out = function(*leaves)
    if not gradients:
        return [out]
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]


@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.sampled("dense-forward", "dense-gradients", "masked-forward")
def test_compiled_calls_find_their_plans(launched, function, gradients):
    """Check for the same bits as the first call with the same tensors."""
    compiled = torch.compile(function, backend="aot_eager")
    through(compiled, [normal(2, 100, heads, 256) for heads in (2, 1, 1)], gradients)
    for _ in range(2):
        tensors = [normal(2, 100, heads, 256) for heads in (2, 1, 1)]
        launched.clear()
        found = through(compiled, tensors, gradients)
        assert launched
        forget()
        expected = through(function, tensors, gradients)
        assert all(map(torch.equal, found, expected))
        # The next call is a repeated one again.
        through(compiled, tensors, gradients)


def test_results_that_are_written_and_rows_of_caches(launched):
    def step(q, k, v, caches, lengths, tables, out):
        return flash_attn_with_kvcache(
            q, *caches, k, v, cache_seqlens=lengths, causal=True, out=out, rotary_cos=tables[0],
            rotary_sin=tables[1],
        )  # fmt: skip

    compiled = torch.compile(step, backend="aot_eager")
    for number in range(3):
        q, k, v = (normal(2, 3, heads, 256) for heads in (2, 1, 1))
        caches, tables = [normal(2, 32, 1, 256) for _ in "kv"], torch.randn(2, 32, 16)
        others = [cache.clone() for cache in caches]
        out, lengths = normal(2, 3, 2, 256), int32([number, 20])
        launched.clear()
        versions = [t._version for t in (out, *caches)]
        compiled(q, k, v, caches, lengths, tables, out)
        assert len(launched) == (0 if number == 0 else 2)
        assert all(t._version > old for t, old in zip((out, *caches), versions, strict=True))
        assert len(plans._cache.executions) == (1 if number == 0 else 2)
        expected = step(q, k, v, others, lengths, tables, torch.empty_like(out))
        assert torch.equal(out, expected)
        assert all(map(torch.equal, caches, others))


CHANGES = {
    "a scale": {"softmax_scale": 0.125}, "a window": {"window_left": 7},
    "causal": {"window_right": 0}, "a cap": {"softcap": 3.0}, "parts": {"num_splits": 2},
    "a scheduler": {"use_clc": True},
    "a sink": {"sink": torch.ones(2)}, "lengths": {"seqused_k": int32([60, 9])},
}  # fmt: skip


@pytest.mark.parametrize("changed", CHANGES.values(), ids=CHANGES)
@pytest.mark.sampled("a scale")
def test_what_a_key_holds(launched, changed):
    """Calls that differ in one thing are others, each with its own results."""
    tensors = [normal(2, 64, heads, 256) for heads in (2, 1, 1)]
    operator = torch.ops.fa4_hd256.forward

    def results():
        plain = operator(*forward_arguments(*tensors))
        return *plain, *operator(*forward_arguments(*tensors, **changed))

    results()
    launched.clear()
    found = results()
    assert len(launched) >= 2
    forget()
    assert all(map(torch.equal, found, results()))


@pytest.mark.parametrize("wanted", [[True, False, False, False], [False, True, False, False]])
@pytest.mark.sampled
def test_gradients_that_are_not_asked_for_are_empty(launched, wanted):
    q, k, v, out, dout = (normal(1, 80, 1, 256) for _ in range(5))
    lse = torch.zeros(1, 1, 80)
    given = backward_arguments(q=q, k=k, v=v, out=out, dout=dout, lse=lse, wanted=wanted)
    first = torch.ops.fa4_hd256.backward(*given)
    launched.clear()
    again = torch.ops.fa4_hd256.backward(*given)
    assert launched and all(map(torch.equal, first, again))
    sizes = [bool(t.numel()) for t in again]
    assert sizes == [wanted[0], wanted[1], wanted[1], False, False]
