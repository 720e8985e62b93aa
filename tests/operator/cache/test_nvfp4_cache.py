"""Caches in NVFP4 against float64: masks, options, pages, new rows, and what is refused."""

from __future__ import annotations

import pytest
import torch
from e4m3_cases import accurate
from nvfp4_cases import Cache, PagedCache, dense
from paged_cases import int32, offsets

import sm100_sim
from fa4_hd256 import AttentionModel, Needs, flash_attn_func, flash_attn_with_kvcache
from fa4_hd256.architectures import named
from fa4_hd256.call.cache_checks import check_memory
from fa4_hd256.call.operator_arguments import CacheTensors
from fa4_hd256.kernels.kernel_set import kernels_of
from fa4_hd256.kernels.nvfp4_format import NVFP4
from fa4_hd256.quantize import quantize_nvfp4
from fa4_hd256.run.ahead.needs import specs_of
from fa4_hd256.run.kernel_names import kernel_named, name_of
from fa4_hd256.score_mods import alibi


def attend(q, cache, **options):
    given = cache.options(len(q)) | options
    return flash_attn_with_kvcache(q, *cache.codes, return_lse=True, **given)


MASKS = [{}, {"causal": True}, {"window_size": (100, 0)}, {"window_size": (70, 5)}]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.sampled
def test_masks(mask, num_splits, device):
    q, cache = dense(3, 333, (8, 2), device=device)
    accurate(attend(q, cache, num_splits=num_splits, **mask), q, cache.values(), **mask)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [({"softmax_scale": -0.1}, torch.float16), ({"softcap": 20.0, "causal": True}, torch.bfloat16)],
    ids=str,
)
@pytest.mark.sampled
def test_options(options, dtype, device):
    q, cache = dense(2, 260, (16, 2), dtype=dtype, device=device)
    sink = torch.randn(16, device=device)
    found = attend(q, cache, num_splits=2, learnable_sink=sink, **options)
    accurate(found, q, cache.values(), learnable_sink=sink, **options)


# Rows of a tile: 16, 32, 64; a group of 6, padded to 8; several tiles of queries, as in prefill.
@pytest.mark.parametrize(
    ("queries", "heads"), [(1, (8, 1)), (4, (8, 1)), (3, (12, 2)), (8, (8, 1)), (70, (2, 2))],
    ids=str,
)  # fmt: skip
@pytest.mark.sampled
def test_rows_and_tiles(queries, heads, device):
    q, cache = dense(queries, 290, heads, batch=1, device=device)
    accurate(attend(q, cache, causal=True), q, cache.values(), causal=True)


def check_paged(given, q, found, lengths_q=None, **options):
    """found: (out, lse) of packed or other queries against the reference of each sequence."""
    out, lse = found
    starts = [0, *torch.tensor(lengths_q or []).cumsum(0).tolist()]
    for row in range(len(given.paged.lengths)):
        of = q[row : row + 1], out[row : row + 1], lse[row : row + 1]
        if lengths_q:
            rows = slice(starts[row], starts[row + 1])
            of = q[rows][None], out[rows][None], lse[:, rows][None]
        accurate(of[1:], of[0], given.keys(row), **options)


# Boxes of a part of a page, of a page, of several; pages that divide no tile; gathered rows.
@pytest.mark.parametrize(
    ("page_size", "options"),
    [(16, {"num_splits": 2}), (48, {"causal": True, "use_clc": True}),
     (256, {"window_size": (90, 0)}), (1, {"num_splits": 2}), (5, {"causal": True}),
     (8, {"window_size": (90, 0)})],
    ids=str,
)  # fmt: skip
@pytest.mark.sampled("5-{'causal': True}")
def test_pages(page_size, options, device):
    """Rows and pages that nobody has are NaN."""
    given = PagedCache.of((700, 0, 130, 1), page_size, 2, device)
    q = torch.randn(4, 2, 8, 256).to(device, torch.bfloat16)
    found = flash_attn_with_kvcache(
        q, *given.cache.codes, return_lse=True, **given.options, **options
    )
    masks = {name: options[name] for name in options if name in ("causal", "window_size")}
    check_paged(given, q, found, **masks)


@pytest.mark.sampled
def test_chunks_of_prompts_and_decoding_in_one_batch(device):
    given, lengths = PagedCache.of((200, 333, 90), 32, 1, device), [40, 1, 90]
    q = torch.randn(sum(lengths), 4, 256).to(device, torch.bfloat16)
    found = flash_attn_with_kvcache(
        q, *given.cache.codes, causal=True, cu_seqlens_q=offsets(lengths, device), max_seqlen_q=90,
        return_lse=True, **given.options,
    )  # fmt: skip
    check_paged(given, q, found, lengths, causal=True)


@pytest.mark.sampled
def test_codes_and_scales_of_a_page_lie_together(device):
    """A page as vLLM has it: codes of K, scales of K, codes of V, scales of V."""
    given, heads, size = PagedCache.of((300, 90), 32, 2, device), 2, 32
    pages, codes_bytes, scale_bytes = len(given.paged.k), size * heads * 128, size * heads * 16
    whole = torch.zeros(pages, 2 * (codes_bytes + scale_bytes), dtype=torch.uint8, device=device)
    views, begin = [], 0
    for tensor, count in zip(
        (given.cache.codes[0], given.cache.block_scales[0], given.cache.codes[1],
         given.cache.block_scales[1]), 2 * (codes_bytes, scale_bytes),
    ):  # fmt: skip
        view = whole[:, begin : begin + count].unflatten(1, (size, heads, -1))
        view.copy_(tensor.view(torch.uint8))
        views.append(view.view(tensor.dtype))
        begin += count
    cache = Cache((views[0], views[2]), (views[1], views[3]), given.cache.scales)
    same = PagedCache(given.paged, cache)
    q = torch.randn(2, 1, 8, 256).to(device, torch.bfloat16)
    found = flash_attn_with_kvcache(q, *cache.codes, return_lse=True, **same.options)
    check_paged(given, q, found)


@pytest.mark.sampled
def test_every_code_and_scale_is_exact(device):
    """One key alone: its V comes through, whatever codes and scales it has."""
    codes = torch.arange(256, dtype=torch.uint8, device=device).repeat(2, 1).reshape(2, 1, 2, 128)
    scales = torch.arange(64, dtype=torch.uint8, device=device).reshape(2, 1, 2, 16)
    scales[1] += 63
    block_scales = scales.view(torch.float8_e4m3fn)
    one = torch.ones(2, device=device)
    cache = Cache((codes, codes), (block_scales, block_scales), (one, one))
    out, _ = attend(torch.zeros(2, 1, 2, 256, device=device).half(), cache)
    wanted = cache.values()[1].reshape(2, 1, 2, 256)
    assert torch.equal(out.double(), wanted)


# ---------------------------------------------------------------- new rows

LENGTHS, NEW, ROWS = [0, 21, 59], 3, 64


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.sampled("True")
def test_new_rows_are_quantized(paged, device):
    """Codes and scales are those of `quantize_nvfp4`, and no other byte changes."""
    q, cache = dense(NEW, ROWS, (8, 2), batch=3, device=device)
    k, v = (torch.randn(3, NEW, 2, 256).to(device, torch.bfloat16) for _ in "kv")
    k[0, 0, 0, :3], k[0, 1, 1, 20] = torch.tensor([1e4, -1e4, 448.0], device=device), torch.inf
    v[1, 0, 0, :16], v[2, 2, 1, 40] = 1e-6, torch.nan
    codes, block_scales, options = cache.codes, cache.block_scales, cache.options(3)
    places = [(b, LENGTHS[b] + i) for b in range(3) for i in range(NEW)]
    if paged:
        codes, block_scales = (
            tuple(t.reshape(24, 8, 2, -1) for t in both) for both in (codes, block_scales)
        )
        table = torch.randperm(24).reshape(3, 8).int().to(device)
        places = [(int(table[b, row // 8]), row % 8) for b, row in places]
        options |= {"page_table": table, "k_block_scale": block_scales[0],
                    "v_block_scale": block_scales[1]}  # fmt: skip
    before = [t.view(torch.uint8).clone() for t in (*codes, *block_scales)]
    flash_attn_with_kvcache(
        q, *codes, k, v, cache_seqlens=int32(LENGTHS, device), causal=True, num_splits=2, **options
    )
    quantized = [quantize_nvfp4(*one) for one in zip((k, v), cache.scales)]
    new = [both[which] for which in range(2) for both in quantized]
    for tensor, old, rows in zip((*codes, *block_scales), before, new):
        for place, row in zip(places, rows.view(torch.uint8).flatten(0, 1)):
            old[place] = row
        assert torch.equal(tensor.view(torch.uint8), old)


@pytest.mark.sampled
def test_the_attention_is_of_new_rows_too(device):
    q, cache = dense(NEW, ROWS, (4, 1), batch=3, device=device)
    k, v = (torch.randn(3, NEW, 1, 256).to(device, torch.bfloat16) for _ in "kv")
    found = attend(q, cache, k=k, v=v, cache_seqlens=int32(LENGTHS, device), causal=True)
    for b, length in enumerate(LENGTHS):
        values = [t[b : b + 1, : length + NEW] for t in cache.values()]
        accurate([t[b : b + 1] for t in found], q[b : b + 1], values, causal=True)


# ---------------------------------------------------------------- bits and findings


def config_of(architecture, rows):
    """The configuration of tiles of so many rows."""
    kernels = kernels_of(named(architecture))
    tiles = next(t for t in kernels.forward_tiles(kv_dtype=NVFP4) if t.rows == rows)
    return kernels.tuned(tiles, False, 1, "", False)


@pytest.mark.simulator
@pytest.mark.parametrize("use_clc", [False, True], ids=["static", "clc"])
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.sampled
def test_no_findings(use_clc, seed, rows, sanitize, architecture):
    """The sanitizer has none, and both schedulers give the same bits."""
    sanitize(seed, clusters=2)
    given, q = PagedCache.of((300, 0, 200), 64, 1), torch.randn(3, 2, 8, 256).bfloat16()
    config = config_of(architecture, rows)
    for num_splits in (1, 3):
        found = [
            flash_attn_with_kvcache(
                q, *given.cache.codes, causal=True, num_splits=num_splits, use_clc=clc,
                config=config, **given.options,
            )
            for clc in {False, use_clc}
        ]  # fmt: skip
        assert all(torch.equal(found[0], one) for one in found)
    for report in sm100_sim.last_reports()[-2:]:
        assert report.findings == []


@pytest.mark.simulator
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.sampled
def test_no_findings_in_gathered_and_new_rows(seed, sanitize):
    sanitize(seed, clusters=2)
    given, q = PagedCache.of((300, 0, 200), 10, 1), torch.randn(3, 2, 8, 256).bfloat16()
    k, v = (torch.randn(3, 2, 1, 256).bfloat16() for _ in "kv")
    table = given.paged.table.clone()
    table[1, 0] = next(p for p in range(len(given.paged.k)) if p not in table)
    options = given.options | {"page_table": table, "cache_seqlens": int32([298, 0, 198])}
    flash_attn_with_kvcache(q, *given.cache.codes, k, v, causal=True, **options)
    for report in sm100_sim.last_reports()[-2:]:
        assert report.findings == []


# ---------------------------------------------------------------- kernels before the first call


@pytest.mark.simulator
def test_what_a_model_needs(architecture):
    """Kernels of caches in all forms of scales, and of new rows; each by its name."""
    own, small = named(architecture), AttentionModel("small", 8, 1)
    needs = Needs(
        ("decode",), ("dense", "paged"), page_sizes=(16,), use_clc=False, kv_dtypes=(None, NVFP4)
    )
    specs = specs_of(small, needs, own, next(iter(own.gpus.values()))[0])
    of_codes = [s for s in specs if getattr(s.problem_class, "kv_dtype", None) == NVFP4]
    forwards = [s for s in of_codes if s.kind != "append_rows"]
    for some in (forwards, [s for s in of_codes if s.kind == "append_rows"]):
        assert {s.problem_class.descale for s in some} == {"", "sequences", "pages"}
    assert {s.config.rows for s in forwards} == {16, 32, 64}
    assert all("page_table" in s.problem_class.ragged for s in forwards)
    assert all(kernel_named(name_of(s)) == s for s in specs)
    with pytest.raises(ValueError, match=r"forms are \('dense',\) with kv_dtype torch.uint8"):
        Needs(forms=("dense",), kv_dtypes=(NVFP4,))


# ---------------------------------------------------------------- what is refused


@pytest.mark.simulator
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [({"k_block_scale": None}, ValueError,
      r"NVFP4, without k_block_scale; accepted: .*\(2, 9, 1, 16\)"),
     ({"v_block_scale": torch.ones(2, 9, 1, 16)}, TypeError,
      "v_block_scale has dtype torch.float32; accepted: torch.float8_e4m3fn"),
     ({"v_block_scale": torch.ones(2, 9, 1, 8).to(torch.float8_e4m3fn)}, ValueError,
      r"v_block_scale has shape \(2, 9, 1, 8\); accepted: .*\(2, 9, 1, 16\)"),
     ({"v_block_scale": 1.0}, TypeError, "v_block_scale must be a float8_e4m3fn tensor"),
     ({"k_descale": torch.ones(1)}, ValueError, "k_descale given alone"),
     ({"score_mod": alibi(torch.ones(4))}, NotImplementedError, "uint8 with a score_mod")],
    ids=lambda part: part if isinstance(part, str) else "",
)  # fmt: skip
def test_what_is_refused(change, error, message):
    q, cache = dense(1, 9, (4, 1))
    scales = dict(zip(("k_block_scale", "v_block_scale"), cache.block_scales))
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(q, *cache.codes, **scales | change)


def test_block_scales_are_written_to():
    """Memory of their own for each, as for the caches, also beside rows that the call reads."""
    q, cache = dense(1, 9, (4, 1))
    k_scale, v_scale = cache.block_scales
    given = CacheTensors(*[None] * len(CacheTensors._fields))._replace(
        q=q, k=q, v=q, k_cache=cache.codes[0], v_cache=cache.codes[1], k_block_scale=k_scale,
    )  # fmt: skip
    check_memory(given._replace(v_block_scale=v_scale))
    with pytest.raises(ValueError, match="k_block_scale and v_block_scale lie in one place; acc"):
        check_memory(given._replace(v_block_scale=k_scale))
    with pytest.raises(ValueError, match="v_cache and v_block_scale lie in one place; accepted"):
        check_memory(given._replace(v_block_scale=cache.codes[1].view(torch.float8_e4m3fn)))
    rows = v_scale.flatten().view(torch.bfloat16)
    with pytest.raises(ValueError, match="v_block_scale lies in the memory of k; accepted"):
        check_memory(given._replace(v_block_scale=v_scale, k=rows))


@pytest.mark.simulator
def test_dtypes_that_are_refused():
    """Queries in e4m3; codes whose dtype says what they are."""
    q, cache = dense(1, 9, (4, 1))
    scales = cache.options(2)
    with pytest.raises(
        TypeError, match=r"q has dtype .*e4m3fn with k and v in NVFP4 \(torch.uint8"
    ):
        flash_attn_with_kvcache(q.to(torch.float8_e4m3fn), *cache.codes, **scales)
    codes = [t.view(torch.float4_e2m1fn_x2) for t in cache.codes]
    with pytest.raises(
        TypeError, match=r"k has dtype .*e2m1fn_x2; accepted: .*torch.uint8 \(NVFP4"
    ):
        flash_attn_with_kvcache(q, *codes, **scales)


@pytest.mark.simulator
def test_other_shapes_dtypes_and_functions_are_refused():
    q, cache = dense(1, 9, (4, 1))
    scales = cache.options(2)
    with pytest.raises(ValueError, match="k has head_dim 64.*accepted: 128 only"):
        flash_attn_with_kvcache(q, *(t[..., :64].contiguous() for t in cache.codes), **scales)
    with pytest.raises(ValueError, match="NVFP4, without k_block_scale; accepted: flash_attn_with"):
        flash_attn_func(q, *cache.codes)
    with pytest.raises(ValueError, match="k_block_scale given with k and v of torch.bfloat16"):
        flash_attn_with_kvcache(q, q, q, k_block_scale=cache.block_scales[0])
    with pytest.raises(TypeError, match="q has dtype torch.uint8"):
        flash_attn_with_kvcache(q.view(torch.uint8)[..., :256], *cache.codes, **scales)
    new = torch.zeros(2, 1, 1, 128, dtype=torch.uint8)
    with pytest.raises(
        ValueError, match=r"k has shape \(2, 1, 1, 128\); accepted: \(2, any, 1, 256"
    ):
        flash_attn_with_kvcache(q, *cache.codes, new, new, cache_seqlens=3, **scales)
    with pytest.raises(NotImplementedError, match="q requires gradients"):
        flash_attn_with_kvcache(q.clone().requires_grad_(), *cache.codes, **scales)
