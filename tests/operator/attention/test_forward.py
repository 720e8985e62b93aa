"""The forward operator against the float64 reference, in the simulator or on a GPU."""

from __future__ import annotations

import math

import pytest
import torch

from fa4_hd256 import flash_attn_func, flash_attn_varlen_func
from fa4_hd256.check import reference
from fa4_hd256.run import forward as run_of_forward
from fa4_hd256.softmax_emu.pattern import Ex2Pattern

LSE_TOLERANCE = 1e-3


def inputs(seqlen_q, seqlen_k, heads=2, heads_kv=1, batch=1, dtype=torch.bfloat16, device="cpu"):
    shapes = ((seqlen_q, heads), (seqlen_k, heads_kv), (seqlen_k, heads_kv))
    return tuple(torch.randn(batch, s, h, 256).to(device, dtype) for s, h in shapes)


def check(tensors, config=None, **options):
    """Run the operator and compare; returns (out, lse) for further checks."""
    out, lse = flash_attn_func(*tensors, **options, return_lse=True, config=config)
    assert out.shape == tensors[0].shape and out.dtype == tensors[0].dtype
    assert lse.dtype == torch.float32 and out.is_contiguous()
    found = reference.compare(out, lse, tensors, **options)
    assert found.max_error <= found.tolerance, found
    assert found.lse_max_error <= LSE_TOLERANCE, found
    return out, lse


# A tile is 256 queries of a CTA pair, 128 of one CTA, and a step is 128 keys.
LENGTHS = [
    (1, 1),  # the smallest: one row, one key; the second CTA has no row at all
    (1, 300),  # decoding: one query, whole steps of keys and a rest
    (127, 127),  # one less than a CTA's rows and a step
    (128, 128),  # exactly those: the second CTA is empty
    (129, 129),  # one more: the second CTA has one row, the second step one key
    (255, 256),  # one less than a tile, two whole steps
    (256, 384),  # a whole tile and an odd number of whole steps
    (257, 255),  # one row in the second tile; causal: its first rows see no key
    (64, 1),  # causal: all rows but the last see no key
    (40, 523),  # five steps: each buffer of K and V is used again
    (515, 131),  # three tiles; causal: a tile without any visible key, then one with some
]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
@pytest.mark.sampled("127-127-full", "127-127-causal", "256-384-full")
def test_lengths(seqlen_q, seqlen_k, causal, device):
    check(inputs(seqlen_q, seqlen_k, device=device), causal=causal)


# Query heads over KV heads as models have them: 1, 2, 4 and 8 divide 128; 6 and 12 do not; 16 is
# the largest in use.
@pytest.mark.parametrize(
    ("heads", "heads_kv"), [(2, 2), (4, 2), (4, 1), (12, 2), (8, 1), (12, 1), (16, 1)]
)
@pytest.mark.sampled("2-2", "4-2", "12-2")
def test_head_ratios(heads, heads_kv, device):
    check(inputs(70, 140, heads, heads_kv, device=device), causal=True)


# Odd batch with several heads: tiles of different batches and heads share a cluster's loop.
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_batch(causal, device):
    check(inputs(150, 200, 4, 2, batch=3, device=device), causal=causal)


@pytest.mark.sampled
def test_more_tiles_than_clusters(device):
    """80 tiles on the 74 clusters of a B200: some clusters run the persistent loop twice."""
    check(inputs(20, 130, 16, 4, batch=5, device=device), causal=True)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.sampled("full")
def test_fp16(causal, device):
    check(inputs(200, 300, 1, 1, dtype=torch.float16, device=device), causal=causal)


# 1.0: Gemma 4, scores of magnitude 60, so that the softmax nearly picks one key. Negative ones
# and zero are a user's right; 1e-30 is far below every score's resolution.
@pytest.mark.parametrize("scale", [1.0, -0.0625, -1.0, 0.0, 1e-30, 0.01])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.sampled("full-1.0", "full-0.0", "causal-1.0")
def test_scale(scale, causal, device):
    check(inputs(140, 200, device=device), softmax_scale=scale, causal=causal)


def test_rows_without_a_visible_key(device):
    """300 queries, 40 keys: causal leaves the first 260 rows, a whole tile and more, empty."""
    out, lse = check(inputs(300, 40, device=device), causal=True)
    assert (out[:, :260] == 0).all()
    assert (lse[:, :, :260] == -math.inf).all()
    assert lse[:, :, 260:].isfinite().all()


@pytest.mark.sampled
def test_a_row_maximum_that_grows_in_every_step(device):
    """Every step is rescaled: the keys are sorted so that later ones score far higher."""
    q, k, v = inputs(130, 640, 1, 1, device=device)
    q = q.abs()
    steps = torch.arange(640, device=device) // 128
    k = (k.abs() * 0.1 + steps[None, :, None, None] * 0.5).to(k.dtype)
    check((q, k, v), softmax_scale=1.0)
    check((q, k, v), softmax_scale=0.0625)


@pytest.mark.parametrize("magnitude", [1e-3, 30.0])
def test_magnitudes(magnitude, device):
    q, k, v = inputs(100, 200, device=device)
    check((q * magnitude, k, v * magnitude))


# The mix that the field uses, and the polynomial alone.
@pytest.mark.parametrize(
    "pattern",
    [Ex2Pattern(4, 3), Ex2Pattern(2, 2, last_fragment_hardware=False)],
    ids=["mixed", "polynomial"],
)
@pytest.mark.sampled
def test_exp2_patterns(pattern, device, forward_config):
    config = forward_config(ex2_pattern=pattern)
    check(inputs(140, 300, device=device), config=config, causal=True)


@pytest.mark.sampled
def test_every_rescale_threshold(device, forward_config):
    """0 rescales whenever the maximum grows: the same result as with the default."""
    tensors = inputs(140, 300, device=device)
    check(tensors, config=forward_config(rescale_threshold=0.0))


def layouts(device):
    """Yield (q, k, v) that TMA can take in place, none of them contiguous."""
    fused = torch.randn(2, 150, 4 + 2 + 2, 256).to(device, torch.bfloat16)
    yield "fused QKV", fused.split((4, 2, 2), dim=2)
    yield (
        "heads first",
        tuple(
            torch.randn(2, h, 150, 256).to(device, torch.bfloat16).transpose(1, 2)
            for h in (4, 2, 2)
        ),
    )
    yield (
        "sequence first",
        tuple(
            torch.randn(150, 2, h, 256).to(device, torch.bfloat16).transpose(0, 1)
            for h in (4, 2, 2)
        ),
    )
    # All heads of k and v are one: the kernel is told of one.
    yield (
        "one KV head for all",
        tuple(
            torch.randn(2, 150, h, 256).to(device, torch.bfloat16).expand(2, 150, 2, 256)
            for h in (2, 1, 1)
        ),
    )


@pytest.fixture
def passed_on(monkeypatch):
    """Names of q, k, v as the kernel gets them, call by call: whose memory they are."""
    seen = []
    original = run_of_forward.call_arguments

    def spy(tensors, *arguments, **keywords):
        assert not any(view.offset for view in (tensors.q, tensors.k, tensors.v))
        seen.append([view.name for view in (tensors.q, tensors.k, tensors.v)])
        return original(tensors, *arguments, **keywords)

    monkeypatch.setattr(run_of_forward, "call_arguments", spy)
    return seen


def test_layouts_that_need_no_copy(device, passed_on):
    for name, tensors in layouts(device):
        check(tensors, causal=True)
        assert passed_on.pop() == ["q", "k", "v"], name


def test_layouts_that_are_copied(device, passed_on):
    """TMA cannot take one layout, which is copied: here k, its rows 520 bytes apart."""
    q, k, v = inputs(90, 150, 4, 2, batch=2, device=device)
    wide = torch.randn(2, 150, 2, 260).to(device, torch.bfloat16)
    k = wide[..., :256]
    check((q, k, v))
    got = passed_on.pop()
    assert [got[0], got[2]] == ["q", "v"] and got[1] == "k copied 1"


def test_inputs_are_left_alone(device):
    tensors = inputs(130, 130, device=device)
    copies = [tensor.clone() for tensor in tensors]
    flash_attn_func(*tensors, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies))


def test_a_second_run_is_bitwise_equal(device):
    tensors = inputs(200, 300, 4, 2, device=device)
    first = flash_attn_func(*tensors, causal=True, return_lse=True)
    second = flash_attn_func(*tensors, causal=True, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_an_empty_batch(device):
    out, lse = flash_attn_func(*inputs(5, 7, batch=0, device=device), return_lse=True)
    assert out.shape == (0, 5, 2, 256) and lse.shape == (0, 2, 5)


def test_packed_sequences_without_a_row(device):
    """Accept 0 as the longest sequence where all of them are empty."""
    q, k, v = (t.flatten(0, 1) for t in inputs(5, 7, batch=0, device=device))
    begins = torch.zeros(3, dtype=torch.int32, device=device)
    out, lse = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=begins, cu_seqlens_k=begins, max_seqlen_q=0, max_seqlen_k=0,
        return_lse=True,
    )  # fmt: skip
    assert out.shape == (0, 2, 256) and lse.shape == (2, 0)
