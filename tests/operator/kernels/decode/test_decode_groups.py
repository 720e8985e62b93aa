"""Blackwell's decode kernel with 64 rows: two groups of softmax warps, each with rows of its own.

What is a row's, its query, its head, its mask, its maximum, its place in the results, must be that
of the second group's rows, too.
"""

from __future__ import annotations

import cache_reference
import pytest
import torch
from decode_cases import accurate, tensors
from e4m3_cases import accurate as accurate_e4m3
from e4m3_cases import codes, exact, scales
from paged_cases import Paged, int32, offsets
from paged_cases import check as check_pages
from step_traces import assert_as_declared, attend, steps_of, traced_launches

import sm100_sim
from fa4_hd256 import flash_attn_func, flash_attn_varlen_func
from fa4_hd256.kernels.blackwell.decode.config import DECODE, DECODE_E4M3
from fa4_hd256.score_mods import alibi

pytestmark = [pytest.mark.simulator, pytest.mark.architecture("sm_100a")]

CONFIG, E4M3_CONFIG = DECODE[-1], DECODE_E4M3[-1]


@pytest.mark.parametrize("config", [CONFIG, E4M3_CONFIG], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("use_clc", [False, True], ids=["static", "dynamic"])
@pytest.mark.sampled
def test_both_groups_do_what_the_table_says(config, use_clc, monkeypatch):
    """Waits and signals of the first group's first warp and of the second one's last; tiles of two
    and three steps."""
    monkeypatch.setenv("SM100_SIM_CLUSTERS", "1")
    reports = traced_launches(monkeypatch, "b200:2")
    kv_dtype = torch.float8_e4m3fn if config.e4m3 else torch.bfloat16
    seen = attend((200, 330), True, kv_dtype=kv_dtype, config=config, use_clc=use_clc)
    tiles = steps_of(seen, config.rows, config.block_kv)[::-1]
    assert set(tiles) == {2, 3}
    assert_as_declared(reports[0], config, tiles if use_clc else tiles[::2], ctas=(0,))


# Heads of one query in both groups, the last ones of the second are padding; all of them; a query
# of 24 heads, padded, in each group; of 3 and 6 heads, padded, several queries; a head by itself.
CASES = [(1, (40, 1)), (2, (64, 1)), (2, (24, 1)), (11, (6, 2)), (8, (8, 1)), (50, (1, 1))]


@pytest.mark.parametrize(("queries", "heads"), CASES, ids=str)
@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.sampled
def test_rows_of_both_groups(queries, heads, num_splits):
    """Each head has a sink and a size of its own, and each query its keys."""
    given, sink = tensors(queries, 290, heads, batch=1), torch.randn(heads[0])
    given[0].mul_(torch.linspace(0.5, 2, heads[0])[:, None])
    found = flash_attn_func(
        *given, causal=True, learnable_sink=sink, return_lse=True, num_splits=num_splits,
        config=CONFIG,
    )  # fmt: skip
    accurate(found, given, causal=True, learnable_sink=sink)


@pytest.mark.parametrize(("queries", "heads"), [(1, (40, 1)), (8, (8, 1)), (5, (12, 2))], ids=str)
@pytest.mark.parametrize("option", ["window", "softcap", "tree", "alibi"])
@pytest.mark.sampled
def test_options(queries, heads, option):
    given = tensors(queries, 270, heads)
    mask, slopes = torch.rand(2, queries, queries) < 0.5, torch.linspace(0.01, 0.4, heads[0])
    capped = {"softcap": 20.0, "causal": True, "softmax_scale": -0.1}
    options, wanted = {
        "window": ({"window_size": (100, 2)}, {"window_size": (100, 2)}),
        "softcap": (capped, capped),
        "tree": ({"tree_mask": mask}, {"mask": cache_reference.seen_by_nodes(mask, 270)}),
        "alibi": ({"score_mod": alibi(slopes), "causal": True}, {
            "score_mod": lambda s, b, h, q, k: s
            - slopes.double()[h] * (q + 270 - queries - k).abs(),
            "causal": True,
        }),
    }[option]  # fmt: skip
    found = flash_attn_func(*given, return_lse=True, num_splits=1, config=CONFIG, **options)
    accurate(found, given, **wanted)


@pytest.mark.sampled
def test_a_step_that_one_group_does_not_see():
    """The first step's keys are those of the last four queries alone, the second group's; then
    keys that the first group does not see at all; and a tile whose second group has no query."""
    for queries, keys in ((8, 132), (8, 4), (3, 130)):
        given = tensors(queries, keys, (8, 1), batch=1)
        found = flash_attn_func(*given, causal=True, return_lse=True, num_splits=1, config=CONFIG)
        accurate(found, given, causal=True)


@pytest.mark.sampled
def test_sequences_of_fewer_queries_than_a_tile():
    lengths_q, lengths_k = (8, 3, 0, 5), (150, 40, 9, 300)
    q = torch.randn(sum(lengths_q), 8, 256).bfloat16()
    k, v = (torch.randn(sum(lengths_k), 1, 256).bfloat16() for _ in "kv")
    ends = offsets(lengths_q), offsets(lengths_k)
    for num_splits in (1, 2):
        out, lse = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], max_seqlen_q=8, max_seqlen_k=300,
            causal=True, return_lse=True, num_splits=num_splits, config=CONFIG,
        )  # fmt: skip
        for i in (0, 1, 3):
            rows, keys = (slice(*end[i : i + 2].tolist()) for end in ends)
            found = out[rows][None], lse[:, rows][None]
            accurate(found, tuple(t[None] for t in (q[rows], k[keys], v[keys])), causal=True)


@pytest.mark.parametrize("head", [3, 35])
@pytest.mark.sampled
def test_maxima_that_grow_in_one_group(head):
    """A row of one group has a new maximum in every step, and the other group's never: its bits are
    those that it has beside other rows."""
    q, k, v = tensors(1, 600, (64, 1), batch=1)
    growth = torch.linspace(8, 0.05, 600)[:, None] * torch.ones(256)
    k[0, :, 0] = (growth * q[0, 0, head].float() / 16).bfloat16()
    found = flash_attn_func(q, k, v, return_lse=True, num_splits=1, config=CONFIG)
    accurate(found, (q, k, v))
    others = slice(32, 64) if head < 32 else slice(0, 32)
    calm = q.clone()
    calm[0, 0, head] = 0
    beside = flash_attn_func(calm, k, v, return_lse=True, num_splits=1, config=CONFIG)
    assert torch.equal(found[0][:, :, others], beside[0][:, :, others])
    assert torch.equal(found[1][:, others], beside[1][:, others])


@pytest.mark.parametrize(("queries", "heads"), [(1, (40, 1)), (8, (8, 1))], ids=str)
@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.sampled
def test_e4m3(queries, heads, num_splits):
    q = tensors(queries, 1, heads, batch=1)[0] * torch.linspace(0.5, 2, heads[0])[:, None]
    keys, given = [codes(1, 290, 1, 256) for _ in "kv"], scales(1, 1)
    q = q.bfloat16()
    found = flash_attn_func(
        q, *keys, causal=True, return_lse=True, num_splits=num_splits, config=E4M3_CONFIG,
        k_descale=given[0], v_descale=given[1],
    )  # fmt: skip
    accurate_e4m3(found, q, exact(keys, given), causal=True)


@pytest.mark.sampled
def test_keys_in_pages():
    paged = Paged.of((300, 0, 130), 16, 1)
    check_pages(torch.randn(3, 1, 40, 256).bfloat16(), paged, config=CONFIG, num_splits=2)


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("config", [CONFIG, E4M3_CONFIG], ids=["bf16", "e4m3"])
@pytest.mark.sampled
def test_no_findings(config, seed, sanitize):
    """Groups that are apart: one raises its maxima in every step, the other never, over several
    tiles of a CTA."""
    sanitize(seed, clusters=2)
    q, k, v = tensors(1, 400, (40, 1), batch=3)
    q[:, :, :32] = 0
    k[0] *= torch.linspace(4, 0.1, 400)[:, None, None]
    if config.e4m3:
        k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    used = int32([400, 0, 200])
    flash_attn_varlen_func(q, k, v, seqused_k=used, num_splits=1, use_clc=True, config=config)
    assert sm100_sim.last_reports()[-1].findings == []
