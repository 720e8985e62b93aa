"""Gradients by torch.func, and batches of them."""

from __future__ import annotations

import functools

import pytest
import torch

from fa4_hd256 import flash_attn_func, masks
from fa4_hd256.integrations.transformers import attention


def inputs(device, *leading, heads=2):
    """heads: of q, for one of k and v."""
    shapes = [(*leading, 1, 8, count, 256) for count in (heads, 1, 1)]
    return [torch.randn(shape, device=device).bfloat16() for shape in shapes]


def loss(q, k, v):
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    return out.float().square().sum() + lse.sum()


def expected(tensors):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    return torch.autograd.grad(loss(*leaves), leaves)


def test_grad_and_vjp(device):
    given = inputs(device)
    wanted = expected(given)
    assert all(map(torch.equal, torch.func.grad(loss, (0, 1, 2))(*given), wanted))
    value, pull = torch.func.vjp(loss, *given)
    assert all(map(torch.equal, pull(torch.ones_like(value)), wanted))
    # The gradient of one argument alone comes from a kernel of its own.
    q, k, v = given
    leaf = q.clone().requires_grad_()
    (alone,) = torch.autograd.grad(loss(leaf, k, v), leaf)
    assert torch.equal(torch.func.grad(loss)(*given), alone)


def test_vmap_of_grad(device):
    given = inputs(device, 2)
    found = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(*given)
    for number in range(2):
        wanted = expected([tensor[number] for tensor in given])
        assert all(map(torch.equal, [tensor[number] for tensor in found], wanted))


def test_gradients_through_vmap_under_a_mask(device):
    mask = masks.sliding_window(8, 8, device=device)
    leaves = [tensor.requires_grad_() for tensor in inputs(device, 2)]
    out = torch.func.vmap(lambda *each: flash_attn_func(*each, block_mask=mask))(*leaves)
    apart = [flash_attn_func(*each, block_mask=mask) for each in zip(*leaves)]
    assert torch.equal(out, torch.stack(apart))
    found = torch.autograd.grad(out.float().square().sum(), leaves)
    wanted = torch.autograd.grad(torch.stack(apart).float().square().sum(), leaves)
    assert all(map(torch.equal, found, wanted))


def test_batches_of_gradients(device):
    leaves = [tensor.requires_grad_() for tensor in inputs(device)]
    out = flash_attn_func(*leaves, causal=True)
    of_out = torch.randn(2, *out.shape, device=device).bfloat16()
    found = torch.autograd.grad(out, leaves, of_out, retain_graph=True, is_grads_batched=True)
    for number in range(2):
        wanted = torch.autograd.grad(out, leaves, of_out[number], retain_graph=True)
        assert all(map(torch.equal, [tensor[number] for tensor in found], wanted))


def test_a_batch_of_gradients_of_a_checkpointed_call(device):
    """Saved tensors are unpacked once, which is as often as a checkpoint allows."""
    from torch.utils.checkpoint import checkpoint

    leaves = [tensor.requires_grad_() for tensor in inputs(device)]
    found = []
    for checkpointed in (False, True):
        call = functools.partial(flash_attn_func, causal=True)
        out = checkpoint(call, *leaves, use_reentrant=False) if checkpointed else call(*leaves)
        of_out = torch.ones(2, *out.shape, device=device).bfloat16()
        found.append(torch.autograd.grad(out, leaves, of_out, is_grads_batched=True))
    assert all(map(torch.equal, *found))


def test_a_batch_of_gradients_in_a_graph_with_a_mask(device):
    """The operator that reads a mask of transformers when the graph runs can be batched."""
    layer, mask = torch.nn.Module(), torch.ones(1, 1, 8, 8, dtype=torch.bool, device=device).tril()

    def attend(q, k, v):
        return attention(layer, *(t.transpose(1, 2) for t in (q, k, v)), mask)[0]

    leaves = [tensor.requires_grad_() for tensor in inputs(device)]
    of_out = torch.randn(2, *leaves[0].shape, device=device).bfloat16()
    out = torch.compile(attend, backend="aot_eager", fullgraph=True)(*leaves)
    found = torch.autograd.grad(out, leaves, of_out, is_grads_batched=True)
    for number in range(2):
        wanted = torch.autograd.grad(attend(*leaves), leaves, of_out[number])
        assert all(map(torch.equal, [tensor[number] for tensor in found], wanted))


def test_what_is_refused(device):
    q, k, v = inputs(device)

    def of_q(q):
        return loss(q, k, v)

    with pytest.raises(NotImplementedError, match="forward-mode.*accepted: .*torch.func.grad, vjp"):
        torch.func.jvp(of_q, (q,), (q,))
    with pytest.raises(NotImplementedError, match="functionalize around"):
        torch.func.grad(lambda q: torch.func.functionalize(of_q)(q))(q)
    with pytest.raises(NotImplementedError, match="no second-order gradients"):
        torch.func.grad(lambda q: torch.func.grad(of_q)(q).float().sum())(q)


@pytest.mark.sampled
def test_calls_without_gradients_are_refused(device):
    q, k, v = inputs(device)
    tree = torch.eye(8, dtype=torch.bool, device=device)

    def under_a_tree(q, k, v):
        return flash_attn_func(q, k, v, tree_mask=tree).float().sum()

    def in_e4m3(q):
        return flash_attn_func(q, *(t.to(torch.float8_e4m3fn) for t in (k, v))).float().sum()

    for wanted in (0, 1, 2):
        with pytest.raises(NotImplementedError, match="tree_mask: no gradients flow"):
            torch.func.grad(under_a_tree, wanted)(q, k, v)
    with pytest.raises(NotImplementedError, match="k and v in float8.*: no gradients flow"):
        torch.func.vjp(in_e4m3, q)
    batch = q.expand(2, *q.shape)
    with pytest.raises(NotImplementedError, match="tree_mask: no gradients flow"):
        torch.func.vmap(torch.func.grad(under_a_tree), (0, None, None))(batch, k, v)
    # A transform that wants no gradient of the attention.
    factor = torch.ones((), device=device)
    (slope,) = torch.func.grad(lambda x: x * under_a_tree(q, k, v), (0,))(factor)
    assert torch.equal(slope, under_a_tree(q, k, v))
