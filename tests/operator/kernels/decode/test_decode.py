"""A few queries against many keys on Blackwell: keys as M, in one part and in several."""

from __future__ import annotations

import itertools
from dataclasses import replace

import cutlass.cute as cute
import pytest
import torch
from decode_cases import accurate, tensors
from paged_cases import Paged
from paged_cases import check as check_pages
from step_traces import table_of

import sm100_sim
from fa4_hd256 import flash_attn_func, flash_attn_varlen_func
from fa4_hd256.call.forward_problem import Problem
from fa4_hd256.call.options import Options
from fa4_hd256.kernels.blackwell.decode.config import DECODE, DecodeConfig
from fa4_hd256.kernels.blackwell.decode.kernel import DecodeKernel
from fa4_hd256.kernels.blackwell.forward.config import ForwardConfig
from fa4_hd256.kernels.proof.drain import check_drains
from fa4_hd256.softmax_emu.pattern import Ex2Pattern

pytestmark = [pytest.mark.simulator, pytest.mark.architecture("sm_100a")]


# Rows of a tile: all of them; of a group of 6 heads, padded to 8; several tiles of queries; a head
# by itself, since a group of 24 has no place in a tile.
@pytest.mark.parametrize(
    ("config", "queries", "heads"),
    [(DECODE[0], 2, (8, 1)), (DECODE[1], 4, (8, 1)), (DECODE[2], 8, (16, 2)),
     (DECODE[1], 3, (12, 2)), (DECODE[0], 5, (8, 2)), (DECODE[0], 1, (24, 1))],
    ids=lambda value: str(getattr(value, "rows", value)),
)  # fmt: skip
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.sampled("1-16-2-(8, 1)")
def test_rows_and_tiles(config, queries, heads, num_splits):
    given = tensors(queries, 450, heads)
    found = flash_attn_func(
        *given, causal=True, return_lse=True, num_splits=num_splits, config=config
    )
    accurate(found, given, causal=True)
    report = sm100_sim.last_reports()[-1 - (num_splits > 1)]
    assert report.cluster == (1, 1, 1) and report.warps("tcgen05.mma") > 0


@pytest.mark.parametrize(
    ("options", "dtype", "num_splits"),
    [({"window_size": (100, 0)}, torch.bfloat16, 1),
     ({"window_size": (70, 5), "softmax_scale": -0.1}, torch.float16, 2),
     ({"causal": True, "softcap": 20.0}, torch.bfloat16, 2),
     ({"softmax_scale": 0.0}, torch.float16, 1)],
    ids=str,
)  # fmt: skip
@pytest.mark.sampled
def test_options(options, dtype, num_splits):
    given = tensors(3, 333, (8, 1), dtype=dtype)
    sink = torch.randn(8)
    found = flash_attn_func(
        *given, return_lse=True, num_splits=num_splits, learnable_sink=sink, config=DECODE[1],
        **options,
    )  # fmt: skip
    accurate(found, given, learnable_sink=sink, **options)


@pytest.mark.sampled
def test_a_sink_where_no_key_is_seen():
    """Rows before the first key: their LSE is the sink's."""
    q, k, v = tensors(8, 5, (2, 1), batch=1)
    sink = torch.randn(2)
    found = flash_attn_func(
        q, k, v, causal=True, return_lse=True, learnable_sink=sink, config=DECODE[0]
    )
    accurate(found, (q, k, v), causal=True, learnable_sink=sink)
    assert torch.allclose(found[1][0, :, 0], sink, rtol=1e-6)


@pytest.mark.sampled
def test_padding_of_a_group():
    """Every option whose value is a head's or a query's; each row of the result is its own."""
    q, k, v = tensors(5, 300, (12, 2))
    sink, config = torch.randn(12), DECODE[2]
    found = flash_attn_func(
        q, k, v, causal=True, window_size=(150, 0), return_lse=True, learnable_sink=sink,
        config=config,
    )  # fmt: skip
    accurate(found, (q, k, v), causal=True, window_size=(150, 0), learnable_sink=sink)
    offsets = [torch.tensor(ends, dtype=torch.int32) for ends in ((0, 3, 3, 8), (0, 100, 250, 600))]
    packed = flash_attn_varlen_func(
        q.reshape(-1, 12, 256)[:8], *(t.reshape(-1, 2, 256) for t in (k, v)),
        cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], max_seqlen_q=5, max_seqlen_k=350,
        causal=True, num_splits=2, config=config,
    )  # fmt: skip
    for first, last, keys in ((0, 3, slice(0, 100)), (3, 8, slice(250, 600))):
        given = q.reshape(-1, 12, 256)[first:last], *(t.reshape(-1, 2, 256)[keys] for t in (k, v))
        alone = flash_attn_func(*(t[None] for t in given), causal=True, num_splits=2, config=config)
        assert torch.equal(packed[first:last], alone[0])


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.sampled("3")
def test_lengths_on_the_device(num_splits):
    """Each sequence uses a part of a cache, one of them nothing."""
    q, k, v = tensors(1, 257, (8, 1), batch=4)
    used = torch.tensor([257, 64, 0, 1], dtype=torch.int32)
    k[1, 64:], v[1, 64:] = 3e38, 3e38
    out, lse = flash_attn_varlen_func(
        q, k, v, seqused_k=used, causal=True, return_lse=True, num_splits=num_splits,
        config=DECODE[0],
    )  # fmt: skip
    for i, length in enumerate(used.tolist()):
        if length:
            part = q[i : i + 1], k[i : i + 1, :length], v[i : i + 1, :length]
            accurate((out[i : i + 1], lse[i : i + 1]), part, causal=True)
        else:
            assert not out[i].any() and (lse[i] == -torch.inf).all()


@pytest.mark.sampled
def test_maxima_that_grow():
    """Every step raises the maximum of some rows by more than the threshold, others never."""
    q, k, v = tensors(2, 700, (8, 1), batch=1)
    growth = torch.linspace(8, 0.05, 700)[:, None] * torch.ones(256)
    k[0, :, 0] = (growth * q[0, 0, 3].float() / 16).bfloat16()
    for threshold in (0.0, 8.0):
        config = DecodeConfig(16, rescale_threshold=threshold)
        found = flash_attn_func(q, k, v, return_lse=True, num_splits=1, config=config)
        accurate(found, (q, k, v))


@pytest.mark.sampled
def test_a_row_does_not_depend_on_the_others():
    """Each row's maximum moves by itself, though all are checked together."""
    q, k, v = tensors(1, 600, (16, 1), batch=1)
    k[0, :, 0] *= torch.linspace(3, 0.2, 600)[:, None]
    alone = flash_attn_func(q, k, v, return_lse=True, num_splits=1, config=DECODE[0])
    other = q.clone()
    other[:, :, 8:] *= torch.linspace(5, 0, 8)[:, None]
    beside = flash_attn_func(other, k, v, return_lse=True, num_splits=1, config=DECODE[0])
    assert torch.equal(alone[0][:, :, :8], beside[0][:, :, :8])
    assert torch.equal(alone[1][:, :8], beside[1][:, :8])


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.sampled
def test_polynomial_exponentials(rows):
    """The mix of both, over rows: the configured elements take the polynomial."""
    config = DecodeConfig(
        rows, half_stages=4, q_stages=1,
        ex2_pattern=Ex2Pattern(4, 2, 0, last_fragment_hardware=False),
    )  # fmt: skip
    given = tensors(rows // 8, 256, (8, 1), batch=1)
    found = flash_attn_func(*given, return_lse=True, num_splits=1, config=config)
    accurate(found, given)
    opcodes = sm100_sim.last_reports()[-1].opcodes
    assert opcodes["ex2.approx.ftz.f32"]["lanes"] == rows * 256 // 2


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.sampled
def test_both_schedulers_give_the_same_bits(num_splits, monkeypatch):
    monkeypatch.setenv("SM100_SIM_DEVICE", "b200:3")
    given = tensors(5, 400, (8, 2))
    results = [
        flash_attn_func(
            *given, causal=True, use_clc=use_clc, num_splits=num_splits, config=DECODE[0]
        )
        for use_clc in (False, True)
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize("use_clc", [False, True], ids=["static", "clc"])
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("config", DECODE, ids=lambda config: str(config.rows))
@pytest.mark.sampled
def test_no_findings(use_clc, seed, config, sanitize):
    sanitize(seed, clusters=2)
    lengths = torch.tensor([500, 0, 300], dtype=torch.int32)
    given = tensors(2, 500, (8, 1), batch=3)
    given[1][0] *= torch.linspace(3, 0.2, 500)[:, None, None]
    for num_splits in (1, 3):
        flash_attn_varlen_func(
            *given, seqused_k=lengths, causal=True, num_splits=num_splits, use_clc=use_clc,
            config=config,
        )  # fmt: skip
    for report in sm100_sim.last_reports()[-2:]:
        assert report.findings == []


@pytest.mark.sampled
def test_a_configuration_that_is_given_decides():
    given = tensors(2, 130, (4, 1))
    for config in (*DECODE, ForwardConfig()):
        problem = Problem.describe(given, Options(1.0), config=config)
        assert problem.tiles == config.tiles
    results = [flash_attn_func(*given, config=c) for c in (*DECODE, ForwardConfig())]
    for one, other in itertools.pairwise(results):
        assert (one.float() - other.float()).abs().max() < 0.02


@pytest.mark.sampled
def test_planted_bugs_are_noticed(planted, sanitize):
    """The checks above can fail: P that the tensor core may not see yet, and an O that keeps the
    scale of lower maxima."""
    sanitize(None)
    q, k, v = tensors(2, 300, (8, 1), batch=1)
    k[0, :, 0] *= torch.linspace(5, 0.1, 300)[:, None]
    call = {"num_splits": 1, "config": DECODE[0]}
    with planted.context() as bug:
        bug.setattr(cute.arch, "fence_view_async_shared", lambda: None)
        flash_attn_func(q, k, v, **call)
    findings = sm100_sim.last_reports()[-1].findings
    assert {finding.kind for finding in findings} == {"missing-proxy-fence"}
    planted.setattr(DecodeKernel, "_rescale", lambda self, *others: None)
    found = flash_attn_func(q, k, v, causal=True, return_lse=True, **call)
    assert sm100_sim.last_reports()[-1].findings == []
    with pytest.raises(AssertionError, match="max_error"):
        accurate(found, (q, k, v), causal=True)


def p_before_o(steps):
    """P is written before the product that reads the one before is done."""
    (role,) = steps.roles
    scores, before, moved, p, drained = role.acts
    return replace(steps, roles=(replace(role, acts=(scores, before, p, moved, drained)),))


def p_not_waited_for(steps):
    products = [
        replace(p, waits=tuple(use for use in p.waits if use.edge != "p_done"))
        for p in steps.products
    ]
    return replace(steps, products=tuple(products))


def q_given_back_early(steps):
    """Return the steps that give Q back by the first half of the last QK."""
    qk0, qk1, *others = steps.products
    given = tuple(use for use in qk1.commits if use.edge == "q_free")
    kept = tuple(use for use in qk1.commits if use not in given)
    qk0 = replace(qk0, commits=(*qk0.commits, *given))
    return replace(steps, products=(qk0, replace(qk1, commits=kept), *others))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [(p_before_o, "who reads P of step 0 .* finds P of step 1"),
     (p_not_waited_for, "nothing makes who reads P .* wait for this"),
     (q_given_back_early, "Q .* may overwrite q while it is in use")],
)  # fmt: skip
def test_plans_that_cannot_work_are_refused(mistake, message):
    config = DECODE[2]
    with pytest.raises(ValueError, match=message):
        check_drains("decode", config.edges, mistake(table_of(config)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"rows": 48}, "accepted are 16, 32, 64"), ({"half_stages": 2}, "at least 3"),
     ({"q_stages": 3}, "accepted are 1 and 2"), ({"half_stages": 7}, "shared memory"),
     ({"rescale_threshold": 16.0}, "accepted are 0 to 15")],
    ids=str,
)  # fmt: skip
def test_configurations_that_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        DecodeConfig(**fields)


# Boxes of a part of a page, of a page, of several; pages that divide no tile. Splits by number, or
# by length.
@pytest.mark.parametrize(
    ("page_size", "options"),
    [(16, {"num_splits": 2}), (48, {"causal": True}), (256, {"window_size": (90, 0)}),
     (64, {"batch_invariant": True})],
    ids=str,
)  # fmt: skip
@pytest.mark.sampled
def test_keys_in_pages(page_size, options):
    paged = Paged.of((700, 0, 130, 1), page_size, 2)
    q = torch.randn(4, 2, 16, 256).bfloat16()
    check_pages(q, paged, config=DECODE[0], use_clc=page_size == 16, **options)
    multiplied = [r for r in sm100_sim.last_reports()[-2:] if r.warps("tcgen05.mma")]
    assert multiplied[-1].cluster == (1, 1, 1)
