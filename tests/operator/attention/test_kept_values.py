"""Values cached by one call serve others, in whatever mode, thread or order they come."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from replays import forget, simulated
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask

from fa4_hd256 import flash_attn_func, flash_attn_with_kvcache, get_backward_metadata, masks
from fa4_hd256.integrations.context_parallel import local
from fa4_hd256.integrations.flex_attention import flex_attention

ROWS = 128


def inputs(requires_grad=False):
    shapes = [(1, ROWS, heads, 256) for heads in (2, 1, 1)]
    return [torch.randn(shape).bfloat16().requires_grad_(requires_grad) for shape in shapes]


def exact(q, k, v, seen):
    q, k, v = (t.float().transpose(1, 2) for t in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
    return out.transpose(1, 2)


def is_lower(batch, head, query, key):
    return query >= key


def block_mask():
    return create_block_mask(is_lower, 1, 1, ROWS, ROWS, device="cpu")


def tile_mask():
    return masks.from_dense(torch.ones(ROWS, ROWS).tril().bool())


def by_flash(q, k, v, mask):
    return flash_attn_func(q, k, v, block_mask=mask)


def by_flex(q, k, v, mask):
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    out = flex_attention(*heads_first, block_mask=mask, traces_mask=True, enable_gqa=True)
    return out.transpose(1, 2)


class Layer(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, *tensors):
        return self.call(*tensors)


def compiled(call):
    torch.compile(call, backend="aot_eager")(*inputs())


def exported(call):
    torch.export.export(Layer(call), tuple(inputs()))


def with_fake_tensors(call):
    with FakeTensorMode(allow_non_fake_inputs=True):
        call(*(torch.empty(1, ROWS, 1, 256, dtype=torch.bfloat16) for _ in "qkv"))


def differentiated(call):
    q, *others = inputs()
    torch.func.grad(lambda q: call(q, *others).float().sum())(q)


def pushed_forward(call):
    q, *others = inputs()
    torch.func.jvp(lambda q: call(q, *others), (q,), (q,))


def in_inference_mode(call):
    with torch.inference_mode():
        call(*inputs())


FIRST = [compiled, exported, with_fake_tensors, differentiated, pushed_forward, in_inference_mode]
FORMS = {
    "tiles": (tile_mask, by_flash), "blocks": (block_mask, by_flash),
    "traced blocks": (block_mask, by_flex),
}  # fmt: skip


@pytest.mark.simulator
@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.sampled("tiles-exported")
def test_a_mask_whose_first_call_is_another_kind_of_call(form, first):
    """Be it refused or not: an eager call with the mask, and a training, are as ever."""
    make, function = form
    mask = make()

    def call(*tensors):
        return function(*tensors, mask)

    try:
        first(call)
    except Exception as error:
        assert not isinstance(error, AssertionError)
    given = inputs(requires_grad=True)
    out = call(*given)
    assert type(out) is torch.Tensor
    seen = torch.ones(ROWS, ROWS).tril().bool()
    assert (out.float() - exact(*given, seen)).abs().max() < 2e-2
    out.float().sum().backward()
    assert all(leaf.grad is not None for leaf in given)


@pytest.mark.simulator
def test_a_compiled_call_leaves_nothing_in_a_mask():
    """A graph owns its results, and overwrites them when it runs again; what was made before is
    used."""
    mask = tile_mask()
    compiled(lambda *tensors: by_flash(*tensors, mask))
    assert not mask._made and not mask._of_bits
    by_flash(*inputs(), mask)
    before = dict(mask._made)
    assert before
    compiled(lambda *tensors: by_flash(*tensors, mask))
    assert mask._made == before


@pytest.mark.cuda
def test_lists_that_a_capture_makes_are_its_own():
    """Captured lists are there once the graph is replayed: an eager call before does not read
    them."""
    mask = masks.sliding_window(64, 512, device="cuda")
    other = masks.sliding_window(64, 512, device="cuda")
    shape = 1, 512, 2, 256
    given = [torch.randn(shape, device="cuda").bfloat16() for _ in "qkv"]
    expected = flash_attn_func(*given, block_mask=other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = flash_attn_func(*given, block_mask=mask)
    assert torch.equal(flash_attn_func(*given, block_mask=mask), expected)
    graph.replay()
    assert torch.equal(found, expected)


@pytest.mark.simulator
@pytest.mark.sampled
def test_forward_mode_gradients_are_refused():
    """An operator would drop them in silence."""
    q, k, v = inputs()
    caches = [torch.randn(1, 64, 1, 256).bfloat16() for _ in "kv"]
    out, lengths = torch.empty_like(q), torch.tensor([9], dtype=torch.int32)
    calls = [
        lambda q: flash_attn_func(q, k, v), lambda q: flash_attn_func(q, k, v, out=out),
        lambda q: flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths),
        lambda q: flash_attn_with_kvcache(q, *caches, k[:, :3], v[:, :3], cache_seqlens=lengths),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(NotImplementedError, match="forward-mode gradients.*accepted: back"):
            torch.func.jvp(call, (q,), (q,))
        with torch.autograd.forward_ad.dual_level():
            call(q)
            with pytest.raises(NotImplementedError, match="forward-mode gradients"):
                call(torch.autograd.forward_ad.make_dual(q, q))


@pytest.mark.simulator
def test_out_of_another_mode_in_a_repeated_call(monkeypatch):
    """Refused before it is written to, as in a first call."""
    simulated(monkeypatch)
    try:
        with torch.inference_mode():
            out = torch.zeros(1, ROWS, 2, 256).bfloat16()
        for _ in range(2):
            flash_attn_func(*inputs(), out=torch.zeros(1, ROWS, 2, 256).bfloat16())
        with pytest.raises(ValueError, match=r"out was made under torch.inference_mode\(\)"):
            flash_attn_func(*inputs(), out=out)
        assert not out.any()
    finally:
        forget()


def test_numbers_of_documents_and_of_dS_serve_a_training_too(device):
    with torch.inference_mode():
        local._lengths_of.cache_clear()
        (offsets, _), _ = local._lengths_of((0, 3, 9), torch.device(device))
        metadata = get_backward_metadata(torch.tensor([0, 3, 9], dtype=torch.int32), device=device)
    local._lengths_of.cache_clear()
    assert not offsets.is_inference() and not metadata.ds_begins.is_inference()


#: The last call comes when the main thread is through.
SERVER = """
import threading, time, torch
from fa4_hd256 import flash_attn_func
def serve():
    threading.main_thread().join()
    q, k, v = (torch.randn(1, 8, 1, 256).bfloat16() for _ in "qkv")
    print(flash_attn_func(q, k, v).isfinite().all().item())
threading.Thread(target=serve).start()
"""


@pytest.mark.simulator
@pytest.mark.sampled
def test_a_first_call_of_a_thread_that_outlives_the_main_one():
    done = subprocess.run([sys.executable, "-c", SERVER], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr[-2000:]
