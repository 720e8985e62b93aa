"""Keys and values in e4m3 against float64: masks, options, scales, pages, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from e4m3_cases import E4M3, accurate, codes, exact, scales
from paged_cases import Paged, offsets

import sm100_sim
from fa4_hd256 import flash_attn_func, flash_attn_varlen_func, masks
from fa4_hd256.architectures import named
from fa4_hd256.check import reference
from fa4_hd256.kernels.kernel_set import kernels_of

pytestmark = pytest.mark.simulator

ROWS = (16, 32, 64)


def config_of(architecture, rows):
    """The configuration of tiles of so many rows."""
    kernels = kernels_of(named(architecture))
    tiles = next(t for t in kernels.forward_tiles(kv_dtype=E4M3) if t.rows == rows)
    return kernels.tuned(tiles, False, 1, "", False)


def dense(queries, keys, heads, batch=2, dtype=torch.bfloat16):
    q = torch.randn(batch, queries, heads[0], 256).to(dtype)
    return q, *(codes(batch, keys, heads[1], 256) for _ in "kv")


def attend(q, k, v, given=None, **options):
    named = {} if given is None else dict(zip(("k_descale", "v_descale"), given))
    return flash_attn_func(q, k, v, return_lse=True, **named, **options)


MASKS = [{}, {"causal": True}, {"window_size": (100, 0)}, {"window_size": (70, 5)},
         {"window_size": (None, 9)}]  # fmt: skip


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.sampled
def test_masks(mask, num_splits):
    """Scales of sequences and KV heads."""
    q, *keys = dense(3, 333, (8, 2))
    given = scales(2, 2)
    found = attend(q, *keys, given, num_splits=num_splits, **mask)
    accurate(found, q, exact(keys, given), **mask)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [({"softmax_scale": -0.1}, torch.float16), ({"softcap": 20.0, "causal": True}, torch.bfloat16),
     ({"softmax_scale": 0.0}, torch.float16), ({"window_size": (90, 0)}, torch.float16)],
    ids=str,
)  # fmt: skip
@pytest.mark.sampled
def test_options(options, dtype):
    """A sink and one scale for all are tested, too."""
    q, *keys = dense(2, 260, (16, 2), dtype=dtype)
    given, sink = scales(1), torch.randn(16)
    found = attend(q, *keys, given, num_splits=2, learnable_sink=sink, **options)
    accurate(found, q, exact(keys, given), learnable_sink=sink, **options)


# Rows of a tile: 16, 32, 64 by the queries and heads; a group of 6, padded to 8; a head by itself;
# several tiles of queries, as in prefill: with three heads of a group, which no tile holds, each
# head has its own.
@pytest.mark.parametrize(
    ("queries", "heads", "rows"),
    [(1, (8, 1), 16), (4, (8, 1), 32), (3, (12, 2), 32), (8, (8, 1), 64), (1, (24, 1), 32),
     (20, (6, 2), 32), (70, (2, 2), 64)],
    ids=str,
)  # fmt: skip
@pytest.mark.sampled
def test_rows_and_tiles(queries, heads, rows, architecture):
    q, *keys = dense(queries, 290, heads, batch=1)
    given = scales(1, heads[1])
    found = attend(q, *keys, given, causal=True)
    accurate(found, q, exact(keys, given), causal=True)
    mma = {"sm_100a": "tcgen05.mma", "sm_90a": f"wgmma.mma_async.sync.aligned.m64n{rows}k16."}
    report = next(
        r for r in reversed(sm100_sim.last_reports()[-2:])
        if any(opcode.startswith(mma[architecture]) for opcode in r.opcodes)
    )  # fmt: skip
    assert report.opcodes["cvt.rn.f16x2.e4m3x2"]["warps"] > 0


@pytest.mark.parametrize("given", [None, 1, "sequences", "expanded", "columns"])
@pytest.mark.sampled
def test_forms_of_scales(given):
    """Scales are None; one value; of sequences and heads: as they are, expanded, of any strides."""
    q, *keys = dense(1, 200, (8, 2), batch=3)
    both = {
        None: None, 1: scales(()), "sequences": scales(3, 2),
        "expanded": tuple(t.expand(3, 2) for t in scales(1, 2)),
        "columns": tuple(t.T for t in scales(2, 3)),
    }[given]  # fmt: skip
    accurate(attend(q, *keys, both), q, exact(keys, both))


def paged_of(lengths, page_size, heads, **options):
    return Paged.of(lengths, page_size, heads, dtype=E4M3, **options)


def check_paged(q, paged, given, of_pages, lengths_q=None, **options):
    """One call against the reference of each sequence."""
    k, v = (t.clone() for t in (paged.k, paged.v))
    named = {}
    if lengths_q:
        named = {"cu_seqlens_q": offsets(lengths_q), "max_seqlen_q": max(lengths_q)}
    out, lse = flash_attn_varlen_func(
        q, k, v, seqused_k=paged.used, page_table=paged.table, return_lse=True,
        k_descale=given[0], v_descale=given[1], **named, **options,
    )  # fmt: skip
    wanted = {name: options[name] for name in options if name in ("causal", "window_size")}
    starts = [0, *torch.tensor(lengths_q or []).cumsum(0).tolist()]
    for row, length in enumerate(paged.lengths):
        pages = paged.table[row, : -(-length // k.shape[1])].long()
        values = []
        for cache, scale in zip((k, v), given):
            of_page = scale[pages] if of_pages else scale[row].expand(len(pages), -1)
            rows = reference.dequantised(cache[pages], of_page)
            values.append(rows.flatten(0, 1)[None, :length])
        if lengths_q:
            rows = slice(starts[row], starts[row + 1])
            of = q[rows][None], out[rows][None], lse[:, rows][None]
        else:
            of = q[row : row + 1], out[row : row + 1], lse[row : row + 1]
        accurate(of[1:], of[0], values, **wanted)


# Boxes of a part of a page, of a page, of several; pages that divide no tile.
@pytest.mark.parametrize(
    ("page_size", "options"),
    [(16, {"causal": True, "num_splits": 2}), (48, {"causal": True, "use_clc": True}),
     (256, {"window_size": (90, 0)}), (64, {"batch_invariant": True, "causal": True})],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("of_pages", [False, True], ids=["sequences", "pages"])
@pytest.mark.sampled("pages-16-*")
def test_pages(page_size, options, of_pages):
    check_scaled_pages(page_size, options, of_pages)


# Rows that are gathered.
@pytest.mark.parametrize(
    ("page_size", "options"),
    [(1, {"num_splits": 2}), (5, {"causal": True, "use_clc": True}), (8, {"window_size": (90, 0)})],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("of_pages", [False, True], ids=["sequences", "pages"])
@pytest.mark.sampled
def test_pages_of_any_size(page_size, options, of_pages):
    check_scaled_pages(page_size, options, of_pages)


def check_scaled_pages(page_size, options, of_pages):
    """Scales of pages that nobody has are NaN, those of others far apart."""
    paged = paged_of((700, 0, 130, 1), page_size, 2)
    q = torch.randn(4, 2, 8, 256).bfloat16()
    if of_pages:
        given = scales(len(paged.k), 2)
        used = [p for row, n in zip(paged.table, paged.lengths) for p in row[: -(-n // page_size)]]
        for scale in given:
            scale *= 2.0 ** torch.randint(-4, 4, scale.shape)
            unused = torch.ones(len(scale), dtype=torch.bool)
            unused[torch.stack(used).long()] = False
            scale[unused] = torch.nan
    else:
        given = scales(4, 2)
    check_paged(q, paged, given, of_pages, **options)


@pytest.mark.sampled
def test_chunks_of_prompts_and_decoding_in_one_batch():
    paged = paged_of((200, 333, 90), 32, 1)
    lengths = [40, 1, 90]
    q = torch.randn(sum(lengths), 4, 256).bfloat16()
    check_paged(q, paged, scales(len(paged.k), 1), True, lengths, causal=True)


@pytest.mark.parametrize("of_pages", [False, True])
@pytest.mark.sampled
def test_scales_of_any_size(of_pages):
    """V's pages are tiny beside huge ones; K's scales leave scores what they are."""
    paged = paged_of((300,), 16, 1)
    q = torch.randn(1, 1, 16, 256).bfloat16()
    pages = len(paged.k)
    factor = 2.0 ** torch.linspace(-40, 40, pages)[:, None] if of_pages else torch.tensor([[1e-12]])
    given = torch.ones(pages if of_pages else 1, 1), factor
    out = flash_attn_varlen_func(
        q, paged.k, paged.v, seqused_k=paged.used, page_table=paged.table, k_descale=given[0],
        v_descale=given[1],
    )  # fmt: skip
    wide = flash_attn_varlen_func(
        q, paged.k, paged.v, seqused_k=paged.used, page_table=paged.table, k_descale=given[0],
        v_descale=given[1] * 2.0**3,
    )  # fmt: skip
    assert out.isfinite().all() and out.any()
    # Scales of powers of two: the same bits, eight times.
    assert ((wide.float() - 8 * out.float()).abs() <= 2**-7 * wide.float().abs()).all()


@pytest.mark.sampled
def test_queries_of_any_size():
    """Each row has a scale of its own: 2^-60 beside 2^12."""
    q, *keys = dense(1, 150, (8, 1), batch=1)
    given = torch.tensor([1.0]), torch.tensor([1.0])
    alone = attend(q, *keys, given)
    size = torch.tensor([2.0**-60, 1, 2.0**12, 1, 1, 1, 2.0**-120, 1])
    for head in (1, 3, 4, 5, 7):
        beside = attend((q * size[:, None]).bfloat16(), *keys, given)
        assert torch.equal(beside[0][:, :, head], alone[0][:, :, head])
    assert beside[0].isfinite().all()
    mean = reference.dequantised(keys[1], None).mean(1)
    assert (beside[0][0, 0, 0].double() - mean[0, 0]).abs().max() < 2e-3


@pytest.mark.sampled
def test_nan_and_infinity_come_through():
    """A code that is NaN, in K or V; a row of Q with an infinity: NaN in the rows that see it."""
    q, k, v = dense(2, 140, (8, 2), batch=1)
    clean, _ = attend(q, k, v, causal=True)
    for which in range(2):
        keys = [k.clone(), v.clone()]
        keys[which].view(torch.uint8)[0, 139, 1, 7] = 0xFF if which else 0x7F
        out, _ = attend(q, *keys, causal=True)
        # The last key is the last query's alone, and of its own KV head.
        assert torch.equal(out[0, :, :4], clean[0, :, :4])
        assert out[0, 1, 4:, 7].isnan().all()
        if not which:
            assert torch.equal(out[0, 0], clean[0, 0]) and out[0, 1, 4:].isnan().all()
    wild = q.clone()
    wild[0, 0, 3, 5] = torch.inf
    out, _ = attend(wild, k, v, causal=True)
    assert out[0, 0, 3].isnan().all()
    out[0, 0, 3] = clean[0, 0, 3]
    assert torch.equal(out, clean)


@pytest.mark.sampled
def test_maxima_that_grow():
    q, k, v = dense(2, 700, (8, 1), batch=1)
    growth = torch.linspace(8, 0.05, 700)[:, None] * torch.ones(256)
    k[0, :, 0] = (growth * q[0, 0, 3].float() / 16).to(E4M3)
    accurate(attend(q, k, v, num_splits=1), q, exact((k, v), None))


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.sampled
def test_both_schedulers_give_the_same_bits(num_splits, monkeypatch, architecture):
    monkeypatch.setenv("SM100_SIM_DEVICE", f"{named(architecture).simulated}:3")
    given, scales_of_both = dense(5, 400, (8, 2)), scales(2, 2)
    results = [
        attend(*given, scales_of_both, causal=True, use_clc=use_clc, num_splits=num_splits)[0]
        for use_clc in (False, True)
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize("use_clc", [False, True], ids=["static", "clc"])
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.sampled
def test_no_findings(use_clc, seed, rows, sanitize, architecture):
    sanitize(seed, clusters=2)
    config = config_of(architecture, rows)
    paged = paged_of((300, 0, 200), 64, 1)
    q, given = torch.randn(3, 2, 8, 256).bfloat16(), scales(len(paged.k), 1)
    paged.k[paged.table[0, 0]] = (paged.k[paged.table[0, 0]].float() * 3).to(E4M3)
    for num_splits in (1, 3):
        flash_attn_varlen_func(
            q, paged.k, paged.v, seqused_k=paged.used, page_table=paged.table, causal=True,
            num_splits=num_splits, use_clc=use_clc, config=config, k_descale=given[0],
            v_descale=given[1],
        )  # fmt: skip
    for report in sm100_sim.last_reports()[-2:]:
        assert report.findings == []


def one(shape=(1,), dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [({"k_descale": one()}, ValueError, "k_descale given alone; accepted: k_descale and v_descale"),
     ({"k_descale": one(dtype=torch.float16), "v_descale": one()}, TypeError,
      "k_descale has dtype torch.float16; accepted: torch.float32"),
     ({"k_descale": 1.0, "v_descale": one()}, TypeError, "k_descale must be a float32 tensor"),
     ({"k_descale": one((2, 3)), "v_descale": one()}, ValueError,
      r"k_descale has shape \(2, 3\); accepted: one value, or \(2, 1\)"),
     ({"k_descale": 0 * one(), "v_descale": one()}, ValueError,
      "k_descale has a factor of 0.0; accepted: finite numbers greater than 0"),
     ({"k_descale": one(), "v_descale": -one((2, 1))}, ValueError, "v_descale has a factor of -1"),
     ({"k_descale": one(), "v_descale": math.inf * one()}, ValueError, "a factor of inf"),
     ({"k_descale": math.nan * one(), "v_descale": one()}, ValueError, "a factor of nan"),
     ({"v": torch.zeros(2, 9, 1, 256, dtype=torch.bfloat16)}, TypeError, "share one dtype"),
     ({"q": torch.zeros(2, 1, 4, 256).to(torch.float8_e5m2)}, TypeError, "q has dtype .*e5m2"),
     ({"k": torch.zeros(2, 9, 1, 256).to(torch.float8_e5m2)}, TypeError, "k has dtype .*e5m2")],
    ids=str,
)  # fmt: skip
def test_what_is_refused(change, error, message):
    q, k, v = dense(1, 9, (4, 1))
    with pytest.raises(error, match=message):
        flash_attn_func(**{"q": q, "k": k, "v": v} | change)


def test_configurations_of_other_types_are_refused(architecture, forward_config):
    q, k, v = dense(1, 9, (4, 1))
    with pytest.raises(ValueError, match="config is for k and v of the dtype that of q"):
        flash_attn_func(q, k, v, config=forward_config())
    with pytest.raises(ValueError, match="config is for k and v of the dtype torch.float8_e4m3fn"):
        flash_attn_func(q, q, q, config=config_of(architecture, 16))


def test_scales_of_other_tensors_are_refused():
    q = torch.zeros(2, 1, 4, 256, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="given with k and v of torch.bfloat16"):
        flash_attn_func(q, q, q, k_descale=one(), v_descale=one())


def test_block_masks_are_refused():
    q, *keys = dense(2, 9, (4, 1))
    with pytest.raises(NotImplementedError, match="block_mask: .*q, k and v in torch.bfloat16"):
        flash_attn_func(q, *keys, block_mask=masks.prefix_lm(1, 2, 9))


def test_gradients_are_refused():
    q, k, v = dense(1, 9, (4, 1))
    with pytest.raises(NotImplementedError, match="q, k and v in float8"):
        flash_attn_func(q.requires_grad_(), k, v)
