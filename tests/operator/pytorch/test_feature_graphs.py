"""Calls with each feature as PyTorch's graphs see them: compiled whole, with the bits of eager
calls, and by operators whose schemas, fakes and gradients are as PyTorch checks them."""

from __future__ import annotations

import pytest
import torch
from paged_cases import int32
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from fa4_hd256 import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
    masks,
)
from fa4_hd256.score_mods import alibi

E4M3 = torch.float8_e4m3fn
CASES = {}


def case(has_gradients=False):
    """Add a function from a device to (call, its tensors: q, k, v or q and caches first)."""

    def add(make):
        CASES[make.__name__.replace("_", " ")] = make, has_gradients
        return make

    return add


def rows(device, queries=130, keys=200, batch=1, heads=(2, 1)):
    shapes = ((queries, heads[0]), (keys, heads[1]), (keys, heads[1]))
    return [torch.randn(batch, *shape, 256).to(device, torch.bfloat16) for shape in shapes]


def cache(device, heads=2):
    """Return q, caches of six pages, and the table of two sequences."""
    q = torch.randn(2, 1, heads, 256).to(device, torch.bfloat16)
    pages = [torch.randn(6, 16, 1, 256).to(device, torch.bfloat16) for _ in "kv"]
    return [q, *pages, int32([[3, 0, 5], [1, 2, 4]], device)]


@case(has_gradients=True)
def a_sink(device):
    def call(q, k, v, sink):
        out, lse = flash_attn_func(q * 2, k, v, causal=True, learnable_sink=sink, return_lse=True)
        return out + 1, lse

    return call, [*rows(device), torch.randn(2, device=device)]


@case()
def split_keys(device):
    return lambda q, k, v: flash_attn_func(q * 2, k, v, num_splits=3), rows(device, 3, 300)


@case()
def padded_with_every_option(device):
    def call(q, k, v, used, sink):
        return flash_attn_varlen_func(
            q * 2, k, v, seqused_q=used, seqused_k=used, window_size=(3, 5), softcap=20.0,
            learnable_sink=sink, return_lse=True,
        )  # fmt: skip

    return call, [*rows(device), int32([70], device), torch.randn(2, device=device)]


@case(has_gradients=True)
def packed(device):
    def call(q, k, v, cu):
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=200, max_seqlen_k=200,
            causal=True,
        ) * 2  # fmt: skip

    return call, [*(t[0] for t in rows(device, 330, 330)), int32([0, 130, 130, 330], device)]


@case(has_gradients=True)
def max_logits(device):
    return lambda q, k, v: flash_attn_func(q, k, v, causal=True, return_max_logits=True), rows(
        device, 130, 130
    )


@case(has_gradients=True)
def a_gate(device):
    def call(q, k, v, gate):
        return flash_attn_func(q * 1, k, v, out_gate=gate, causal=True)

    tensors = rows(device)
    return call, [*tensors, torch.randn_like(tensors[0])]


@case(has_gradients=True)
def a_score_mod(device):
    slopes = torch.tensor([0.3, 0.04], device=device)

    def call(q, k, v):
        return flash_attn_func(q * 2, k, v, score_mod=alibi(slopes), causal=True)

    return call, rows(device)


@case(has_gradients=True)
def a_block_mask(device):
    mask = masks.from_dense(torch.rand(1, 1, 200, 300, device=device) < 0.4)
    return lambda q, k, v: flash_attn_func(q * 2, k, v, block_mask=mask, use_clc=False), rows(
        device, 200, 300
    )


@case()
def a_tree(device):
    mask = torch.rand(2, 3, 3, device=device) < 0.6
    return lambda q, k, v, m: flash_attn_func(q * 2, k, v, tree_mask=m, return_lse=True), [
        *rows(device, 3, 9, 2), mask,
    ]  # fmt: skip


@case()
def out(device):
    def call(q, k, v, out):
        flash_attn_func(q, k, v, causal=True, out=out)
        return out + 1

    tensors = rows(device)
    return call, [*tensors, torch.empty_like(tensors[0])]


@case()
def pages(device):
    def call(q, k, v, table, used):
        return flash_attn_varlen_func(
            q * 2, k, v, seqused_k=used, page_table=table, causal=True, return_lse=True
        )

    return call, [*cache(device), int32([17, 40], device)]


@case()
def left_padding(device):
    def call(q, k, v, table, used, leftpad):
        return flash_attn_with_kvcache(
            q * 2, k, v, cache_seqlens=used, page_table=table, cache_leftpad=leftpad, causal=True
        )

    return call, [*cache(device), int32([17, 40], device), int32([0, 18], device)]


@case()
def new_rows(device):
    def call(q, k, v, table, used, *new):
        return flash_attn_with_kvcache(
            q, k, v, *new[:2], cache_seqlens=used, page_table=table, causal=True,
            rotary_cos=new[2], rotary_sin=new[3],
        )  # fmt: skip

    new = [torch.randn(2, 1, 1, 256).to(device, torch.bfloat16) for _ in "kv"]
    turns = [t.to(device, torch.bfloat16) for t in torch.randn(2, 48, 32)]
    return call, [*cache(device), int32([3, 17], device), *new, *turns]


@case()
def keys_in_e4m3(device):
    def call(q, k, v, *scales):
        return flash_attn_func(q * 2, k, v, k_descale=scales[0], v_descale=scales[1])

    q, *keys = rows(device, 1, 40, heads=(4, 1))
    return call, [q, *(t.to(E4M3) for t in keys), *torch.rand(2, 1, 1, device=device)]


@case()
def scheduler_metadata(device):
    used = int32([600, 5], device)
    listed = get_scheduler_metadata(used, 1, 600, 8, 1)

    def call(q, k, v, used, listed):
        return flash_attn_varlen_func(q * 2, k, v, seqused_k=used, scheduler_metadata=listed)

    return call, [*rows(device, 1, 600, 2, (8, 1)), used, listed]


def wanted(name, tensors):
    """Return the tensors of a case that require gradients; none of a case without gradients."""
    return [t for t in tensors if t.is_floating_point()] if CASES[name][1] else []


def run(name, call, tensors):
    """Return the bits of results, of gradients, and of the tensors behind the call."""
    given = [tensor.clone() for tensor in tensors]
    leaves = [tensor.requires_grad_() for tensor in wanted(name, given)]
    results = call(*given)
    results = results if isinstance(results, tuple) else (results,)
    found = [*results, *given]
    if leaves:
        torch.manual_seed(3)
        outs = [result for result in results if result.requires_grad]
        found += torch.autograd.grad(outs, leaves, [torch.randn_like(out) for out in outs])
    return [tensor.detach().contiguous().view(torch.uint8) for tensor in found]


# Every kind of operator by default; other cases differ in arguments.
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled("packed", "max logits", "a block mask", "out", "new rows")
def test_compiled(name, device):
    """One graph, with the bits of an eager call."""
    call, tensors = CASES[name][0](device)
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    eager, found = (run(name, function, tensors) for function in (call, compiled))
    assert all(map(torch.equal, found, eager)) and len(found) == len(eager)


class Recorded(TorchDispatchMode):
    """Notes the operators of ours that are called, and copies of their arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "fa4_hd256":
            copies = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), args)
            self.calls.append((function, copies))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled("packed", "max logits", "a block mask", "out", "new rows")
def test_operators(name, device):
    """Schemas, fakes, autograd's registration and AOT dispatch, as PyTorch checks them."""
    call, tensors = CASES[name][0](device)
    with Recorded() as recorded:
        run(name, call, tensors)
    called = {function for function, _ in recorded.calls}
    assert len(called) >= 1 + CASES[name][1]
    for function, arguments in recorded.calls:
        checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
        if not any(isinstance(t, torch.Tensor) and t.dtype == E4M3 for t in arguments):
            checks.append("test_schema")  # PyTorch compares no float8 on the CPU
        torch.library.opcheck(function, arguments, test_utils=checks)
