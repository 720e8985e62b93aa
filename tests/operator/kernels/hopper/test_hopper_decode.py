"""A few queries against many keys on Hopper: one warpgroup's tiles, in one part and in several."""

from __future__ import annotations

import pytest
import torch
from decode_cases import accurate, tensors

import sm100_sim
from fa4_hd256 import flash_attn_func, flash_attn_varlen_func
from fa4_hd256.call.division import splits_for
from fa4_hd256.call.forward_problem import Problem
from fa4_hd256.call.options import Options
from fa4_hd256.gpus.devices import gpu_of
from fa4_hd256.kernels.hopper.forward.config import DECODE, ForwardConfig
from fa4_hd256.run.catalogue import forward_spec

pytestmark = pytest.mark.simulator


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setenv("FA4_HD256_ARCH", "sm_90a")


# (queries, heads): the rows of a tile, 16 of 64; all of them; of groups of 3 and 6 heads, padded to
# 4 and 8, with all rows of a tile taken or not.
@pytest.mark.parametrize(
    ("queries", "heads", "rows"),
    [(1, (16, 1), 16), (4, (32, 2), 64), (5, (3, 1), 15), (8, (12, 2), 48), (1, (5, 1), 5)],
    ids=str,
)
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.sampled("1-4-(32, 2)-64")
def test_rows_of_one_warpgroup(queries, heads, rows, num_splits):
    given = tensors(queries, 300, heads)
    problem = Problem.describe(given, Options(1.0))
    assert problem.tiles == DECODE.tiles and problem.packed_heads * queries == rows
    found = flash_attn_func(*given, causal=True, return_lse=True, num_splits=num_splits)
    accurate(found, given, causal=True)
    report = sm100_sim.last_reports()[-1 - (num_splits > 1)]
    assert report.cluster == (1, 1, 1) and report.warps("wgmma.mma_async") > 0


def test_calls_of_more_rows_get_the_tiles_of_two():
    for queries, heads, tiles in ((5, (16, 1), ForwardConfig()), (65, (1, 1), ForwardConfig()),
                                  (64, (1, 1), DECODE)):  # fmt: skip
        found = Problem.describe(tensors(queries, 70, heads), Options(1.0))
        assert found.tiles == tiles.tiles


def test_groups_that_do_not_divide_a_tile():
    """Groups share a tile while their padded rows fit; else each head has tiles of its own."""
    for queries, heads, packed, of_tile in ((8, (12, 2), 6, 8), (9, (12, 2), 1, 64),
                                            (1, (40, 8), 5, 8), (65, (12, 2), 1, 128)):  # fmt: skip
        found = Problem.describe(tensors(queries, 70, heads), Options(1.0))
        assert (found.packed_heads, found.tile_queries) == (packed, of_tile)


@pytest.mark.sampled
def test_padding_of_a_group():
    """Every option whose value is a head's or a query's; each row of the result is its own."""
    q, k, v = tensors(5, 300, (12, 2))
    sink = torch.randn(12)
    found = flash_attn_func(
        q, k, v, causal=True, window_size=(150, 0), return_lse=True, learnable_sink=sink
    )
    accurate(found, (q, k, v), causal=True, window_size=(150, 0), learnable_sink=sink)
    offsets = [torch.tensor(ends, dtype=torch.int32) for ends in ((0, 3, 3, 8), (0, 100, 250, 600))]
    packed = flash_attn_varlen_func(
        q.reshape(-1, 12, 256)[:8], *(t.reshape(-1, 2, 256) for t in (k, v)),
        cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], max_seqlen_q=5, max_seqlen_k=350,
        causal=True, num_splits=2,
    )  # fmt: skip
    for first, last, keys in ((0, 3, slice(0, 100)), (3, 8, slice(250, 600))):
        given = q.reshape(-1, 12, 256)[first:last], *(t.reshape(-1, 2, 256)[keys] for t in (k, v))
        alone = flash_attn_func(*(t[None] for t in given), causal=True, num_splits=2)
        assert torch.equal(packed[first:last], alone[0])


@pytest.mark.sampled
def test_a_configuration_that_is_given_decides():
    given = tensors(2, 130, (4, 1))
    problem = Problem.describe(given, Options(1.0), config=ForwardConfig())
    assert problem.tiles == ForwardConfig().tiles
    results = [
        flash_attn_func(*given, config=config, num_splits=2)
        for config in (None, DECODE, ForwardConfig(ctas=1), ForwardConfig(ctas=2))
    ]
    assert torch.equal(results[0], results[1])
    for result in results[2:]:
        assert (result.float() - results[0].float()).abs().max() < 0.02


@pytest.mark.parametrize(
    "options",
    [{"window_size": (100, 0)}, {"causal": True, "softcap": 20.0}, {"softmax_scale": -0.1}],
    ids=str,
)
@pytest.mark.sampled
def test_options(options):
    given = tensors(3, 333, (8, 1))
    sink = torch.randn(8)
    found = flash_attn_func(*given, return_lse=True, num_splits=2, learnable_sink=sink, **options)
    accurate(found, given, learnable_sink=sink, **options)


@pytest.mark.sampled
def test_lengths_on_the_device():
    """Each sequence uses a part of a cache, one of them nothing."""
    q, k, v = tensors(1, 257, (8, 1), batch=4)
    used = torch.tensor([257, 64, 0, 1], dtype=torch.int32)
    k[1, 64:], v[1, 64:] = float("nan"), float("nan")
    out, lse = flash_attn_varlen_func(
        q, k, v, seqused_k=used, causal=True, return_lse=True, num_splits=3
    )
    for i, length in enumerate(used.tolist()):
        if length:
            part = q[i : i + 1], k[i : i + 1, :length], v[i : i + 1, :length]
            accurate((out[i : i + 1], lse[i : i + 1]), part, causal=True)
        else:
            assert not out[i].any() and (lse[i] == -torch.inf).all()


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.sampled
def test_both_schedulers_give_the_same_bits(num_splits, monkeypatch):
    monkeypatch.setenv("SM100_SIM_DEVICE", "h200:3")
    given = tensors(2, 400, (8, 2))
    results = [
        flash_attn_func(*given, causal=True, use_clc=use_clc, num_splits=num_splits)
        for use_clc in (False, True)
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize("use_clc", [False, True], ids=["static", "counter"])
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.sampled
def test_no_findings(use_clc, seed, sanitize):
    sanitize(seed, clusters=2)
    given = tensors(2, 500, (8, 1))
    flash_attn_func(*given, causal=True, num_splits=3, use_clc=use_clc)
    first, second = sm100_sim.last_reports()[-2:]
    assert first.findings == second.findings == []


# (batch, keys, heads, queries): parts by the rule, and why.
@pytest.mark.parametrize(
    ("batch", "keys", "heads", "queries", "parts"),
    [
        # HBM bounds all of them together: uneven waves of tiles cost nothing.
        (128, 131072, (32, 2), 4, 1), (64, 8192, (32, 2), 1, 1),
        # All SMs, though half of them take in what HBM gives; between, pairs of SMs differ.
        (32, 131072, (32, 2), 1, 2), (8, 8192, (16, 2), 1, 8), (8, 8192, (16, 2), 4, 8),
        (1, 131072, (32, 2), 1, 64), (1, 131072, (32, 2), 4, 64), (64, 16384, (32, 2), 1, 1),
        # Short parts: the more rows, the more their results take.
        (1, 8192, (32, 2), 1, 64), (1, 8192, (32, 2), 4, 32),
    ],
)  # fmt: skip
def test_parts_of_the_keys(batch, keys, heads, queries, parts):
    one = torch.zeros(1, dtype=torch.bfloat16)
    q, k = (one.expand(batch, *size, 256) for size in ((queries, heads[0]), (keys, heads[1])))
    problem = Problem.describe((q, k, k), Options.check(None, True, (None, None), 0.0))
    assert splits_for(problem, gpu_of(torch.device("cpu"))) == parts


# (queries, keys, heads, causal): KV splits of a tile of 128 rows by the rule.
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "causal", "parts"),
    [
        # Steps of 64 keys under a mask, of 80 without, of 64 where fewer keys would be wasted.
        (100, 2048, (8, 8), True, 11), (100, 2048, (8, 8), False, 13),
        (64, 1024, (8, 1), True, 8), (16, 2048, (16, 2), True, 16), (100, 512, (8, 8), False, 1),
    ],
)  # fmt: skip
def test_splits_are_counted_in_steps_of_the_kernel_that_runs(queries, keys, heads, causal, parts):
    one, where = torch.zeros(1, dtype=torch.bfloat16), gpu_of(torch.device("cpu"))
    q, k = (one.expand(1, *size, 256) for size in ((queries, heads[0]), (keys, heads[1])))
    problem = Problem.describe((q, k, k), Options.check(None, causal, (None, None), 0.0))
    assert forward_spec(problem, where).config.tiles == problem.tiles
    assert splits_for(problem, where) == parts
