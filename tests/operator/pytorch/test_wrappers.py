"""Calls inside PyTorch's wrappers: the bits of the same calls without any, forward and backward."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from replays import forget, simulated
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fa4_hd256 import flash_attn_func, flash_attn_varlen_func, masks

pytestmark = pytest.mark.simulator

ROWS = 8
DOCUMENTS = torch.tensor([0, 3, ROWS], dtype=torch.int32)
#: A window of 2 keys, made once for all examples: what one leaves behind in it meets the next.
TILES = masks.sliding_window(2, ROWS)


def packed(q, k, v):
    out = flash_attn_varlen_func(
        q[0], k[0], v[0], cu_seqlens_q=DOCUMENTS, cu_seqlens_k=DOCUMENTS, max_seqlen_q=5,
        max_seqlen_k=5, causal=True,
    )  # fmt: skip
    return out[None]


FORMS = {
    "causal": lambda q, k, v: flash_attn_func(q, k, v, causal=True),
    "documents": packed,
    "tiles": lambda q, k, v: flash_attn_func(q, k, v, block_mask=TILES),
}

# Wrappers: each takes a function of tensors and returns one that computes the same.


class _Module(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, *tensors):
        return self.call(*tensors)


def checkpointed(call):
    return lambda *given: checkpoint(call, *given, use_reentrant=False)


def checkpointed_reentrant(call):
    return lambda *given: checkpoint(call, *given, use_reentrant=True)


def compiled(call):
    return torch.compile(call, backend="aot_eager", fullgraph=True)


def compiled_dynamic(call):
    return torch.compile(call, backend="aot_eager", dynamic=True)


def exported(call):
    return lambda *given: torch.export.export(_Module(call), given).module()(*given)


def traced(call):
    return lambda *given: make_fx(call)(*given)(*given)


def autocast(call):
    def run(*given):
        with torch.autocast("cpu", torch.bfloat16):
            return call(*[tensor.float() for tensor in given])

    return run


def vmapped(call):
    return lambda *given: torch.vmap(call)(*[tensor[None] for tensor in given])[0]


def functionalized(call):
    return lambda *given: torch.func.functionalize(call)(*given)


def inside(manager):
    """A wrapper that enters what `manager()` makes."""

    def wrapper(call):
        def run(*given):
            with manager():
                return call(*given)

        return run

    return wrapper


def copied_module(call):
    """A copy of a module with hooks of all kinds."""

    def run(*given):
        module = copy.deepcopy(_Module(call))
        module.register_forward_pre_hook(lambda _, given: (given[0] + 0, *given[1:]))
        module.register_forward_hook(lambda _, given, out: out + 0)
        module.register_full_backward_hook(lambda _, of_inputs, of_out: of_inputs)
        return module(*given)

    return run


def called_functionally(call):
    def run(*given):
        module = _Module(call)
        return torch.func.functional_call(module, {"weight": module.weight * 2}, given)

    return run


def spread(call):
    """Rows with others between them."""
    return lambda *given: call(*[torch.stack((t, t), 2)[:, :, 0] for t in given])


def in_a_thread(call):
    def run(*given):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(call, *given).result()

    return run


def deterministic(call):
    """Memory that nobody has written to holds NaN."""

    def run(*given):
        torch.use_deterministic_algorithms(True)
        try:
            return call(*given)
        finally:
            torch.use_deterministic_algorithms(False)

    return run


MANAGERS = {
    "saved as copies": lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t),
    "saved on the CPU": torch.autograd.graph.save_on_cpu,
    "counted": lambda: FlopCounterMode(display=False),
    "profiled": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "watched": lambda: torch.autograd.set_detect_anomaly(True),
}
WRAPPERS = {
    one.__name__.replace("_", " "): one
    for one in (
        checkpointed, checkpointed_reentrant, compiled, compiled_dynamic, exported, traced,
        autocast, vmapped, functionalized, copied_module, called_functionally, spread, in_a_thread,
        deterministic,
    )
} | {name: inside(manager) for name, manager in MANAGERS.items()}  # fmt: skip
#: Two of them, the inner one first.
PAIRS = [
    ("checkpointed", "compiled"), ("autocast", "checkpointed"), ("compiled", "saved as copies"),
    ("vmapped", "checkpointed"), ("copied module", "checkpointed reentrant"),
    ("spread", "exported"), ("autocast", "compiled"), ("deterministic", "checkpointed"),
]  # fmt: skip


def results(call):
    """Return [out, gradients of q, k and v] of the same tensors each time."""
    chosen = torch.Generator().manual_seed(3)
    leaves = [
        torch.randn(1, ROWS, 1, 256, generator=chosen).bfloat16().requires_grad_() for _ in "qkv"
    ]
    out = call(*leaves)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    out.backward(weights)
    return [out.detach(), *[leaf.grad for leaf in leaves]]


def check(form, names):
    wrapped = call = FORMS[form]
    for name in names:
        wrapped = WRAPPERS[name](wrapped)
    expected = results(call)
    torch._dynamo.reset()
    assert all(map(torch.equal, results(wrapped), expected))
    # What is kept of a wrapped call serves the next.
    assert all(map(torch.equal, results(call), expected))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.sampled
def test_wrapped_calls_have_the_same_bits(name, form):
    check(form, [name])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("names", PAIRS, ids=" in ".join)
@pytest.mark.sampled
def test_wrappers_of_wrappers(names, form):
    check(form, names)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sampled
def test_wrapped_calls_that_repeat(form, monkeypatch):
    """Calls repeat as those of a GPU do."""
    simulated(monkeypatch)
    try:
        for name in WRAPPERS:
            check(form, [name])
    finally:
        forget()
