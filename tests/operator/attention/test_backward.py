"""Gradients of dense calls against the float64 reference, in the simulator or on a GPU.

Every kind of kernel is compiled here once; what can share one kind does.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from backward_cases import accurate, check, gradients, inputs

from fa4_hd256 import flash_attn_func, flash_attn_varlen_func
from fa4_hd256.architectures import named
from fa4_hd256.run import backward, execute
from fa4_hd256.softmax_emu.pattern import Ex2Pattern

# A tile of dQ is 256 queries of a CTA pair, one of dK and dV 128 keys; a step multiplies the two.
LENGTHS = [
    (1, 1),  # one key has all of the softmax: dQ and dK are 0
    (64, 1),  # the same for every row; causal: all but the last see no key
    (1, 300),  # decoding: one query
    (127, 129),  # one query less than a CTA's rows; one key in the second tile
    (256, 128),  # whole tiles and nothing else
    (257, 255),  # one row in the second tile; causal: its first rows see no key
    (40, 523),  # five tiles of keys; causal: none of them is invisible
    (515, 131),  # three tiles of queries; causal: one without any visible key
]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.sampled("(64, 1)-full", "(257, 255)-causal")
def test_lengths(lengths, causal, device):
    """A KV head of two query heads, whose gradients are parts; causal, one for each."""
    check(inputs(lengths, (2, 2 if causal else 1), device=device), causal=causal)


# Query heads over KV heads as models have them: 1, 2, 4 and 8 divide 128; 6 and 12 do not; 16 is
# the largest in use.
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (4, 1), (12, 2), (8, 1), (12, 1), (16, 1)])
@pytest.mark.sampled("heads0", "heads1", "heads3")
def test_head_ratios(heads, device):
    check(inputs((70, 140), heads, device=device), causal=True)


# Parts of a group of 6 query heads: 1 (dK and dV leave in 16 bits), 2, 3 and 6. Fewer clusters than
# tiles also make each of them run its loop several times.
@pytest.mark.architecture("sm_100a")
@pytest.mark.simulator
@pytest.mark.parametrize(
    ("clusters", "queries", "parts"), [(1, 40, 1), (1, 300, 2), (4, 300, 3), (74, 300, 6)]
)
@pytest.mark.sampled("1-300-2", "4-300-3", "74-300-6")
def test_parts_of_the_query_heads(clusters, queries, parts, monkeypatch):
    monkeypatch.setenv("SM100_SIM_DEVICE", f"b200:{2 * clusters}")
    seen = []
    original = backward.gradient_call_arguments

    def spy(tensors, problem, *rest):
        seen.append(problem.head_parts)
        return original(tensors, problem, *rest)

    monkeypatch.setattr(backward, "gradient_call_arguments", spy)
    check(inputs((queries, 140), (6, 1)))
    assert seen == [parts, parts]


@pytest.mark.simulator
def test_more_tiles_than_clusters(monkeypatch, architecture):
    """Three clusters for 24 tiles of dQ and 12 of dK and dV: the next tile's loads overlap."""
    monkeypatch.setenv("SM100_SIM_DEVICE", f"{named(architecture).simulated}:6")
    check(inputs((300, 200), (4, 2), batch=3), causal=True)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_batch(causal, device):
    """A KV head of two query heads, whose gradients are parts; causal, one for each."""
    check(inputs((150, 200), (4, 4 if causal else 2), batch=3, device=device), causal=causal)


# 1.0: Gemma 4. Zero, and far below every score's resolution.
@pytest.mark.parametrize("scale", [1.0, 0.0, 1e-30, 0.01])
def test_scale(scale, device):
    check(inputs((140, 200), device=device), softmax_scale=scale, causal=True)


def test_rows_without_a_visible_key(device):
    """300 queries, 40 keys: causal leaves the first 260 rows, a whole tile and more, empty."""
    tensors = inputs((300, 40), (2, 2), device=device)
    dlse = torch.randn(1, 2, 300, device=device)
    found = check(tensors, dlse=dlse, causal=True)
    assert (found["q"][:, :260] == 0).all() and found["q"][:, 260:].any()


@pytest.mark.sampled
def test_keys_that_no_query_sees(device):
    """A window of 20 keys to the left of 30 queries: the first keys have no gradient at all."""
    found = check(inputs((30, 500), device=device), window_size=(20, None), softcap=50.0)
    assert all((found[name][:, :440] == 0).all() for name in "kv")


# Both sides, wider and narrower than a step; a single key; unequal lengths; wider than all keys.
@pytest.mark.parametrize(
    ("lengths", "window"),
    [
        ((520, 900), (200, 50)),
        ((600, 600), (5, 3)),
        ((300, 300), (0, 0)),
        ((700, 200), (100, 0)),
        ((300, 300), (10**9, 10**9)),
    ],
)
@pytest.mark.sampled("lengths0-window0", "lengths1-window1", "lengths3-window3")
def test_windows(lengths, window, device):
    """A softcap, too, so that one kernel has both."""
    check(inputs(lengths, device=device), window_size=window, softcap=20.0)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_gradient_of_lse(causal, device):
    dlse = torch.randn(1, 2, 200, device=device)
    check(inputs((200, 140), device=device), dlse=dlse, causal=causal)


def test_gradient_of_lse_alone(device):
    """out is not used: dV is 0."""
    tensors = inputs((100, 140), device=device)
    q, k, v = (t.detach().requires_grad_() for t in tensors)
    _, lse = flash_attn_func(q, k, v, return_lse=True)
    # The gradient of a sum is one number, expanded.
    found = dict(zip("qkv", torch.autograd.grad(lse.sum(), (q, k, v))))
    assert (found["v"] == 0).all()
    accurate(found, tensors, torch.zeros_like(tensors[0]), torch.ones_like(lse))


# Like the scores; far above all of them; far below; none. bf16 rounds its gradient.
@pytest.mark.parametrize("logits", [(0.5, -2.0), (60.0, 30.0), (-300.0, -40.0), (-math.inf, 0.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.sampled("dtype0-logits0", "dtype0-logits1", "dtype1-logits0")
def test_sinks(logits, dtype, device):
    sink = torch.tensor(logits, device=device, dtype=dtype)
    found = check(inputs((200, 130), device=device), causal=True, learnable_sink=sink)
    assert found["sink"].dtype == dtype and found["sink"].shape == (2,)


@pytest.mark.parametrize("with_lse", [False, True])
def test_a_sink_of_infinity(device, with_lse):
    """Nothing reaches the keys.  The LSE is the sink's logit, with a slope of 1."""
    leaves = [t.requires_grad_() for t in inputs((200, 130), (2, 1), device=device)]
    sink = torch.full((2,), math.inf, device=device, requires_grad=True)
    out, lse = flash_attn_func(*leaves, causal=True, learnable_sink=sink, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse) * with_lse
    results, cotangents = ((out, lse), (dout, dlse)) if with_lse else ((out,), (dout,))
    *found, of_sink = torch.autograd.grad(results, (*leaves, sink), cotangents)
    assert not any(gradient.any() for gradient in found)
    assert torch.allclose(of_sink, dlse.sum((0, 2)), atol=1e-4)


def test_a_sink_with_the_gradient_of_lse(device):
    """Rows that see no key: their LSE is the sink's logit, with a slope of 1."""
    sink = torch.randn(2, device=device)
    dlse = torch.randn(1, 2, 200, device=device)
    check(inputs((200, 130), device=device), dlse=dlse, causal=True, learnable_sink=sink)


# Hopper has no mix: a step has 512 clocks of exp2 for 3072 of the tensor core.
@pytest.mark.architecture("sm_100a")
@pytest.mark.sampled
def test_exp2_patterns(device, backward_config):
    """The polynomial for all of P; dQ alone, both kernels call the same function."""
    q, k, v = inputs((140, 300), device=device)
    leaf = q.detach().requires_grad_()
    pattern = Ex2Pattern(2, 2, last_fragment_hardware=False)
    out = flash_attn_func(leaf, k, v, backward_config=backward_config(ex2_pattern=pattern))
    dout = torch.randn_like(out)
    accurate({"q": torch.autograd.grad(out, leaf, dout)[0]}, (q, k, v), dout)
    if device == "cpu":
        import sm100_sim

        assert "ex2.approx.ftz.f32" not in sm100_sim.last_reports()[-1].opcodes


@pytest.mark.parametrize("magnitude", [1e-3, 30.0])
def test_magnitudes(magnitude, device):
    q, k, v = inputs((100, 200), device=device)
    check((q * magnitude, k, v * magnitude), dout=torch.randn_like(q) / magnitude)


# ------------------------------------------------------------------------------------- layouts


def layouts(device):
    """Yield (q, k, v) that TMA can take in place, none of them contiguous."""
    fused = torch.randn(2, 150, 4 + 2 + 2, 256).to(device, torch.bfloat16)
    yield fused.split((4, 2, 2), dim=2)
    yield tuple(
        torch.randn(2, h, 150, 256).to(device, torch.bfloat16).transpose(1, 2) for h in (4, 2, 2)
    )
    yield tuple(
        torch.randn(150, 2, h, 256).to(device, torch.bfloat16).transpose(0, 1) for h in (4, 2, 2)
    )


def gradient_layouts(shape, device):
    """Gradients of out with any strides; whether the kernels can take them in place."""
    b, s, h, d = shape
    one = torch.randn(()).to(device, torch.bfloat16)
    yield "heads first", torch.randn(b, h, s, d).to(one).transpose(1, 2), True
    yield "sequence first", torch.randn(s, b, h, d).to(one).transpose(0, 1), True
    yield "slice of wider rows", torch.randn(b, s, h, d + 8).to(one)[..., 8:], True
    yield "rows 516 bytes apart", torch.randn(b, s, h, d + 2).to(one)[..., 2:], False
    yield "columns first", torch.randn(b, s, d, h).to(one).transpose(2, 3), False
    yield "one number, expanded", one.expand(shape), False
    yield "one head, expanded", torch.randn(b, s, 1, d).to(one).expand(shape), False


@pytest.fixture
def operands(monkeypatch):
    """Names of q, k, v and dout as the dQ and dK/dV kernels get them, call by call: whose memory
    they are."""
    seen = []
    original = backward.gradient_call_arguments

    def spy(tensors, *rest):
        seen.append([view.name for view in tensors.operands])
        return original(tensors, *rest)

    monkeypatch.setattr(backward, "gradient_call_arguments", spy)
    return seen


def test_layouts_that_need_no_copy(device, operands):
    for tensors in layouts(device):
        dout = torch.randn(2, 4, 150, 256).to(device, torch.bfloat16).transpose(1, 2)
        check(tensors, dout, causal=True)
        names = ["q", "k", "v", "dout"]
        assert operands == [names, names]
        operands.clear()


def test_layouts_of_the_gradient(device, operands):
    tensors = inputs((150, 100), (2, 1), batch=2, device=device)
    for name, dout, in_place in gradient_layouts(tensors[0].shape, device):
        check(tensors, dout, causal=True)
        assert (operands[-1][3] == "dout") == in_place, name


def far_apart(tensor: torch.Tensor, dimension: int) -> torch.Tensor:
    """Copy the numbers so that the last ones along `dimension` lie beyond 2^31 elements from the
    first.

    Only the pages that hold them are ever touched.
    """
    strides = list(tensor.stride())
    steps = tensor.shape[dimension] - 1
    strides[dimension] = ((1 << 31) // steps // 8 + 1) * 8
    base = tensor.new_empty(strides[dimension] * steps + tensor.numel())
    return base.as_strided(tensor.shape, strides).copy_(tensor)


@pytest.mark.parametrize("dimension", [0, 1, 2], ids=["sequences", "rows", "heads"])
def test_offsets_beyond_32_bits(device, dimension):
    """Every tensor that a user gives has a wide stride, whichever one it is."""
    q, k, v = inputs((150, 140), (4, 2), batch=2, device=device)
    dout = torch.randn_like(q)
    options = {"causal": True}
    expected = gradients((q, k, v), dout, **options), flash_attn_func(q, k, v, **options)
    *tensors, dout = (far_apart(tensor, dimension) for tensor in (q, k, v, dout))
    assert torch.equal(flash_attn_func(*tensors, **options), expected[1])
    found = gradients(tensors, dout, **options)
    assert all(torch.equal(found[name], expected[0][name]) for name in "qkv")


@pytest.mark.architecture("sm_100a")
@pytest.mark.simulator
@pytest.mark.sampled
def test_ds_beyond_32_bits(monkeypatch, backward_config):
    """Packed sequences said to be long, with few keys in use: the dS of the last query head begins
    beyond 2^31 elements, which less than half of the default memory has room for."""
    longest, heads, offsets = 27000, 4, torch.tensor([0, 300, 500], dtype=torch.int32)
    of_keys, used = (torch.tensor(n, dtype=torch.int32) for n in ((0, 300, longest), (300, 200)))
    q, k, v = (tensor[0] for tensor in inputs((500, longest), (heads, heads)))
    dout, made = torch.randn_like(q), []

    def untouched(allocation, device):
        """Only the pages of a large tensor that a kernel writes are ever touched."""
        size = math.prod(allocation.shape)
        made.append(size)
        result = partial(torch.empty, allocation.shape, dtype=allocation.dtype)
        return result if size > 1 << 28 else original(allocation, device)

    original = execute._maker
    monkeypatch.setattr(execute, "_maker", untouched)
    found = []
    config = backward_config(ds_bytes=6 << 30)
    for rows, ends, said, lengths in ((500, offsets, 300, None), (longest, of_keys, longest, used)):
        tensors = [tensor[:rows].detach().requires_grad_() for tensor in (q, k, v)]
        out = flash_attn_varlen_func(
            *tensors, cu_seqlens_q=offsets, cu_seqlens_k=ends, max_seqlen_q=said, max_seqlen_k=said,
            seqused_k=lengths, backward_config=config,
        )  # fmt: skip
        out.backward(dout)
        found.append([tensor.grad[:500] for tensor in tensors])
    assert max(made) * 3 // 4 > 1 << 31
    assert all(map(torch.equal, *found))


def test_a_sum_of_everything(device):
    """out.sum().backward(): the gradient of out is one number with strides of 0."""
    tensors = inputs((150, 100), (4, 2), device=device)
    q, k, v = (t.detach().requires_grad_() for t in tensors)
    flash_attn_func(q, k, v).sum().backward()
    found = {"q": q.grad, "k": k.grad, "v": v.grad}
    accurate(found, tensors, torch.ones_like(q))


def test_inputs_are_left_alone(device):
    tensors = inputs((130, 130), device=device)
    dout = torch.randn_like(tensors[0])
    copies = [tensor.clone() for tensor in (*tensors, dout)]
    gradients(tensors, dout, causal=True)
    assert all(torch.equal(a, b) for a, b in zip((*tensors, dout), copies))


def test_an_empty_batch(device):
    tensors = inputs((5, 7), batch=0, device=device)
    sink = torch.randn(2, device=device)
    found = gradients(tensors, torch.randn_like(tensors[0]), learnable_sink=sink)
    assert [found[n].shape for n in "qkv"] == [t.shape for t in tensors]
    assert (found["sink"] == 0).all()


# -------------------------------------------------------------------------------- repeatability


def test_a_second_backward_is_bitwise_equal(device):
    q, k, v = (t.requires_grad_() for t in inputs((300, 300), (6, 1), device=device))
    out = flash_attn_func(q, k, v, causal=True, deterministic=True)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    second = torch.autograd.grad(out, (q, k, v), dout)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_nothing_is_nan_that_is_not(device):
    """Rows of dO that no key has a share in may hold anything finite."""
    q, k, v = inputs((300, 40), device=device)
    dout = torch.randn_like(q)
    dout[:, :260] *= 1e30
    found = gradients((q, k, v), dout, causal=True)
    assert all(math.isfinite(gradient.abs().max()) for gradient in found.values())
    accurate(found, (q, k, v), dout, causal=True)


@pytest.mark.parametrize(
    ("heads", "lengths"), [((6, 3), (150, 130)), ((3, 3), (300, 140))], ids=["grouped", "equal"]
)
def test_some_heads_at_a_time(heads, lengths, device, backward_config):
    """However many KV heads of dS fit, one left over too, the gradients are the same bits where a
    group is in as many parts."""
    tensors = inputs(lengths, heads, device=device)
    dout = torch.randn_like(tensors[0])
    queries, keys = (-(-length // 256) * 256 for length in lengths)
    of_one = 2 * queries * keys * heads[0] // heads[1]
    found = [
        gradients(
            tensors, dout, causal=True, backward_config=backward_config(ds_bytes=count * of_one)
        )
        for count in (3, 2, 1)
    ]
    for name in "qkv":
        assert all(torch.equal(found[0][name], other[name]) for other in found[1:])
