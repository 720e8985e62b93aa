"""Random calls inside random stacks of PyTorch's wrappers, beside the same calls without any.

PyTorch's own attention in the same stack says whether the stack is one that PyTorch takes. Where it
is, a call here gives the same bits as without the stack, or says what it does not offer. Masks live
as long as the module, so what one example leaves behind meets the next: after each of them a plain
training step must be what it ever was.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from replays import forget, simulated
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fa4_hd256 import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, masks
from fa4_hd256.integrations import transformers as of_transformers
from fa4_hd256.integrations.flex_attention import flex_attention

pytestmark = pytest.mark.simulator

ROWS = 8
_DISTANCES = torch.arange(ROWS)[:, None] - torch.arange(ROWS)
CAUSAL = _DISTANCES >= 0
DOCUMENTS = torch.tensor([0, 3, ROWS], dtype=torch.int32)
USED = torch.tensor([5], dtype=torch.int32)
#: Windows of 2 keys before a query, made once for all examples.
WINDOW = CAUSAL & (_DISTANCES <= 2)
TILES = masks.sliding_window(2, ROWS)
BLOCKS = create_block_mask(
    lambda batch, head, query, key: (query >= key) & (query - key <= 2), 1, 1, ROWS, ROWS,
    device="cpu",
)  # fmt: skip
DENSE = WINDOW[None, None].clone()
ADDED = torch.zeros(DENSE.shape).masked_fill(~DENSE, -torch.inf)
_LAYER = torch.nn.Module()


class Form(NamedTuple):
    """A call. attend: of q, k, v, (1, ROWS, heads, 256), heads of the keys being 1; seen: its mask,
    (ROWS, ROWS) bool."""

    attend: Callable[..., torch.Tensor]
    seen: torch.Tensor
    heads: int = 1
    has_gradients: bool = True


def packed(q, k, v):
    out = flash_attn_varlen_func(
        q[0], k[0], v[0], cu_seqlens_q=DOCUMENTS, cu_seqlens_k=DOCUMENTS, max_seqlen_q=5,
        max_seqlen_k=5, causal=True,
    )  # fmt: skip
    return out[None]


def of_layer(mask):
    def attend(q, k, v):
        heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return of_transformers.attention(_LAYER, *heads_first, mask)[0]

    return attend


def of_flex(mask):
    def attend(q, k, v):
        heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return flex_attention(*heads_first, block_mask=mask).transpose(1, 2)

    return attend


IS_SECOND = torch.arange(ROWS) >= 3

FORMS = {
    "causal": Form(lambda q, k, v: flash_attn_func(q, k, v, causal=True), CAUSAL),
    "documents": Form(packed, CAUSAL & (IS_SECOND[:, None] == IS_SECOND)),
    "tiles": Form(lambda q, k, v: flash_attn_func(q, k, v, block_mask=TILES), WINDOW),
    "FlexAttention": Form(of_flex(None), torch.ones(ROWS, ROWS, dtype=torch.bool)),
    "FlexAttention, blocks": Form(of_flex(BLOCKS), WINDOW),
    "transformers": Form(of_layer(None), CAUSAL, 2),
    "transformers, bool": Form(of_layer(DENSE), WINDOW),
    "transformers, added": Form(of_layer(ADDED), WINDOW),
    "cache": Form(
        lambda q, k, v: flash_attn_with_kvcache(q, k, v, cache_seqlens=USED),
        (torch.arange(ROWS) < 5).expand(ROWS, ROWS), has_gradients=False,
    ),
}  # fmt: skip


def by_pytorch(form: Form) -> Callable[..., torch.Tensor]:
    """Return the call in PyTorch's operators, in the same dtype."""
    hidden = ~form.seen

    def attend(q, k, v):
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        scores = (q @ k.mT / 16).masked_fill(hidden, -torch.inf)
        return (scores.softmax(-1).to(v.dtype) @ v).to(q.dtype).transpose(1, 2)

    return attend


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
    return torch.compile(call, backend="eager", fullgraph=True)


def compiled_ahead(call):
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


def saved_as_copies(call):
    def run(*given):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda copy: copy):
            return call(*given)

    return run


def saved_on_the_cpu(call):
    def run(*given):
        with torch.autograd.graph.save_on_cpu():
            return call(*given)

    return run


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


def hooked(call):
    """Hooks of tensors, which see each gradient."""

    def run(*given):
        out = call(*given)
        for tensor in (*given, out):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: gradient.clone())
        return out

    return run


def transposed(call):
    return lambda *given: call(*[t.transpose(1, 2).contiguous().transpose(1, 2) for t in given])


def spread(call):
    """Rows with others between them."""
    return lambda *given: call(*[torch.stack((t, t), 2)[:, :, 0] for t in given])


def in_a_thread(call):
    """Autocast is a thread's own."""

    def run(*given):
        is_on = torch.is_autocast_enabled("cpu")

        def call_there():
            with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
                return call(*given)

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(call_there).result()

    return run


def on_a_device(call):
    def run(*given):
        with torch.device("cpu"):
            return call(*given)

    return run


def counted(call):
    def run(*given):
        with FlopCounterMode(display=False):
            return call(*given)

    return run


def profiled(call):
    def run(*given):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            return call(*given)

    return run


def watched(call):
    def run(*given):
        with torch.autograd.set_detect_anomaly(True):
            return call(*given)

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


WRAPPERS = [
    checkpointed, checkpointed_reentrant, compiled, compiled_ahead, compiled_dynamic, exported,
    traced, autocast, vmapped, functionalized, saved_as_copies, saved_on_the_cpu, copied_module,
    called_functionally, hooked, transposed, spread, in_a_thread, on_a_device, counted, profiled,
    watched, deterministic,
]  # fmt: skip


# Ways to call a function and to get its gradients.


def cotangent(out):
    return torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)


def leaves_of(tensors, needed):
    return [t.detach().clone().requires_grad_(asked) for t, asked in zip(tensors, needed)]


def asked_of(leaves):
    return [leaf for leaf in leaves if leaf.requires_grad]


def backward(call, tensors, needed):
    leaves = leaves_of(tensors, needed)
    out = call(*leaves)
    out.backward(cotangent(out))
    return [out.detach(), *[leaf.grad for leaf in asked_of(leaves)]]


def gradients_twice(call, tensors, needed):
    """The second time from the same graph."""
    leaves = leaves_of(tensors, needed)
    out = call(*leaves)
    for keep in (True, False):
        found = torch.autograd.grad(out, asked_of(leaves), cotangent(out), retain_graph=keep)
    return [out.detach(), *found]


def batch_of_gradients(call, tensors, needed):
    leaves = leaves_of(tensors, needed)
    out = call(*leaves)
    given = torch.stack((cotangent(out) / 2, cotangent(out)))
    found = torch.autograd.grad(out, asked_of(leaves), given, is_grads_batched=True)
    return [out.detach(), *[gradient[1] for gradient in found]]


def pulled_back(call, tensors, needed):
    fixed = [t.detach() for t in tensors]
    places = [place for place, asked in enumerate(needed) if asked]

    def of_asked(*given):
        return call(*[given[places.index(i)] if i in places else t for i, t in enumerate(fixed)])

    out, pull = torch.func.vjp(of_asked, *[fixed[place] for place in places])
    return [out, *pull(cotangent(out))]


def plainly(call, tensors, needed):
    return [call(*[tensor.detach() for tensor in tensors])]


def without_gradients(call, tensors, needed):
    with torch.no_grad():
        return [call(*leaves_of(tensors, needed))]


def in_inference_mode(call, tensors, needed):
    with torch.inference_mode():
        return [call(*[tensor.clone() for tensor in tensors])]


def in_inference_mode_from_outside(call, tensors, needed):
    with torch.inference_mode():
        return [call(*tensors)]


FORWARD = [plainly, without_gradients, in_inference_mode, in_inference_mode_from_outside]
WITH_GRADIENTS = [backward, gradients_twice, batch_of_gradients, pulled_back]


def second_order(call, tensors, needed):
    leaves = leaves_of(tensors, needed)
    out = call(*leaves)
    found = torch.autograd.grad(out, asked_of(leaves), cotangent(out), create_graph=True)
    return list(torch.autograd.grad(sum(each.float().sum() for each in found), asked_of(leaves)))


def pushed_forward(call, tensors, needed):
    return list(torch.func.jvp(lambda q: call(q, *tensors[1:]), (tensors[0],), (tensors[0],)))


#: Refused, whatever stands around them.
REFUSED = [second_order, pushed_forward]


GRAPHS = {compiled, compiled_ahead, compiled_dynamic, exported}


def is_taken(name, wrappers, way):
    """Return True unless this is known to be refused, or to mean nothing."""
    by_transforms = way in (pulled_back, pushed_forward)
    if name == "FlexAttention, blocks" and GRAPHS & {*wrappers}:
        return False  # docs/masks.md: graphs take masks of fa4_hd256.masks
    if in_a_thread in wrappers:
        # Threads know no transform, which PyTorch's own operators leave out in silence, too.
        return not by_transforms and not {vmapped, functionalized, traced} & {*wrappers}
    if way is pulled_back:
        # Refused: functionalize, and what is compiled, inside a transform that differentiates.
        return not (GRAPHS | {functionalized}) & {*wrappers}
    return True


@st.composite
def examples(draw):
    """(name of a form, wrappers from the inside out, a way, which of q, k, v require gradients)."""
    name = draw(st.sampled_from(sorted(FORMS)))
    wrappers = draw(st.lists(st.sampled_from(WRAPPERS), min_size=1, max_size=3, unique=True))
    ways = FORWARD + (WITH_GRADIENTS * 2 + REFUSED if FORMS[name].has_gradients else [])
    ways = [way for way in ways if is_taken(name, wrappers, way)]
    hypothesis.assume(ways)
    needed = draw(st.sampled_from([(True, True, True), (True, False, False), (False, True, True)]))
    return name, wrappers, draw(st.sampled_from(ways)), needed


def inputs_of(form):
    chosen = torch.Generator().manual_seed(3)
    shapes = (1, ROWS, form.heads, 256), (1, ROWS, 1, 256), (1, ROWS, 1, 256)
    return [torch.randn(shape, generator=chosen).bfloat16() for shape in shapes]


def wrapped(call, wrappers):
    for wrapper in wrappers:
        call = wrapper(call)
    return call


class Raised(NamedTuple):
    error: Exception


def attempted(run, *arguments):
    try:
        return run(*arguments)
    except Exception as error:
        return Raised(error)


#: Results without wrappers, by form and gradients.
_expected: dict[tuple[Any, ...], list[torch.Tensor]] = {}


def expected(name, needed):
    """[out, requested gradients], held against PyTorch in float64 once."""
    if (name, needed) not in _expected:
        form, given = FORMS[name], inputs_of(FORMS[name])
        found = (backward if form.has_gradients else plainly)(form.attend, given, needed)
        exact = backward(by_pytorch(form), [tensor.double() for tensor in given], needed)
        for got, wanted in zip(found, exact):
            assert (got - wanted).abs().max() <= 2**-6 * wanted.abs().max()
        _expected[name, needed] = found
    return _expected[name, needed]


def check(example):
    name, wrappers, way, needed = example
    form, given, wanted = FORMS[name], inputs_of(FORMS[name]), expected(name, needed)
    torch._dynamo.reset()
    peer = attempted(way, wrapped(by_pytorch(form), wrappers), given, needed)
    torch._dynamo.reset()
    found = attempted(way, wrapped(form.attend, wrappers), given, needed)
    if way in REFUSED:
        assert isinstance(found, Raised), "a gradient that is not offered"
    elif not isinstance(peer, Raised):
        if isinstance(found, Raised):
            raise found.error
        for got, one in zip(found, wanted):
            assert torch.equal(got, one)
    # What is kept of a call serves the next.
    again = (backward if form.has_gradients else plainly)(form.attend, given, needed)
    assert all(map(torch.equal, again, wanted))


def run(count):
    # To shrink an example takes hundreds of runs.
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]

    @hypothesis.settings(
        max_examples=count, phases=phases, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(examples())
    def of_each(example):
        check(example)

    of_each()


@pytest.mark.sampled
def test_wrappers():
    run(10)


@pytest.mark.sampled
def test_wrappers_of_repeated_calls(monkeypatch):
    """Calls repeat as those of a GPU do."""
    simulated(monkeypatch)
    try:
        run(15)
    finally:
        forget()


@pytest.mark.sampled
def test_more_wrappers():
    run(400)
