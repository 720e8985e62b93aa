"""flash-attn-4's score_mod and mask_mod inside our kernels, against float64."""

from __future__ import annotations

import enum
import operator
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import torch

from fa4_hd256.compat import functions
from fa4_hd256.compat.flash_attn_4 import flash_attn_func, flash_attn_varlen_func
from fa4_hd256.kernels.functions.user_functions import MASK_MOD

SCALE = 1 / 16


class Blocks(NamedTuple):
    """The fields of flash-attn-4's BlockSparseTensorsTorch that a dense call has."""

    mask_block_cnt: Any
    mask_block_idx: Any
    full_block_cnt: Any = None
    full_block_idx: Any = None
    block_size: Any = None


@cute.jit
def squared_with_bias(score, b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars):
    bias = cute.make_rmem_tensor(1, aux_tensors[0].element_type)
    bias[0] = aux_tensors[0][kv_idx[0] + seqlen_info.offset_k]
    ahead = (kv_idx - q_idx).to(cutlass.Float32)
    factor = cute.full_like(score, cutlass.Float32(aux_scalars[0]))
    return score * score * factor + bias.load().to(cutlass.Float32) + ahead * 0.01


def slope_of_square(grad, score, *where, aux_scalars, **named):
    return grad * score * cute.full_like(score, 2.0 * cutlass.Float32(aux_scalars[0]))


@cute.jit
def aligned_at_the_end(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
    behind = cute.full_like(m_idx, seqlen_info.seqlen_k - seqlen_info.seqlen_q)
    return operator.le(n_idx, m_idx + behind)


@cute.jit
def bits_of_two(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
    """Return the mask bits of 32 keys at once."""
    seen = m_idx[0] + seqlen_info.seqlen_k - seqlen_info.seqlen_q - n_idx[0] + 1
    word = cute.make_rmem_tensor(1, cutlass.Uint32)
    word[0] = cutlass.Uint32(0)
    for i in cutlass.range_constexpr(32):
        bit = cutlass.select_(seen > i, cutlass.Uint32(1 << i), cutlass.Uint32(0))
        word[0] = word[0] | bit
    return word.load()


bits_of_two.__vec_size__ = 32


def tensors(lengths, heads=(2, 1), device="cpu"):
    shapes = ((lengths[0], heads[0]), (lengths[1], heads[1]), (lengths[1], heads[1]))
    return tuple(torch.randn(1, *shape, 256).to(device, torch.bfloat16) for shape in shapes)


def attention(q, k, v, change=None, mask=None):
    """Compute attention in float64; change: of scores (heads, queries, keys)."""
    q, k, v = (tensor[0].double() for tensor in (q, k, v))
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    if change is not None:
        scores = change(scores)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)[None]


@pytest.mark.sampled
def test_a_score_mod_and_its_gradients(device):
    """A dense call has a 16-bit aux_tensor and a scalar."""
    torch.manual_seed(0)
    leaves = [tensor.requires_grad_() for tensor in tensors((20, 50), device=device)]
    bias = torch.randn(50, device=device).bfloat16()
    out, lse = flash_attn_func(
        *leaves, score_mod=squared_with_bias, score_mod_bwd=slope_of_square,
        aux_tensors=[bias], aux_scalars=(cutlass.Float32(0.25),), pack_gqa=True,
    )  # fmt: skip
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    ahead = torch.arange(50, device=device) - torch.arange(20, device=device)[:, None]
    expected = attention(*exact, lambda s: s * s * 0.25 + bias.double() + ahead * 0.01)
    dout = torch.randn_like(out)
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
    found = torch.autograd.grad(out, leaves, dout)
    for one, other in zip(found, torch.autograd.grad(expected, exact, dout.double()), strict=True):
        torch.testing.assert_close(one.double(), other, atol=4e-2, rtol=4e-2)
    with pytest.raises(ValueError, match="score_mod and score_mod_bwd=None; accepted: its deriv"):
        out, _ = flash_attn_func(
            *leaves, score_mod=squared_with_bias, aux_tensors=[bias], aux_scalars=(0.25,)
        )
        out.sum().backward()


@pytest.mark.sampled
def test_packed_sequences_have_offsets(device):
    torch.manual_seed(1)
    q, k, v = (tensor[0] for tensor in tensors((30, 70), device=device))
    of_q = torch.tensor([0, 12, 30], dtype=torch.int32, device=device)
    of_k = torch.tensor([0, 45, 70], dtype=torch.int32, device=device)
    bias = torch.randn(70, device=device)
    out, _ = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=of_q, cu_seqlens_k=of_k, max_seqlen_k=45,
        score_mod=squared_with_bias, aux_tensors=[bias], aux_scalars=(0.25,),
    )  # fmt: skip
    for rows, keys in ((slice(0, 12), slice(0, 45)), (slice(12, 30), slice(45, 70))):
        ahead = torch.arange(keys.stop - keys.start)[None].to(device)
        ahead = ahead - torch.arange(rows.stop - rows.start, device=device)[:, None]
        own = bias[keys].double()
        expected = attention(
            q[None, rows], k[None, keys], v[None, keys],
            lambda s, own=own, ahead=ahead: s * s * 0.25 + own + ahead * 0.01,
        )  # fmt: skip
        torch.testing.assert_close(out[None, rows].double(), expected, atol=2e-2, rtol=2e-2)


def test_offsets_that_have_no_room():
    """Kernels get no cu_seqlens beside three aux_tensors, or beside as many as there may be."""
    q, k, v = (tensor[0] for tensor in tensors((5, 9)))
    of_q, of_k = torch.tensor([0, 2, 5]).int(), torch.tensor([0, 5, 9]).int()
    for offsets, count in (((of_q, of_k), 3), ((of_q, of_q), 4)):
        with pytest.raises(NotImplementedError, match="reads offset_q or offset_k .* up to 2 aux"):
            flash_attn_varlen_func(
                q, k, v, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], aux_scalars=(0.25,),
                score_mod=squared_with_bias, aux_tensors=[torch.zeros(9)] * count,
            )  # fmt: skip


def test_scalars_of_other_kinds():
    given = 2, True, 0.5, np.float64(0.5), np.float32(0.5), np.int32(2), cutlass.Float32(0.5)
    found = functions._scalars_of((*given, cutlass.Int32(2), enum.IntEnum("Two", "one two").two))
    two, half = ("Int32", 2), ("Float32", 0.5)
    assert found == (two, ("Boolean", True), half, half, half, two, half, two, two)


@pytest.mark.sampled("one")
@pytest.mark.parametrize("mask_mod", [aligned_at_the_end, bits_of_two], ids=["one", "32"])
def test_a_mask_mod(device, mask_mod):
    """Alone, and beside lists of blocks; causal and windows are then ignored, as there."""
    torch.manual_seed(2)
    q, k, v = tensors((140, 200), device=device)
    mask = torch.arange(200, device=device) <= torch.arange(140, device=device)[:, None] + 60
    expected = attention(q, k, v, mask=mask)
    out, _ = flash_attn_func(q, k, v, mask_mod=mask_mod, causal=True, window_size=(3, 0))
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
    blocks = blocks_of(device)
    listed, _ = flash_attn_func(q, k, v, mask_mod=mask_mod, block_sparse_tensors=blocks)
    assert torch.equal(listed, out)


def blocks_of(device):
    """Blocks of 128 x 128 of 140 queries and 200 keys: all of them but those nobody sees."""
    counts = torch.tensor([[[2, 2]]], dtype=torch.int32, device=device)
    indices = torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32, device=device)
    return Blocks(counts, indices, block_size=(128, 128))


def test_blocks_without_a_mask_mod():
    """All keys of a listed block are seen, within the window."""
    from fa4_hd256.compat.functions import translate_blocks

    counts = torch.tensor([[[1, 1]]], dtype=torch.int32)
    blocks = Blocks(counts, torch.tensor([[[[1], [0]]]], dtype=torch.int32), block_size=(128, 128))
    for window, bound in (((None, None), lambda ahead: ahead == ahead), ((9, 0), lambda ahead: (
        ahead >= -9) & (ahead <= 0))):  # fmt: skip
        mask = translate_blocks(blocks, (140, 200), torch.device("cpu"), False, window)
        query, key = torch.arange(140)[:, None], torch.arange(200)
        expected = ((query < 128) == (key >= 128)) & bound(key - query - 60)
        assert torch.equal(mask.dense()[0, 0], expected)
    with pytest.raises(NotImplementedError, match="block_size .128, 112.; accepted: a pair of"):
        wrong = blocks._replace(block_size=(128, 112))
        translate_blocks(wrong, (140, 200), torch.device("cpu"), True, (None, None))


def test_what_a_function_holds_is_in_its_key():
    """A value that it closes over, a module's function that it calls, and the vector's size."""

    def make(offset):
        def mask_mod(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
            return n_idx <= m_idx + offset

        return mask_mod

    def key(mask_mod):
        cpu = torch.device("cpu")
        return functions.translate_mask_mod(mask_mod, (None, None), (3, 4), cpu).key

    assert key(make(1)) == key(make(1)) != key(make(2))
    changed = make(1)
    before = key(changed)
    changed.__vec_size__ = 8
    assert key(changed) != before


BESIDE = 1


def test_what_a_function_reads_may_change(monkeypatch):
    """A global, a list, and a number of another type: what was made before is not used again."""
    held, number = [1], 1

    def beside(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
        return n_idx <= m_idx + BESIDE

    def listed(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
        return n_idx <= m_idx + held[0]

    def counted(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
        return n_idx <= m_idx + number

    def key(mask_mod):
        cpu = torch.device("cpu")
        return functions.translate_mask_mod(mask_mod, (None, None), (3, 4), cpu).key

    before = key(beside), key(counted)
    assert (key(beside), key(counted)) == before
    monkeypatch.setitem(globals(), "BESIDE", 2)
    number = 1.0
    assert key(beside) != before[0] and key(counted) != before[1]
    with pytest.raises(ValueError, match="a list, which cannot be named"):
        key(listed)


def test_scalars_that_are_equal_and_not_the_same():
    def scaled(score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars):
        return score / aux_scalars[0]

    keys = {
        functions.translate_score_mod(scaled, None, (None, (scalar,))).key for scalar in (0.0, -0.0)
    }
    assert len(keys) == 2


def test_lengths_that_a_call_in_inference_mode_made():
    functions._length_tensor.cache_clear()
    with torch.inference_mode():
        found = functions._length_tensor((3, 4), torch.device("cpu"))
    assert not found.is_inference()
    functions._length_tensor.cache_clear()


def test_tracing_changes_no_key():
    """CuTe DSL replaces the code of a function that it traces; a new one means the same."""

    def make():
        @cute.jit
        def mask_mod(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
            return n_idx <= m_idx

        return mask_mod

    def found(mask_mod):
        cpu = torch.device("cpu")
        return functions.translate_mask_mod(mask_mod, (None, None), (3, 4), cpu)

    traced = make()
    before = found(traced)
    own = traced.__wrapped__
    own._original_code, own._preprocessed = own.__code__, True
    own.__code__ = own.__code__.replace(co_consts=(*own.__code__.co_consts, "rewritten"))
    MASK_MOD.check_unchanged(before.key)
    assert found(make()).key == before.key
    functions._mask_mods.forget()
    assert found(traced).key == before.key


def test_what_is_refused():
    q, k, v = tensors((3, 4))
    lengths = {"cu_seqlens_q": torch.tensor([0, 3]).int()}
    with pytest.raises(NotImplementedError, match="with cu_seqlens_q; accepted: sequences of one"):
        flash_attn_varlen_func(q[0], k[0], v[0], mask_mod=aligned_at_the_end, **lengths)
    with pytest.raises(ValueError, match="q has 1 dimensions, .*; accepted: 4, .batch, seqlen"):
        flash_attn_func(q[0, 0, 0], k, v, mask_mod=aligned_at_the_end)
    with pytest.raises(TypeError, match="aux_tensors is a Tensor .*; accepted: a list or a tuple"):
        flash_attn_func(q, k, v, score_mod=squared_with_bias, aux_tensors=torch.zeros(2))
    with pytest.raises(TypeError, match="score_mod is float; accepted: a function"):
        flash_attn_func(q, k, v, score_mod=0.5)
    with pytest.raises(TypeError, match="aux_scalars holds str"):
        flash_attn_func(q, k, v, score_mod=squared_with_bias, aux_scalars=("a",))
