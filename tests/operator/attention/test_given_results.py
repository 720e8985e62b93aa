"""`out=`: results in memory of the user's; and bounds that are tensors, which nobody reads."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from operator_calls import forward_arguments

from bench.measure import host
from fa4_hd256 import flash_attn_func, flash_attn_varlen_func, plans
from fa4_hd256.ops.operators import forward, forward_out
from fa4_hd256.run import compile

BAD = 7.0


@pytest.fixture
def dense(device):
    """Return q (2 sequences), k and v."""
    q = torch.randn(2, 70, 4, 256, device=device).bfloat16()
    k, v = (torch.randn(2, 90, 2, 256, device=device).bfloat16() for _ in range(2))
    return q, k, v


@pytest.fixture
def packed(device):
    """(q, k, v; cu_seqlens by name) of three sequences, one without rows."""
    offsets = torch.tensor([0, 40, 40, 70], dtype=torch.int32, device=device)
    q = torch.randn(70, 4, 256, device=device).bfloat16()
    k, v = (torch.randn(70, 2, 256, device=device).bfloat16() for _ in range(2))
    return (q, k, v), {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}


def room(like, layout):
    """A tensor like another one, in the layout, full of what no result is."""
    if layout == "contiguous":
        return torch.full_like(like, BAD)
    if layout == "slice":
        *outer, heads, dim = like.shape
        return like.new_full((*outer, 2 * heads, dim), BAD)[..., :heads, :]
    return like.new_full((like.shape[-2], *like.shape[:-2], like.shape[-1]), BAD).movedim(0, -2)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("layout", ["contiguous", "slice", "heads first"])
@pytest.mark.sampled("contiguous-1", "slice-1", "heads first-1")
def test_dense(dense, layout, splits):
    options = {"causal": True, "num_splits": splits, "return_lse": True}
    expected, expected_lse = flash_attn_func(*dense, **options)
    out = room(dense[0], layout)
    before = out._base.clone() if out._base is not None else None
    result, lse = flash_attn_func(*dense, **options, out=out)
    assert result is out
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    if layout == "slice":
        assert (out._base[..., 4:, :] == BAD).all() and before is not None


def test_packed(packed):
    tensors, lengths = packed
    options = {**lengths, "max_seqlen_q": 40, "max_seqlen_k": 40, "causal": True}
    expected, expected_lse = flash_attn_varlen_func(*tensors, **options, return_lse=True)
    out = torch.full_like(tensors[0], BAD)
    result, lse = flash_attn_varlen_func(*tensors, **options, return_lse=True, out=out)
    assert result is out and lse.shape == expected_lse.shape
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


@pytest.mark.sampled
def test_rows_that_are_not_in_use(dense, device):
    """Unused rows are 0 in a tensor of the user's, too."""
    used = torch.tensor([3, 70], dtype=torch.int32, device=device)
    expected = flash_attn_varlen_func(*dense, seqused_q=used)
    out = torch.full_like(dense[0], BAD)
    assert flash_attn_varlen_func(*dense, seqused_q=used, out=out) is out
    assert torch.equal(out, expected) and (out[0, 3:] == 0).all()


def test_repeated_calls_write_to_each_tensor(dense):
    """Repeated calls from packed arguments have the addresses of this call."""
    if dense[0].is_cuda:
        places = [torch.full_like(dense[0], BAD) for _ in range(3)]
        for place in places:
            flash_attn_func(*dense, out=place)
        assert all(torch.equal(place, flash_attn_func(*dense)) for place in places)
        return
    with host.stand_in():
        places = [torch.full_like(dense[0], BAD) for _ in range(3)]
        for place in places:
            assert flash_attn_func(*dense, out=place) is place
        (execution,) = plans._cache.executions.values()
        # The stand-in launches nothing: what a call fills stands there, and where the launch would
        # write stands in the packed arguments.
        *_, packed = execution._free[-1]
        assert places[-1].data_ptr() in list(packed._words)
        assert places[0].data_ptr() not in list(packed._words)
        assert all(place.isnan().all() for place in places)


def test_autograd_knows_that_it_was_written_to(dense, monkeypatch):
    """PyTorch's dispatcher does not see repeated calls."""
    if not dense[0].is_cuda:
        # On a GPU nothing fills a result first.
        monkeypatch.setattr(torch.Tensor, "fill_", lambda tensor, value: tensor)
    with contextlib.nullcontext() if dense[0].is_cuda else host.stand_in():
        for _ in range(3):
            out, weight = torch.ones_like(dense[0]), dense[0].new_ones(256, requires_grad=True)
            product = (out * weight).sum()
            flash_attn_func(*dense, out=out)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.backward()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda q: 3, TypeError, "out must be a torch.Tensor or None, got int"),
        (lambda q: q.half(), TypeError, "out has dtype torch.float16; accepted: torch.bfloat16"),
        (lambda q: torch.empty_like(q[:, 1:]), ValueError, r"out has shape \(2, 69, 4, 256\); acc"),
        (lambda q: q.new_empty(2, 70, 4, 512)[..., ::2], ValueError, "out has strides.*last str"),
        (lambda q: q.new_empty(2, 1, 4, 256).expand(2, 70, 4, 256), ValueError, "out has strides"),
        (lambda q: q.new_empty(q.numel() + 1)[1:].view(q.shape), ValueError, "is 2 past a multip"),
        (lambda q: q, ValueError, "out lies in memory that the call reads"),
        (lambda q: torch._neg_view(torch.empty_like(q)), ValueError, "out is a negated view"),
    ],
)  # fmt: skip
def test_what_is_refused(dense, change, error, message):
    out = change(dense[0])
    with pytest.raises(error, match=message):
        flash_attn_func(*dense, out=out)


def test_memory_that_is_read_is_refused_in_repeated_calls(dense):
    """Alike but for the address."""
    q = dense[0]
    flash_attn_func(*dense, out=torch.empty_like(q))
    with pytest.raises(ValueError, match="out lies in memory that the call reads"):
        flash_attn_func(*dense, out=q)


def test_views_of_one_buffer_that_share_no_byte(dense):
    """Every second head; and every second row, in repeated calls, too."""
    q, *keys = dense
    batch, rows, heads, columns = q.shape
    expected = flash_attn_func(*dense)
    buffer = q.new_full((batch, 2 * rows, 2 * heads, columns), math.nan)
    of_heads = buffer[:, :rows, 0::2], buffer[:, :rows, 1::2]
    of_rows = buffer[:, 0::2, :heads], buffer[:, 1::2, :heads]
    for given, out in (of_heads, of_rows, of_rows[::-1]):
        given.copy_(q)
        flash_attn_func(given, *keys, out=out)
        assert torch.equal(out, expected) and torch.equal(given, q)
    for out in (buffer[:, :rows, :heads], buffer[:, rows // 2 : rows // 2 + rows, 1::2]):
        with pytest.raises(ValueError, match="out lies in memory that the call reads"):
            flash_attn_func(buffer[:, :rows, 1::2], *keys, out=out)


@pytest.mark.parametrize("which", ["q", "out"])
def test_gradients_are_refused(dense, which):
    out = torch.empty_like(dense[0])
    (dense[0] if which == "q" else out).requires_grad_()
    with pytest.raises(NotImplementedError, match="out= has no gradients.*torch.no_grad"):
        flash_attn_func(*dense, out=out)
    with torch.no_grad():
        flash_attn_func(*dense, out=out)


def test_the_operator(dense):
    """Graphs call it so: what it writes is in its schema, which follows that of the forward."""
    out = torch.empty_like(dense[0])
    given = forward_arguments(*dense, window_right=0)
    torch.library.opcheck(forward_out, (out, *given), test_utils=("test_schema", "test_faketensor"))
    expected, lse = forward(*given)
    assert torch.equal(forward_out(out, *given), lse) and torch.equal(out, expected)


# ---------------------------------------------------------------- max_seqlen as a tensor


def unreadable(value, device):
    """A tensor of one integer whose contents nobody may read."""

    class Unreadable(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, arguments=(), options=None):
            if function in (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__int__,
                            torch.Tensor.__index__, torch.Tensor.__bool__):  # fmt: skip
                raise AssertionError("reading it waits for the device")
            return super().__torch_function__(function, types, arguments, options or {})

    return torch.tensor(value, device=device).as_subclass(Unreadable)


@pytest.mark.parametrize("sides", ["q", "k", "qk"])
def test_a_bound_on_the_device(packed, device, sides):
    """Same bits as with the rows of q, whatever it holds; nothing is read, nothing compiled."""
    tensors, lengths = packed
    options, rows = {**lengths, "causal": True, "num_splits": 1}, len(tensors[0])
    expected = flash_attn_varlen_func(*tensors, **options, max_seqlen_q=rows)
    compiled = compile.counters["compiled"]
    for value in (40, 41):
        bounds = {
            f"max_seqlen_{side}": unreadable(value, device) if side in sides else rows
            for side in "qk"
        }
        result = flash_attn_varlen_func(*tensors, **options, **bounds)
        assert torch.equal(result, expected)
    assert compile.counters["compiled"] == compiled


def test_a_bound_on_the_device_cannot_divide_keys(packed, device):
    tensors, lengths = packed
    with pytest.raises(ValueError, match="max_seqlen_k is a tensor with batch_invariant=True"):
        flash_attn_varlen_func(
            *tensors, **lengths, max_seqlen_q=40, max_seqlen_k=unreadable(40, device), causal=True,
            batch_invariant=True,
        )  # fmt: skip
