"""Memory for dS: what the environment says, and what happens where it is not to be had."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.attention import _fa4

from fa4_hd256 import flash_attn_func, masks
from fa4_hd256.integrations import sdpa, transformers
from fa4_hd256.plans import forget_plans
from fa4_hd256.run import backward, execute

VARIABLE = "FA4_HD256_DS_BYTES"


def none_left():
    raise torch.OutOfMemoryError("CUDA out of memory.")


def gradients(device, queries=256, **options):
    """Return the gradients of a causal call, or under a block mask."""
    generator = torch.Generator().manual_seed(3)
    q, k, v, dout = (
        torch.randn(1, rows, 2, 256, generator=generator).to(device, torch.bfloat16)
        for rows in (queries, 256, 256, queries)
    )
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    options = options if "block_mask" in options else {"causal": True} | options
    return torch.autograd.grad(flash_attn_func(*leaves, **options), leaves, dout)


@pytest.fixture
def bounds(monkeypatch):
    """Bytes for dS by which calls were split."""
    found = []
    divide = backward.divide
    monkeypatch.setattr(
        backward, "divide", lambda problem, bound, gpu: found.append(bound) or divide(
            problem, bound, gpu))  # fmt: skip
    return found


@pytest.fixture
def small_memory(monkeypatch):
    """A function: from then on dS of more bytes is not to be had."""
    make = execute._maker

    def with_at_most(most):
        def maker(allocation, device):
            is_large = allocation.name == backward.DS and 2 * math.prod(allocation.shape) > most
            return none_left if is_large else make(allocation, device)

        monkeypatch.setattr(execute, "_maker", maker)

    return with_at_most


@pytest.mark.parametrize("given", ["0", "300000"])
@pytest.mark.sampled("300000")
def test_the_environment_bounds_it(device, bounds, monkeypatch, given):
    monkeypatch.setenv(VARIABLE, given)
    gradients(device)
    assert bounds == [int(given)]


def test_a_configuration_goes_before_the_environment(device, bounds, monkeypatch, backward_config):
    monkeypatch.setenv(VARIABLE, "0")
    gradients(device, backward_config=backward_config(ds_bytes=1 << 20))
    assert bounds == [1 << 20]


@pytest.mark.parametrize("given", ["-1", "8GiB", "1e9"])
def test_refused(device, monkeypatch, given):
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(ValueError, match=rf"{VARIABLE} is '{given}'; accepted: a whole number of"):
        gradients(device)


def test_the_sdpa_adapter_bounds_it(device, bounds, monkeypatch):
    """The active adapter bounds it; PyTorch activates it for CUDA tensors alone."""
    monkeypatch.setattr(_fa4, "register_flash_attention_fa4", lambda module_path: module_path)
    monkeypatch.setattr(sdpa._Active, "ds_bytes", None)
    q, k, v, dout = torch.randn(4, 1, 256, 2, 256).to(device, torch.bfloat16)
    out, lse = sdpa._flash_attn_fwd(q, k, v, causal=True)

    def backward():
        forget_plans()  # on a GPU one that came before is divided as it was
        sdpa._flash_attn_bwd(q, k, v, out, dout, lse, causal=True)
        return bounds[-1]

    default = backward()
    for name, ds_bytes in (("bounded", 1 << 17), ("unbounded", None)):
        registered = {}
        monkeypatch.setattr(
            torch.nn.attention, "register_flash_attention_impl",
            lambda name, register_fn, to=registered: to.update({name: register_fn}),
        )  # fmt: skip
        # For as long as it is activated only: a kernel that is compiled reads it, too.
        with monkeypatch.context() as with_gpu:
            with_gpu.setattr(torch.cuda, "is_available", lambda: True)
            sdpa.register(name, ds_bytes=ds_bytes)
            registered[name]()
        assert backward() == (ds_bytes or default)


def test_the_transformers_adapter_bounds_it(device, bounds):
    from transformers import AttentionInterface

    transformers.register("fa4_hd256_bounded", ds_bytes=1 << 17)
    attention = AttentionInterface._global_mapping["fa4_hd256_bounded"]
    leaves = [x.to(device, torch.bfloat16).requires_grad_() for x in torch.randn(3, 1, 2, 256, 256)]
    out, _ = attention(torch.nn.Module(), *leaves, None)
    torch.autograd.grad(out, leaves, torch.randn_like(out))
    assert bounds == [1 << 17]


@pytest.mark.parametrize("adapter", [sdpa, transformers])
@pytest.mark.parametrize(("given", "error"), [(-1, ValueError), (1e9, TypeError)])
def test_adapters_refuse(adapter, given, error):
    with pytest.raises(error, match=f"ds_bytes is {given}; accepted"):
        adapter.register("fa4_hd256_other", ds_bytes=given)


@pytest.mark.simulator
def test_less_is_tried_where_memory_is_short(device, bounds, small_memory, backward_config):
    """dS of a head has 128 KiB: of both it does not fit, of one it does, with the bits of that
    limit."""
    expected = gradients(device, backward_config=backward_config(ds_bytes=1 << 17))
    default = backward_config().ds_bytes
    small_memory(1 << 17)
    bounds.clear()
    module = backward_config.__module__
    message = f"0 MiB of dS .* not to be had.*{VARIABLE} or backward_config={module}.BackwardConfig"
    with pytest.warns(RuntimeWarning, match=message):
        found = gradients(device)
    assert bounds == [default, 1 << 17]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.simulator
@pytest.mark.sampled
def test_none_is_stored_where_nothing_fits(device, bounds, small_memory, backward_config):
    expected = gradients(device, backward_config=backward_config(ds_bytes=0))
    small_memory(0)
    bounds.clear()
    with pytest.warns(RuntimeWarning, match="not to be had"):
        found = gradients(device)
    assert bounds[0] == backward_config().ds_bytes and len(bounds) == 3
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.simulator
@pytest.mark.sampled
def test_under_a_block_mask_some_is_stored(device, bounds, small_memory, backward_config):
    """dS of the 512 queries of a head has 256 KiB, of a block of them half of it; without that
    there are no gradients, and the error is of the memory."""
    options = {"block_mask": masks.prefix_lm(100, 512, 256, device=device), "use_clc": False}
    half = backward_config(ds_bytes=1 << 17)
    expected = gradients(device, 512, backward_config=half, **options)
    small_memory(1 << 17)
    bounds.clear()
    with pytest.warns(RuntimeWarning, match="not to be had"):
        found = gradients(device, 512, **options)
    assert bounds[1:] == [1 << 18, 1 << 17]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    small_memory(0)
    with pytest.warns(RuntimeWarning), pytest.raises(torch.OutOfMemoryError):
        gradients(device, 512, **options)


@pytest.mark.simulator
@pytest.mark.sampled
def test_what_is_short_of_all_memory_is_an_error(device, monkeypatch):
    make = execute._maker
    monkeypatch.setattr(
        execute, "_maker",
        lambda one, device: none_left if one.name == "dq" else make(one, device),
    )  # fmt: skip
    with pytest.warns(RuntimeWarning), pytest.raises(torch.OutOfMemoryError):
        gradients(device)
