"""Forwards whose KV tiles are split over several CTA pairs, against the float64 reference.

The mask of a call and the kind of its scores are compiled in, its lengths are not: the tests share
few kinds of calls, each with every number of parts.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from backward_cases import accurate as accurate_gradients
from backward_cases import gradients, inputs
from gpus import gpu
from paged_cases import accurate, int32, offsets

from fa4_hd256 import flash_attn_func, flash_attn_varlen_func
from fa4_hd256.call.division import divided, splits_for
from fa4_hd256.call.forward_problem import Problem
from fa4_hd256.call.options import BY_RULE, Options
from fa4_hd256.check import reference
from fa4_hd256.gpus.devices import gpu_of
from fa4_hd256.kernels.blackwell.forward.config import ForwardConfig
from fa4_hd256.run import compile
from fa4_hd256.run.catalogue import forward_spec
from fa4_hd256.run.compile import compile_kernel

LSE_TOLERANCE = 1e-3
#: Query heads over KV heads: the 8 of a group share tiles of 32 queries.
HEADS = (8, 1)
#: A group of 3, which does not divide a CTA's rows, so that each head has tiles of its own.
THREE = (3, 1)


def check(tensors, num_splits, use_clc=False, **options):
    out, lse = flash_attn_func(
        *tensors, **options, num_splits=num_splits, use_clc=use_clc, return_lse=True
    )
    q = tensors[0]
    assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1]) and lse.dtype == torch.float32
    accurate(out, lse, tensors, **options)
    return out, lse


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# Decoding steps of 2 sequences; two tiles of queries over 5 KV tiles, which 3 does not divide; more
# splits than KV tiles.
@pytest.mark.parametrize(
    ("lengths", "heads", "batch", "num_splits"),
    [((1, 700), (16, 2), 2, 2), ((300, 520), (1, 1), 1, 3), ((7, 130), HEADS, 1, 32)],
)
@pytest.mark.sampled("static-lengths1-heads1-1-3")
def test_full(lengths, heads, batch, num_splits, use_clc, device):
    check(inputs(lengths, heads, batch, device=device), num_splits, use_clc)


@pytest.mark.architecture("sm_100a")
@pytest.mark.simulator
@pytest.mark.parametrize("clusters", [1, 4])
@pytest.mark.sampled
def test_the_same_bits_under_both_schedulers(clusters, monkeypatch):
    """6 parts of tiles, on CTA pairs enough for all and on few, which take one after the other."""
    import sm100_sim

    tensors = inputs((40, 520), HEADS)
    options = {"num_splits": 3, "return_lse": True}
    expected = flash_attn_func(*tensors, **options, use_clc=False)
    # For the grid of the static scheduler, and for what the machine of the dynamic one holds.
    monkeypatch.setenv("SM100_SIM_DEVICE", f"b200:{2 * clusters}")
    monkeypatch.setenv("SM100_SIM_CLUSTERS", str(clusters))
    for use_clc in (False, True):
        assert same(expected, flash_attn_func(*tensors, **options, use_clc=use_clc))
        forward, combine = sm100_sim.last_reports()[-2:]
        assert forward.grid == (2 * (6 if use_clc else clusters), 1, 1)
        assert forward.clc["stolen"] == (6 - clusters if use_clc else 0)
        assert combine.grid == (40 * 8 // 4, 1, 1)


# More parts than KV tiles, so that some are empty; the diagonal alone; rows that see nothing on
# either side; as good as unbounded.
WINDOWS = [
    ((520, 900), (200, 50), 3),
    ((300, 600), (5, 3), 7),
    ((150, 150), (0, 0), 2),
    ((300, 200), (30, 0), 2),
    ((20, 600), (10**9, 10**9), 4),
]


def no_sink(device):
    return {"learnable_sink": torch.full((3,), -math.inf, device=device)}


@pytest.mark.parametrize(("lengths", "window", "num_splits"), WINDOWS)
@pytest.mark.sampled("lengths2-window2-2")
def test_windows(lengths, window, num_splits, device):
    """A sink of -inf is none."""
    check(inputs(lengths, THREE, device=device), num_splits, window_size=window, **no_sink(device))


def test_a_sink_of_infinity(device):
    """Only the first split has the sink, and takes all of the weight."""
    sink = torch.tensor((math.inf, 0.5, math.inf), device=device)
    tensors = inputs((270, 250), THREE, device=device)
    options = {"window_size": (150, 0), "learnable_sink": sink, "return_lse": True}
    out, lse = flash_attn_func(*tensors, num_splits=2, **options)
    assert (out[:, :, ::2] == 0).all() and (lse[:, ::2] == math.inf).all()
    assert out[:, 20:, 1].isfinite().all() and lse[:, 1].isfinite().all()


# Like the scores and none; far above all scores and far below.
@pytest.mark.parametrize(
    ("logits", "num_splits"), [((0.5, -2.0, -math.inf), 12), ((200.0, 5.0, -300.0), 2)]
)
@pytest.mark.sampled("logits0-12")
def test_sinks(logits, num_splits, device):
    """Rows 0 to 19 see no key: their LSE is the sink's logit."""
    sink = torch.tensor(logits, device=device)
    tensors = inputs((270, 250), THREE, device=device)
    out, lse = check(tensors, num_splits, window_size=(150, 0), learnable_sink=sink)
    assert (out[:, :20] == 0).all()
    assert torch.allclose(lse[..., :20], sink[:, None].expand(3, 20), rtol=1e-6)


def check_packed(lengths_q, lengths_k, num_splits, device):
    """Causal packed sequences against the reference of each; returns (out, lse)."""
    q = torch.randn(sum(lengths_q), 2, 256).to(device, torch.bfloat16)
    k, v = (torch.randn(sum(lengths_k), 1, 256).to(device, torch.bfloat16) for _ in "kv")
    out, lse = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=offsets(lengths_q, device), cu_seqlens_k=offsets(lengths_k, device),
        max_seqlen_q=max(*lengths_q, 1), max_seqlen_k=max(*lengths_k, 1), causal=True,
        return_lse=True, num_splits=num_splits, use_clc=False,
    )  # fmt: skip
    assert out.shape == q.shape and lse.shape == (2, q.shape[0])
    start_q = start_k = 0
    for n, m in zip(lengths_q, lengths_k, strict=True):
        rows, keys = slice(start_q, start_q + n), slice(start_k, start_k + m)
        part = (q[rows][None], k[keys][None], v[keys][None])
        accurate(out[rows][None], lse[:, rows][None], part, causal=True)
        start_q, start_k = start_q + n, start_k + m
    return out, lse


# Zero lengths on either side and both, first and last; fewer keys than queries, so that whole tiles
# see none; decoding.
@pytest.mark.parametrize(
    ("lengths_q", "lengths_k", "num_splits"),
    [
        ((300, 5, 0, 129), (200, 700, 33, 0), 3),
        ((0, 256, 0), (0, 256, 7), 2),
        ((1, 1, 100, 33), (1, 900, 50, 33), 5),
    ],
)
@pytest.mark.sampled("lengths_q1-lengths_k1-2")
def test_packed_sequences(lengths_q, lengths_k, num_splits, device):
    check_packed(lengths_q, lengths_k, num_splits, device)


@pytest.mark.sampled
def test_packed_keys_without_any_row(device):
    out, lse = check_packed((5, 0, 2), (0, 0, 0), 3, device)
    assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("num_splits", [2, 5])
@pytest.mark.sampled
def test_a_nan_key_reaches_the_rows_that_see_it(num_splits, device):
    """Rows 20 to 60 see key 550; all others keep their bits."""
    q, k, v = inputs((70, 600), THREE, device=device)
    options = {"num_splits": num_splits, "use_clc": False, "return_lse": True, **no_sink(device)}
    clean = flash_attn_func(q, k, v, window_size=(40, 0), **options)
    k[:, 550] = math.nan
    out, lse = flash_attn_func(q, k, v, window_size=(40, 0), **options)
    sees = torch.zeros(1, 70, 3, dtype=torch.bool, device=device)
    sees[:, 20:61] = True
    assert torch.equal(out.isnan(), sees[..., None].expand_as(out))
    assert torch.equal(lse.isnan(), sees.transpose(1, 2))
    assert torch.equal(out[~sees], clean[0][~sees])
    assert torch.equal(lse[~sees.transpose(1, 2)], clean[1][~sees.transpose(1, 2)])


@pytest.mark.parametrize("num_splits", [1, 2, 3])
@pytest.mark.sampled("2", "3")
def test_a_nan_value_counts_however_little_its_part_weighs(num_splits, device):
    """Key 10 has a score 320 above all others, so that the weight of every other part is 0."""
    shapes = ((70, 3), (600, 1), (600, 1))
    q, k, v = (torch.zeros(1, *shape, 256).to(device, torch.bfloat16) for shape in shapes)
    q[..., 0], k[:, 10, :, 0] = 64.0, 80.0
    v[:, 520, :, 3] = math.nan
    out, lse = flash_attn_func(
        q, k, v, num_splits=num_splits, use_clc=False, window_size=(1000, 0), return_lse=True,
        **no_sink(device),
    )  # fmt: skip
    sees = torch.zeros(256, dtype=torch.bool, device=device)
    sees[3] = True
    assert torch.equal(out.isnan(), sees.expand_as(out)) and not lse.isnan().any()


@pytest.mark.parametrize("num_splits", [2, 3])
@pytest.mark.sampled
def test_infinite_scores(num_splits, device):
    """A score of +inf makes its row NaN; one of -inf is that of a key that counts for nothing."""
    q, k, v = inputs((30, 300), THREE, device=device)
    k[:, 275, :, 7] = math.inf
    options = {"window_size": (200, 0), **no_sink(device)}
    out, lse = flash_attn_func(
        q, k, v, num_splits=num_splits, use_clc=False, return_lse=True, **options
    )
    sees = (torch.arange(30, device=device) >= 5)[None, :, None]
    spoiled = sees & (q[..., 7] > 0)
    assert torch.equal(out.isnan(), spoiled[..., None].expand_as(out))
    assert torch.equal(lse.isnan(), spoiled.transpose(1, 2))
    wanted, total = reference.attention(q, k, v, **options)
    kept = ~spoiled.cpu()
    assert (sees & ~spoiled).any() and (out.cpu()[kept] - wanted[kept]).abs().max() < 2**-8
    kept = kept.transpose(1, 2)
    assert (lse.cpu()[kept] - total[kept]).abs().max() < LSE_TOLERANCE


def test_gradients(device):
    """The backward takes out and LSE of a split forward as of any other."""
    tensors = inputs((150, 300), THREE, device=device)
    dout, dlse = torch.randn_like(tensors[0]), torch.randn(1, 3, 150, device=device)
    found = gradients(tensors, dout, dlse, num_splits=3, use_clc=False)
    accurate_gradients(found, tensors, dout, dlse)


def describe(lengths, heads=(1, 1), batch=1, window=(None, None), config=None, **ragged):
    """The problem of a call whose tensors take no memory. config: of the forward."""
    longest = {name: ragged.pop(name, None) for name in ("max_seqlen_q", "max_seqlen_k")}
    number = torch.zeros((), dtype=torch.bfloat16)
    q, k = (number.expand(batch, s, h, 256) for s, h in zip(lengths, heads, strict=True))
    options = Options.check(None, False, window, 0.0)
    return Problem.describe((q, k, k), options, None, ragged, **longest, config=config)


# A query tile is 256 rows, queries times the heads that share it, a step 128 keys; a part costs its
# steps, one beside and a step for every 4500 rows, and splitting must save 5.
@pytest.mark.architecture("sm_100a")
@pytest.mark.parametrize(
    ("lengths", "options", "clusters", "splits"),
    [
        # 16 tiles, so 4 of 74 pairs for each: 16 steps become 4.
        ((1, 2048), {"heads": (16, 2), "batch": 8}, 74, 4),
        # 37 for each of 2 tiles, but no more than the steps, nor than 64.
        ((1, 2048), {"heads": (16, 2)}, 74, 16),
        ((1, 32768), {"heads": (16, 2)}, 74, 37),
        ((1, 32768), {"heads": (8, 1)}, 74, 64),
        # 7 for each of 10 tiles; the longest of 7 has 3 of 16 steps; 6 are enough.
        ((1, 2048), {"batch": 10}, 74, 6),
        # A group of 3 shares nothing: 12 tiles. 32 queries of 8 heads are one tile, 33 are two.
        ((1, 4096), {"heads": (12, 4)}, 74, 6),
        ((32, 32768), {"heads": (8, 1), "batch": 4}, 74, 18),
        ((33, 32768), {"heads": (8, 1), "batch": 4}, 74, 9),
        # 37 tiles leave a second pair for each: 17 for 33. 38 do not, but with three splits two
        # waves of 12 do for one of 33. 74 tiles leave no pair idle, 90 do in a second wave: 66, or
        # five waves of 9. But tiles of more than one block of queries may differ.
        ((1, 4096), {"batch": 37}, 74, 2),
        ((1, 4096), {"batch": 38}, 74, 3),
        ((1, 4096), {"batch": 74}, 74, 1),
        ((1, 4096), {"batch": 90}, 74, 4),
        ((1, 32768), {"batch": 90}, 74, 4),
        ((256, 32768), {"batch": 90}, 74, 4),
        ((257, 32768), {"batch": 90}, 74, 1),
        # Nine splits would be done after 4 waves of 30 steps instead of 129, but 8192 rows of nine
        # splits take 16 steps, of two 4.
        ((512, 32768), {"heads": (16, 2)}, 74, 2),
        # 64 tiles of 32 steps: 33, or seven waves of 5.
        ((1, 4096), {"batch": 64}, 74, 1),
        ((4096, 4096), {"heads": (16, 16)}, 74, 1),
        ((1, 4096), {"batch": 37}, 66, 3),
        ((1, 4096), {}, 1, 1),
        # Shorter by one step, and by two: in splits of one step; in two splits.
        ((1, 3 * 128), {}, 74, 1),
        ((1, 3 * 128 + 1), {}, 74, 4),
        ((1, 5 * 128), {"batch": 37}, 74, 1),
        ((1, 5 * 128 + 1), {"batch": 37}, 74, 2),
        ((1, 1), {}, 74, 1),
        # One query sees 1023 + 1 keys: 8 steps; bounded on one side, all of them.
        ((1, 100_000), {"window": (1023, 0)}, 74, 8),
        ((32, 100_000), {"window": (1023, 0)}, 74, 9),
        ((1, 100_000), {"window": (100, 100)}, 74, 1),
        ((1, 100_000), {"window": (1023, None)}, 74, 61),
        ((1, 100_000), {"window": (None, 0)}, 74, 61),
    ],
)  # fmt: skip
def test_the_rule(lengths, options, clusters, splits):
    problem = describe(lengths, **options, config=ForwardConfig())
    assert splits_for(problem, gpu(clusters)) == splits
    assert divided(problem, BY_RULE, gpu(clusters)).num_splits == splits
    assert divided(problem, 7, gpu(clusters)).num_splits == 7


# Tiles of a CTA, on 148 SMs, which HBM bounds together.
@pytest.mark.architecture("sm_100a")
@pytest.mark.parametrize(
    ("lengths", "options", "splits"),
    [
        # One split per step, as long as SMs suffice; then 74 for each of 2 tiles; 64 are allowed.
        ((1, 512), {"heads": (16, 2)}, 4),
        ((1, 2048), {"heads": (16, 2)}, 16),
        ((1, 8192), {"heads": (16, 2)}, 64),
        ((1, 131072), {"heads": (16, 2)}, 64),
        # 18 SMs for each of 8 tiles, 9 for each of 16; more SMs than steps.
        ((2, 2048), {"heads": (8, 1), "batch": 8}, 16),
        ((2, 32768), {"heads": (8, 1), "batch": 8}, 18),
        ((4, 32768), {"heads": (16, 2), "batch": 8}, 9),
        # Tiles for all SMs, which HBM keeps waiting in any case.
        ((1, 2048), {"heads": (16, 2), "batch": 128}, 1),
        ((2, 131072), {"heads": (8, 8), "batch": 128}, 1),
        ((1, 1), {}, 1), ((1, 128), {}, 1),
        ((1, 100_000), {"window": (1023, 0)}, 8),
    ],
)  # fmt: skip
def test_the_rule_of_few_rows(lengths, options, splits):
    problem = describe(lengths, **options)
    assert problem.tiles.kind == "forward_decode"
    assert splits_for(problem, gpu()) == splits


@pytest.mark.architecture("sm_100a")
def test_the_rule_for_packed_and_padded_sequences():
    """The number of sequences and the longest one decide, not the offsets: 4 sequences, 4096
    keys."""
    found = set()
    for ends_q, ends_k in (((1, 2, 3, 4), (4096, 4096, 4096, 4096)), ((0, 0, 4, 4), (9, 9, 9, 9))):
        problem = describe(
            (4, ends_k[-1]), (8, 1), cu_seqlens_q=int32((0, *ends_q), "cpu"),
            cu_seqlens_k=int32((0, *ends_k), "cpu"), max_seqlen_q=4, max_seqlen_k=4096,
            config=ForwardConfig(),
        )  # fmt: skip
        found.add(splits_for(problem, gpu()))
    # 4 tiles, 18 pairs for each: 2 of 32 steps, for which 16 are enough.
    assert found == {16}
    # Heads of sequences that have a length in use share no tile: 16 tiles of 2 sequences.
    for used in ((1, 1), (0, 0)):
        problem = describe(
            (1, 4096), (8, 1), batch=2, config=ForwardConfig(), seqused_q=int32(used, "cpu")
        )
        assert splits_for(problem, gpu()) == 4
    for used in ((4096, 4096), (0, 3)):
        problem = describe(
            (1, 4096), (8, 1), batch=2, config=ForwardConfig(), seqused_k=int32(used, "cpu")
        )
        assert splits_for(problem, gpu()) == 32


@pytest.mark.architecture("sm_100a")
@pytest.mark.simulator
@pytest.mark.sampled
def test_calls_follow_the_rule(combined):
    """Both functions, where nothing is said and where 0 is; the same bits as with that number."""
    q, k, v = inputs((1, 1300), HEADS)
    expected = splits_for(describe((1, 1300), HEADS), gpu())
    assert expected == 11
    results = [
        flash_attn_func(q, k, v, use_clc=False),
        flash_attn_func(q, k, v, num_splits=0, use_clc=False),
        flash_attn_varlen_func(q, k, v, use_clc=False),
        flash_attn_func(q, k, v, num_splits=expected, use_clc=False),
    ]
    assert [problem.num_splits for problem, _ in combined] == [expected] * 4
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.simulator
@pytest.mark.sampled
def test_keys_of_unknown_length_are_not_divided_unless_asked(combined):
    """Packed keys without max_seqlen_k: their rows say nothing of the longest sequence."""
    q, k, v = (tensor[0] for tensor in inputs((1, 1300), HEADS))
    offsets = [int32((0, n), "cpu") for n in (1, 1300)]
    known = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], max_seqlen_q=1,
        max_seqlen_k=1300, use_clc=False,
    )  # fmt: skip
    ((problem, _),) = combined
    # A part for each of the KV tiles.
    parts = -(-1300 // problem.tiles.keys)
    assert problem.num_splits == parts
    unknown = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], max_seqlen_q=1, use_clc=False
    )
    assert len(combined) == 1
    asked = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], max_seqlen_q=1, num_splits=parts,
        use_clc=False,
    )  # fmt: skip
    assert len(combined) == 2 and torch.equal(asked, known)
    assert (unknown.float() - known.float()).abs().max() < 2**-8


@pytest.mark.parametrize("function", [flash_attn_func, flash_attn_varlen_func])
@pytest.mark.parametrize(
    ("num_splits", "error", "message"),
    [
        (True, TypeError, "num_splits must be an int, got True"),
        (2.0, TypeError, "num_splits must be an int, got 2.0"),
        ("2", TypeError, "num_splits must be an int, got '2'"),
        (None, TypeError, "num_splits must be an int, got None"),
        (-1, ValueError, r"num_splits is -1; accepted: 1 \(none\) to 64, or 0 to leave"),
        (65, ValueError, r"num_splits is 65; accepted: 1 \(none\) to 64, or 0"),
    ],
)
def test_numbers_that_are_not_accepted(function, num_splits, error, message):
    before = dict(compile.counters)
    with pytest.raises(error, match=message):
        function(*inputs((4, 4)), num_splits=num_splits)
    assert dict(compile.counters) == before


@pytest.mark.simulator
@pytest.mark.parametrize("seqlen_q", [1, 40], ids=["decode", "tiles"])
@pytest.mark.sampled
def test_the_combining_kernel_begins_early(seqlen_q):
    """Each warp of the forward consents, each of the other waits (PTX ISA 9.7.13.13); a forward
    without parts has nothing to consent to."""
    import sm100_sim

    flash_attn_func(*inputs((seqlen_q, 520), HEADS), num_splits=3)
    forward, combine = sm100_sim.last_reports()[-2:]
    for report, name in ((forward, "launch_dependents"), (combine, "wait")):
        warps = math.prod(report.grid) * math.prod(report.block) // 32
        assert report.opcodes[f"griddepcontrol.{name}"]["warps"] == warps
        assert report.warps("griddepcontrol") == warps
    flash_attn_func(*inputs((seqlen_q, 520), HEADS), num_splits=1)
    assert sm100_sim.last_reports()[-1].warps("griddepcontrol") == 0


@pytest.mark.parametrize("seqlen_q", [1, 40], ids=["decode", "tiles"])
@pytest.mark.sampled
def test_no_grid_of_cancelled_clusters_lets_the_next_kernel_begin(seqlen_q, architecture):
    """Nobody knows whether a cancelled cluster counts as finished for it (docs/silicon.md,
    `clc-dependents`).  A counter of tiles cancels nothing."""
    options = Options.check(None, True, (None, None), 0.0, use_clc=True)
    q, *keys = inputs((seqlen_q, 520), HEADS)
    one = replace(Problem.describe((q, *keys), options), num_splits=3)
    ptx = compile_kernel(forward_spec(one, gpu_of(q.device))).ptx
    cancels = "clusterlaunchcontrol.try_cancel" in ptx
    assert cancels == (architecture == "sm_100a")
    assert ("griddepcontrol.launch_dependents" in ptx) != cancels
