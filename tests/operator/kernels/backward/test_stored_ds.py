"""dS as the dV kernel stores it: every number of it, and which memory it leaves alone."""

from __future__ import annotations

import math

import pytest
import torch
from backward_cases import inputs
from ds_images import from_tiles, tile_numbers

from fa4_hd256 import flash_attn_func, flash_attn_varlen_func
from fa4_hd256.check import reference
from fa4_hd256.kernels.backward.ds_tiles import DS_BLOCK, DS_TILE_ELEMENTS
from fa4_hd256.run import backward

pytestmark = pytest.mark.simulator

#: Tolerance of the largest number: bf16 and fp16 round P, which dS is made of, and dS.
TOLERANCE = 2**-6


@pytest.fixture
def stored(monkeypatch):
    """(problem, dS) of the launches that follow.  On the CPU its memory is NaN before."""
    found, add = [], backward._add_kernel

    def added(builder, launched, of, tensors, scratch):
        add(builder, launched, of, tensors, scratch)
        if launched[1].kind == "backward_dv":
            view, problem = tensors.ds, of[0]
            builder.operate(
                "note dS", (view.name,),
                lambda ds: found.append((problem, view.in_memory(ds).clone())),
            )  # fmt: skip

    monkeypatch.setattr(backward, "_add_kernel", added)
    return found


def by_key(problem, ds, seen):
    """Return, for each sequence, (heads, keys, queries), in whole blocks, NaN where there is no
    tile. seen: bool (keys, queries) of each.  Memory that is no tile's is as it was."""
    seen = [visible.mT for visible in seen]
    numbers = tile_numbers(problem, seen)
    others = torch.ones(math.prod(problem.ds_shape[:3]), dtype=torch.bool)
    for own in numbers:
        places = torch.tensor(list(own.values()), dtype=torch.long)
        assert others[places].all()
        others[places] = False
    assert torch.isnan(ds.reshape(-1, DS_TILE_ELEMENTS)[others]).all()
    return [
        from_tiles(ds, own, visible.shape).double().mT
        for own, visible in zip(numbers, seen, strict=True)
    ]


def expected(q, k, v, dout, options):
    """dS^T of one sequence in float64, (heads, keys, queries): the gradient of the scores."""
    chosen = reference.AttentionOptions(**options)
    q, k, v, dout = (t.double().transpose(0, 1) for t in (q, k, v, dout))
    k, v = (t.repeat_interleave(len(q) // len(k), 0) for t in (k, v))
    scores = (chosen.scale(256) * q @ k.mT).requires_grad_()
    capped = chosen.softcap * torch.tanh(scores / chosen.softcap) if chosen.softcap else scores
    seen = reference.visible((q.shape[1], k.shape[1]), chosen.window)
    weights = torch.softmax(capped.masked_fill(~seen, -math.inf), -1)
    weights = torch.where(seen, weights, 0.0)  # no number where a query sees nothing
    out = weights @ v
    (found,) = torch.autograd.grad((out * dout).sum(), scores)
    return torch.where(seen, found, 0.0).mT, seen.T


def assert_is_stored(found, values, seen):
    """found: of a head, in whole blocks.  Blocks in which any query sees any key hold dS^T and
    zeros, others have no tiles."""
    keys, queries = values.shape
    full, visible = torch.zeros_like(found), torch.zeros(found.shape, dtype=torch.bool)
    full[:keys, :queries], visible[:keys, :queries] = values, seen
    blocks = (found.shape[0] // DS_BLOCK, DS_BLOCK, found.shape[1] // DS_BLOCK, DS_BLOCK)
    written = visible.view(blocks).any(3, keepdim=True).any(1, keepdim=True).expand(blocks)
    written = written.reshape(found.shape)
    assert torch.isnan(found[~written]).all()
    error = (found[written] - full[written]).abs().max()
    assert error <= TOLERANCE * values.abs().max()
    assert (found[written & ~visible] == 0).all()


DENSE = {
    "full": ((300, 330), {}),
    "causal": ((330, 150), {"causal": True}),
    "causal, fewer queries": ((140, 700), {"causal": True}),
    "begins and ends within a block": ((700, 1000), {"window_size": (100, 50)}),
    "left bound": ((389, 900), {"window_size": (200, None)}),
    "softcap, clc": ((300, 260), {"softcap": 20.0, "causal": True, "use_clc": True}),
    "negative scale": ((260, 300), {"softmax_scale": -0.07}),
}


@pytest.mark.parametrize(("lengths", "options"), DENSE.values(), ids=DENSE)
@pytest.mark.sampled("full")
def test_dense(lengths, options, stored):
    torch.manual_seed(0)
    dtype = torch.float16 if options.get("softcap") else torch.bfloat16
    tensors = inputs(lengths, (4, 2), 2, dtype)
    dout = torch.randn_like(tensors[0])
    leaves = [t.requires_grad_() for t in tensors]
    flash_attn_func(*leaves, **options).backward(dout)
    options = {name: value for name, value in options.items() if name != "use_clc"}
    ((problem, ds),) = stored
    wanted = [
        expected(*(t[entry].detach() for t in (*tensors, dout)), options) for entry in range(2)
    ]
    found = by_key(problem, ds, [seen for _, seen in wanted])
    for own, (values, seen) in zip(found, wanted, strict=True):
        for head in range(4):
            assert_is_stored(own[head], values[head], seen)


def test_packed(stored):
    """Sequences of their own lengths; what is left of their units is left alone."""
    torch.manual_seed(0)
    lengths = ((300, 130), (10, 700), (0, 40), (256, 256))
    cu_q, cu_k = (
        torch.tensor([0, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32) for n in zip(*lengths)
    )
    q, k, v, dout = (
        torch.randn(int(cu[-1]), heads, 256).bfloat16()
        for cu, heads in ((cu_q, 2), (cu_k, 1), (cu_k, 1), (cu_q, 2))
    )
    leaves = [t.requires_grad_() for t in (q, k, v)]
    options = {"causal": True}
    flash_attn_varlen_func(
        *leaves, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=300, max_seqlen_k=700,
        **options,
    ).backward(dout)  # fmt: skip
    ((problem, ds),) = stored
    wanted = []
    for entry, (of_q, of_k) in enumerate(lengths):
        rows, keys = slice(cu_q[entry], cu_q[entry] + of_q), slice(cu_k[entry], cu_k[entry] + of_k)
        one = q.detach()[rows], k.detach()[keys], v.detach()[keys], dout[rows]
        none = torch.zeros(2, of_k, of_q), torch.zeros(of_k, of_q, dtype=torch.bool)
        wanted.append(expected(*one, options) if of_q else none)
    found = by_key(problem, ds, [seen for _, seen in wanted])
    for own, (values, seen) in zip(found, wanted, strict=True):
        for head in range(2 if values.shape[2] else 0):
            assert_is_stored(own[head], values[head], seen)
