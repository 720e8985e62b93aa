"""Test queries, keys and values in e4m3 against float64: lengths, masks, options, scales, packed
sequences, pages and caches, and what is refused.

The tolerance is twice the error of PyTorch with P rounded to e4m3 (`reference.e4m3_pytorch`). On a
Hopper GPU the LSE may be off by what its tensor core's short sums make of the scores
(`hopper_score_error`).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from e4m3_cases import (
    E4M3,
    LENGTHS,
    MASKS,
    accurate_e4m3,
    all_scales,
    codes,
    dequantised,
    hopper_products,
    hopper_score_error,
    judged,
    takes_queries,
    triple,
)
from paged_cases import Paged, int32, offsets

import sm100_sim
from fa4_hd256 import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, masks
from fa4_hd256.architectures import ARCHITECTURES, named
from fa4_hd256.check import reference
from fa4_hd256.kernels.kernel_set import kernels_of
from fa4_hd256.score_mods import alibi
from sm100_sim.tools.golden.instructions.tensor_sums import chain


@pytest.fixture(autouse=True)
def _is_offered(request, architecture):
    """Skip what calls kernels where the architecture has none for q in e4m3."""
    if not takes_queries(architecture) and not request.node.get_closest_marker("simulator"):
        pytest.skip(f"{architecture} has no kernel for q in e4m3")


def attend(tensors, given=None, **options):
    return flash_attn_func(*tensors, return_lse=True, **(given or {}), **options)


# ---------------------------------------------------------------- dense


@pytest.mark.parametrize(("lengths", "heads", "batch"), LENGTHS, ids=str)
@pytest.mark.sampled("*300, 700*")
def test_lengths(lengths, heads, batch, device):
    tensors = triple(lengths, heads, batch, device)
    accurate_e4m3(attend(tensors), tensors)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.sampled("static-*causal*")
def test_masks(mask, device, use_clc):
    """A group of two heads shares tiles; scales of sequences and KV heads."""
    tensors, given = triple((300, 420), (4, 2), 2, device), all_scales(2, 2, device=device)
    accurate_e4m3(attend(tensors, given, use_clc=use_clc, **mask), tensors, given, **mask)


@pytest.mark.parametrize(
    "options",
    [{"softmax_scale": -0.1}, {"softcap": 20.0, "causal": True}, {"softmax_scale": 0.0},
     {"softmax_scale": 2.0, "causal": True}],
    ids=str,
)  # fmt: skip
@pytest.mark.sampled
def test_options(options, device):
    """A sink is tested, too, and one scale for all."""
    tensors, given = triple((140, 260), (8, 2), 1, device), all_scales(1, device=device)
    sink = torch.randn(8, device=device)
    found = attend(tensors, given, learnable_sink=sink, **options)
    accurate_e4m3(found, tensors, given, learnable_sink=sink, **options)


@pytest.mark.parametrize("steps", [0.6, 3.9, 12.0])
@pytest.mark.sampled("12.0")
def test_maxima_that_grow(steps, device):
    """Each tile of keys has greater scores than the one before by so many powers of two: below the
    threshold P comes up to 2^8, above it O is rescaled."""
    q, k, v = triple((256, 896), (2, 1), 1, device)
    q[:] = torch.ones(256, device=device).to(E4M3)
    # Tiles come from the last keys to the first ones.
    tile = torch.arange(895, -1, -1, device=device) // 128
    rows = (tile * steps * math.log(2) / 16)[:, None] + 0.05 * k[0, :, 0].float()
    k[0, :, 0] = rows.to(E4M3)
    accurate_e4m3(attend((q, k, v), num_splits=1), (q, k, v))


@pytest.mark.sampled
def test_nan_comes_through(device):
    """A NaN in K makes NaN of the rows that see it. A NaN in V also reaches, in its column, the
    other queries of its 128."""
    q, k, v = triple((200, 200), (2, 1), 1, device)
    clean, _ = attend((q, k, v), causal=True)
    for which in range(3):
        wild = [t.clone() for t in (q, k, v)]
        wild[which].view(torch.uint8)[0, 150, 0, 7] = 0xFF if which else 0x7F
        out, _ = attend(wild, causal=True)
        assert out[0, 150, 0, 7].isnan()
        later = out[0, 151:, 0, 7]
        assert torch.equal(later, clean[0, 151:, 0, 7]) if which == 0 else later.isnan().all()
        earlier, expected = out[0, :150].clone(), clean[0, :150]
        if which == 2:
            reached = earlier[128:, :, 7]
            assert (reached.isnan() | (reached == expected[128:, :, 7])).all()
            earlier[128:, :, 7] = expected[128:, :, 7]
        assert torch.equal(earlier, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.sampled
def test_results_in_either_dtype(dtype, device):
    """The caller chooses the dtype of out and of the gate."""
    tensors, given = triple((150, 150), (2, 2), 1, device), all_scales(1, 2, device=device)
    gate = torch.randn(1, 150, 2, 256, device=device).to(dtype)
    out = torch.empty(1, 150, 2, 256, dtype=dtype, device=device)
    found, lse = attend(tensors, given, out=out, out_gate=gate)
    assert found is out
    accurate_e4m3((out, lse), tensors, given, out_gate=gate)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.sampled
def test_few_queries(num_splits, device):
    """Decoding: heads of a group share a tile, and keys are split."""
    tensors, given = triple((2, 700), (8, 1), 2, device), all_scales(2, 1, device=device)
    found = attend(tensors, given, causal=True, num_splits=num_splits)
    accurate_e4m3(found, tensors, given, causal=True)


@pytest.mark.sampled
def test_block_mask(architecture, device):
    tensors = triple((300, 300), (2, 2), 1, device)
    mask = masks.prefix_lm(100, 300, 300, device=device)
    tiles = next(t for t in kernels_of(named(architecture)).forwards if t.q_dtype == E4M3)
    if not tiles.takes_lists:
        with pytest.raises(NotImplementedError, match="block_mask: .* takes none"):
            attend(tensors, block_mask=mask)
        return
    rows, columns = torch.arange(300)[:, None], torch.arange(300)
    seen = (columns < 100) | (columns <= rows)
    accurate_e4m3(attend(tensors, block_mask=mask), tensors, mask=seen[None, None])


@pytest.mark.sampled
def test_tree_mask(device):
    tensors = triple((5, 300), (4, 1), 1, device)
    tree = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0],
                         [1, 0, 1, 0, 1]], dtype=torch.bool, device=device)  # fmt: skip
    seen = torch.ones(1, 1, 5, 300, dtype=torch.bool)
    seen[..., 295:] = tree.cpu()
    accurate_e4m3(attend(tensors, tree_mask=tree), tensors, mask=seen)


# ---------------------------------------------------------------- packed sequences, pages, caches


def check_sequences(out, lse, tensors, given, lengths, **options):
    """Compare each packed sequence with the reference. lengths: (queries, keys) of each."""
    (q, k, v), begins = tensors, [0, 0]
    for number, (queries, keys) in enumerate(lengths):
        rows = [slice(begin, begin + n) for begin, n in zip(begins, (queries, keys))]
        own = q[rows[0]][None], k[rows[1]][None], v[rows[1]][None]
        scale = {name: t[number : number + 1] for name, t in given.items()}
        if queries:
            accurate_e4m3((out[rows[0]][None], lse[:, rows[0]][None]), own, scale, **options)
        begins = [rows[0].stop, rows[1].stop]


@pytest.mark.sampled
def test_packed_sequences(device, use_clc):
    lengths = [(130, 300), (0, 40), (300, 129), (1, 0), (70, 70)]
    of_q, of_k = zip(*lengths)
    q = codes(sum(of_q), 4, 256, device=device)
    k, v = (codes(sum(of_k), 2, 256, device=device) for _ in "kv")
    given = all_scales(len(lengths), 2, device=device)
    out, lse = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=offsets(of_q, device), cu_seqlens_k=offsets(of_k, device),
        max_seqlen_q=max(of_q), max_seqlen_k=max(of_k), causal=True, return_lse=True,
        use_clc=use_clc, **given,
    )  # fmt: skip
    check_sequences(out, lse, (q, k, v), given, lengths, causal=True)


@pytest.mark.sampled
def test_lengths_in_use(device):
    tensors, given = triple((150, 260), (2, 2), 2, device), all_scales(2, 2, device=device)
    used = int32([150, 60], device), int32([200, 90], device)
    out, lse = flash_attn_varlen_func(
        *tensors, seqused_q=used[0], seqused_k=used[1], return_lse=True, **given
    )
    for row in range(2):
        n, m = (int(t[row]) for t in used)
        own = [t[row : row + 1, :length] for t, length in zip(tensors, (n, m, m))]
        scale = {name: t[row : row + 1] for name, t in given.items()}
        accurate_e4m3((out[row : row + 1, :n], lse[row : row + 1, :, :n]), own, scale)
        assert not out[row, n:].any() and (lse[row, :, n:] == -math.inf).all()


# Boxes of a part of a page and of several; rows that are gathered.
@pytest.mark.parametrize(
    ("page_size", "options"),
    [(16, {"num_splits": 2}), (256, {"window_size": (90, 0)}), (48, {"batch_invariant": True}),
     (1, {"causal": True}), (5, {})],
    ids=str,
)  # fmt: skip
@pytest.mark.sampled("16-*")
def test_chunks_of_prompts_in_pages(page_size, options, architecture, device):
    """Packed queries of prompts that are part there, and of a decoding step, over pages."""
    lengths, queries = (500, 333, 90, 1), [200, 1, 90, 1]
    paged = Paged.of(lengths, page_size, 2, dtype=E4M3, device=device)
    q, given = codes(sum(queries), 4, 256, device=device), all_scales(4, 2, device=device)
    kwargs = {
        "cu_seqlens_q": offsets(queries, device), "max_seqlen_q": max(queries),
        "seqused_k": paged.used, "page_table": paged.table, "return_lse": True,
    }  # fmt: skip
    if page_size % 16 and architecture.startswith("sm_90"):
        with pytest.raises(NotImplementedError, match="page_size that is no multiple of 16"):
            flash_attn_varlen_func(q, paged.k, paged.v, **kwargs, **given, **options)
        return
    out, lse = flash_attn_varlen_func(q, paged.k, paged.v, **kwargs, **given, **options)
    keys = [torch.cat(part, 1)[0] for part in zip(*(paged.keys(row) for row in range(4)))]
    wanted = {name: options[name] for name in options if name in ("causal", "window_size")}
    check_sequences(out, lse, (q, *keys), given, list(zip(queries, lengths)), **wanted)


@pytest.mark.parametrize("dtype", [E4M3, torch.bfloat16])
@pytest.mark.sampled
def test_new_rows_of_a_cache(dtype, device):
    """Rows in e4m3 are written as they are, others divided by the scales and rounded."""
    q, k, v = triple((9, 300), (4, 2), 2, device)
    given, lengths = all_scales(2, 2, device=device), (200, 120)
    fresh = [torch.randn(2, 9, 2, 256, device=device).to(dtype) for _ in "kv"]
    out, lse = flash_attn_with_kvcache(
        q, k, v, *fresh, cache_seqlens=int32(lengths, device), causal=True, return_lse=True, **given
    )
    for row, length in enumerate(lengths):
        own = [q[row : row + 1], *(t[row : row + 1, : length + 9] for t in (k, v))]
        scale = {name: t[row : row + 1] for name, t in given.items()}
        for cache, rows, name in zip(own[1:], fresh, ("k_descale", "v_descale")):
            wanted = rows[row]
            if dtype != E4M3:
                wanted = (wanted.float() / given[name][row, :, None]).to(E4M3)
            assert torch.equal(cache[0, length:].float(), wanted.float())
        accurate_e4m3((out[row : row + 1], lse[row : row + 1]), own, scale, causal=True)


# ---------------------------------------------------------------- flash-attention 3's functions


# ---------------------------------------------------------------- in the simulator


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.sampled("1")
def test_both_schedulers_give_the_same_bits(num_splits, monkeypatch, architecture, device):
    if device == "cpu":
        monkeypatch.setenv("SM100_SIM_DEVICE", f"{named(architecture).simulated}:3")
    tensors, given = triple((300, 400), (4, 2), 2, device), all_scales(2, 2, device=device)
    results = [
        attend(tensors, given, causal=True, use_clc=use_clc, num_splits=num_splits)
        for use_clc in (False, True)
    ]
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.simulator
@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.sampled("static-0.0-1")
def test_no_findings(seed, softcap, use_clc, sanitize, architecture):
    if not takes_queries(architecture):
        pytest.skip(f"{architecture} has no kernel for q in e4m3")
    sanitize(seed, clusters=2)
    tensors, given = triple((300, 400), (2, 1), 2), all_scales(2, 1)
    attend(tensors, given, causal=True, softcap=softcap, use_clc=use_clc)
    assert sm100_sim.last_reports()[-1].findings == []


# ---------------------------------------------------------------- what is refused


def one(shape=(1,), dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


ALL = dict.fromkeys(("q_descale", "k_descale", "v_descale"), one())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [({"k": torch.zeros(1, 9, 2, 256).bfloat16()}, TypeError, "must share one dtype"),
     ({"k": torch.zeros(1, 9, 2, 256).bfloat16(), "v": torch.zeros(1, 9, 2, 256).bfloat16()},
      TypeError, "must share one dtype; got q torch.float8_e4m3fn, k torch.bfloat16"),
     ({"k_descale": one(), "v_descale": one()}, ValueError,
      "k_descale and v_descale given alone; accepted: q_descale, k_descale and v_descale, or none"),
     ({"q_descale": one()}, ValueError, "q_descale given alone"),
     (ALL | {"q_descale": one(dtype=torch.float16)}, TypeError, "q_descale has dtype .*float16"),
     (ALL | {"q_descale": one((1, 4))}, ValueError,
      r"q_descale has shape \(1, 4\); accepted: one value, or \(1, 2\)"),
     (ALL | {"q_descale": -one()}, ValueError, "q_descale has a factor of -1"),
     (ALL | {"q_descale": 1.0}, TypeError, "q_descale must be a float32 tensor"),
     ({"out": torch.empty(1, 3, 4, 256).to(E4M3)}, TypeError,
      "out has dtype torch.float8_e4m3fn; accepted: torch.bfloat16 or torch.float16"),
     ({"out_gate": torch.empty(1, 3, 4, 256).half()}, TypeError,
      "out_gate has dtype torch.float16; accepted: that of out, torch.bfloat16"),
     ({"score_mod": alibi(torch.ones(4))}, NotImplementedError, "with a score_mod; accepted: q"),
     ({"return_max_logits": True}, NotImplementedError, "return_max_logits: .* does not keep")],
    ids=lambda part: part if isinstance(part, str) else "",
)  # fmt: skip
@pytest.mark.simulator
def test_what_is_refused(change, error, message, architecture):
    if error is not TypeError and not takes_queries(architecture):
        pytest.skip(f"{architecture} has no kernel for q in e4m3")
    q, k, v = triple((3, 9), (4, 2))
    with pytest.raises(error, match=message):
        flash_attn_func(**{"q": q, "k": k, "v": v} | change)


@pytest.mark.simulator
def test_scales_of_other_queries_are_refused():
    q, k, v = triple((3, 9), (4, 2))
    with pytest.raises(ValueError, match=r"q_descale given with q of torch.bfloat16; accepted: w"):
        flash_attn_func(q.bfloat16(), k, v, **ALL)


@pytest.mark.simulator
def test_scales_of_pages_are_refused(architecture):
    if not takes_queries(architecture):
        pytest.skip(f"{architecture} has no kernel for q in e4m3")
    q, (k, v) = codes(2, 3, 4, 256), (codes(5, 16, 2, 256) for _ in "kv")
    scales = {name: one((5, 2)) for name in ("k_descale", "v_descale")}
    with pytest.raises(ValueError, match=r"k_descale has shape \(5, 2\); accepted: one value, or"):
        flash_attn_varlen_func(
            q, k, v, seqused_k=int32([16, 9]), page_table=int32([[2], [0]]), q_descale=one(),
            **scales,
        )  # fmt: skip


@pytest.mark.simulator
@pytest.mark.parametrize("which", ["q", "k", "v", "q_descale"])
def test_gradients_are_refused(which):
    tensors = dict(zip("qkv", triple((3, 9), (4, 2)))) | {
        name: t.clone() for name, t in ALL.items()
    }
    tensors[which].requires_grad_()
    with pytest.raises(NotImplementedError, match="no gradients flow|there are none to them"):
        flash_attn_func(**tensors)
    with pytest.raises(NotImplementedError, match="requires gradients"):
        cache = {{"k": "k_cache", "v": "v_cache"}.get(name, name): t for name, t in tensors.items()}
        flash_attn_with_kvcache(**cache)


@pytest.mark.simulator
def test_rotary_embedding_is_refused():
    q, k, v = triple((1, 9), (4, 2))
    rows, angles = triple((1, 1), (2, 2))[1:], torch.zeros(16, 8)
    with pytest.raises(TypeError, match="q is torch.float8_e4m3fn with rotary_cos"):
        flash_attn_with_kvcache(
            q, k, v, *rows, cache_seqlens=int32([3]), rotary_cos=angles, rotary_sin=angles
        )


@pytest.mark.simulator
@pytest.mark.parametrize("where", [one.name for one in ARCHITECTURES])
def test_architectures_without_a_kernel_say_so(where, monkeypatch):
    if takes_queries(where):
        pytest.skip("it has one")
    monkeypatch.setenv("FA4_HD256_ARCH", where)
    with pytest.raises(
        NotImplementedError, match=f"q, k and v .*, which {where}.* not yet offered"
    ):
        flash_attn_func(*triple((3, 9), (4, 2)))


@pytest.mark.simulator
def test_shapes_without_running(architecture):
    """Graphs know the dtype of out."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v = (torch.empty(1, 9, 2, 256, dtype=E4M3) for _ in "qkv")
        out, lse = flash_attn_func(q, k, v, return_lse=True)
    assert out.dtype == torch.bfloat16 and out.shape == (1, 9, 2, 256)
    assert lse.dtype == torch.float32 and lse.shape == (1, 2, 9)


def test_sums_of_hopper():
    """Hopper's sums of scores follow the rule that recorded cases follow."""
    q, k = codes(5, 256), codes(9, 256)
    q[0], k[1, ::2] = 0.0, 0.0
    q[1] = (q[1].float() / 256).to(E4M3)
    q[2, ::3] = (q[2, ::3].float() * 64).to(E4M3)
    words = [t.view(torch.uint8).numpy() for t in (q, k)]
    expected = chain(*words, ("e4m3", "e4m3"), "f32", None)
    assert np.array_equal(hopper_products(q, k).numpy(), expected.astype(np.float64))
    assert 0 < hopper_score_error(q[None, :, None], k[None, :, None], None) < 2


def test_the_reference_rounds_probabilities():
    """P of a single key is 1, and out is V; the error with many keys is that of four bits."""
    tensors = dequantised(triple((4, 1), (2, 1)))
    assert torch.equal(
        reference.e4m3_pytorch(*tensors, torch.float16).double(), tensors[2].expand(1, 4, 2, 256)
    )
    tensors = dequantised(triple((4, 200), (2, 1)))
    expected = reference.Expected.of_e4m3(tensors, torch.float16)
    assert 2**-9 < expected.pytorch_max_error < 2**-4
    judged((expected.out.half(), expected.lse.float()), tensors)
