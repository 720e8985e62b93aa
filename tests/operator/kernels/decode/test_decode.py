"""A few queries against many keys: keys as M on Blackwell, one warpgroup's tiles on Hopper, in one
part and in several."""

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
from fa4_hd256.kernels.blackwell.decode.config import DECODE, DecodeConfig
from fa4_hd256.kernels.hopper.forward import config as hopper
from fa4_hd256.run.catalogue import forward_spec
from fa4_hd256.softmax_emu.pattern import Ex2Pattern

pytestmark = pytest.mark.simulator

#: Kernels for few rows: by architecture and rows of a tile.
KERNELS = {f"sm_100a, {config.rows}": ("sm_100a", config) for config in DECODE}
KERNELS["sm_90a"] = "sm_90a", hopper.DECODE


@pytest.fixture
def kernel(request, monkeypatch):
    """Return a configuration of `KERNELS`, whose architecture calls are for from now on."""
    architecture, config = KERNELS[request.param]
    monkeypatch.setenv("FA4_HD256_ARCH", architecture)
    return config


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setenv("FA4_HD256_ARCH", "sm_90a")


def of(*names):
    """Run a test with some of `KERNELS`."""
    return pytest.mark.parametrize("kernel", names, indirect=True)


FEWEST = of("sm_100a, 16", "sm_90a")


# Rows of a tile: all of them; of a group of 6 heads, padded to 8; several tiles of queries; a head
# by itself, since a group of 24 has no place in a tile. On Hopper 16 of 64 rows, all of them, and
# groups of 3, 6 and 5, padded.
@pytest.mark.parametrize(
    ("kernel", "queries", "heads"),
    [("sm_100a, 16", 2, (4, 2)), ("sm_100a, 32", 4, (8, 1)), ("sm_100a, 64", 8, (16, 2)),
     ("sm_100a, 32", 3, (12, 2)), ("sm_100a, 16", 5, (8, 2)), ("sm_100a, 16", 1, (24, 1)),
     ("sm_90a", 1, (16, 1)), ("sm_90a", 4, (32, 2)), ("sm_90a", 5, (3, 1)),
     ("sm_90a", 8, (12, 2)), ("sm_90a", 1, (5, 1))],
    indirect=["kernel"],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.sampled("1-sm_100a, 16-2-*")
def test_rows_and_tiles(kernel, queries, heads, num_splits):
    given = tensors(queries, 450, heads)
    found = flash_attn_func(
        *given, causal=True, return_lse=True, num_splits=num_splits, config=kernel
    )
    accurate(found, given, causal=True)
    report = sm100_sim.last_reports()[-1 - (num_splits > 1)]
    assert report.cluster == (1, 1, 1)
    assert report.warps("tcgen05.mma") + report.warps("wgmma.mma_async") > 0


@pytest.mark.parametrize(
    ("options", "dtype", "num_splits"),
    [({"window_size": (100, 0)}, torch.bfloat16, 1),
     ({"window_size": (70, 5), "softmax_scale": -0.1}, torch.float16, 2),
     ({"causal": True, "softcap": 20.0}, torch.bfloat16, 2),
     ({"softmax_scale": 0.0}, torch.float16, 1)],
    ids=str,
)  # fmt: skip
@of("sm_100a, 32", "sm_90a")
@pytest.mark.sampled
def test_options(options, dtype, num_splits, kernel):
    given = tensors(3, 333, (8, 1), dtype=dtype)
    sink = torch.randn(8)
    found = flash_attn_func(
        *given, return_lse=True, num_splits=num_splits, learnable_sink=sink, config=kernel,
        **options,
    )  # fmt: skip
    accurate(found, given, learnable_sink=sink, **options)


@FEWEST
@pytest.mark.sampled
def test_a_sink_where_no_key_is_seen(kernel):
    """Rows before the first key: their LSE is the sink's."""
    q, k, v = tensors(8, 5, (2, 1), batch=1)
    sink = torch.randn(2)
    found = flash_attn_func(
        q, k, v, causal=True, return_lse=True, learnable_sink=sink, config=kernel
    )
    accurate(found, (q, k, v), causal=True, learnable_sink=sink)
    assert torch.allclose(found[1][0, :, 0], sink, rtol=1e-6)


@pytest.mark.architecture("sm_100a")
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


@FEWEST
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.sampled
def test_both_schedulers_give_the_same_bits(num_splits, kernel, monkeypatch):
    device = "h200:3" if kernel is hopper.DECODE else "b200:3"
    monkeypatch.setenv("SM100_SIM_DEVICE", device)
    given = tensors(2, 400, (8, 2))
    results = [
        flash_attn_func(*given, causal=True, use_clc=use_clc, num_splits=num_splits, config=kernel)
        for use_clc in (False, True)
    ]
    assert torch.equal(*results)


@of(*KERNELS)
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.sampled
def test_no_findings(use_clc, seed, kernel, sanitize):
    sanitize(seed, clusters=2)
    lengths = torch.tensor([500, 0, 300], dtype=torch.int32)
    given = tensors(2, 500, (8, 1), batch=3)
    given[1][0] *= torch.linspace(3, 0.2, 500)[:, None, None]
    for num_splits in (1, 3):
        flash_attn_varlen_func(
            *given, seqused_k=lengths, causal=True, num_splits=num_splits, use_clc=use_clc,
            config=kernel,
        )  # fmt: skip
    for report in sm100_sim.last_reports()[-3:]:
        assert report.findings == []


# ---------------------------------------------------------------- plans


#: Of what the MMA warp does for S: QK of the first half of the columns, and all behind it.
FIRST, REST = slice(0, 3), slice(3, None)


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


# ---------------------------------------------------------------- rules of Hopper's tiles


# (queries, heads): the heads that share a tile, its queries and its configuration. Groups share one
# while their padded rows fit; else each head has tiles of its own.
@pytest.mark.parametrize(
    ("queries", "heads", "packed", "of_tile", "config"),
    [(5, (16, 1), 16, 8, hopper.ForwardConfig()), (65, (1, 1), 1, 128, hopper.ForwardConfig()),
     (64, (1, 1), 1, 64, hopper.DECODE), (8, (12, 2), 6, 8, hopper.DECODE),
     (9, (12, 2), 1, 64, hopper.DECODE), (1, (40, 8), 5, 8, hopper.DECODE),
     (65, (12, 2), 1, 128, hopper.ForwardConfig())],
    ids=str,
)  # fmt: skip
def test_tiles_of_calls(on_hopper, queries, heads, packed, of_tile, config):
    found = Problem.describe(tensors(queries, 70, heads), Options(1.0))
    assert (found.packed_heads, found.tile_queries) == (packed, of_tile)
    assert found.tiles == config.tiles


# (batch, queries, keys, heads, causal): KV splits by the rule, and why.
@pytest.mark.parametrize(
    ("batch", "queries", "keys", "heads", "causal", "parts"),
    [
        # HBM bounds all of them together: uneven waves of tiles cost nothing.
        (128, 4, 131072, (32, 2), True, 1), (64, 1, 8192, (32, 2), True, 1),
        # All SMs, though half of them take in what HBM gives; between, pairs of SMs differ.
        (32, 1, 131072, (32, 2), True, 2), (8, 1, 8192, (16, 2), True, 8),
        (8, 4, 8192, (16, 2), True, 8), (1, 1, 131072, (32, 2), True, 64),
        (1, 4, 131072, (32, 2), True, 64), (64, 1, 16384, (32, 2), True, 1),
        # Short parts: the more rows, the more their results take.
        (1, 1, 8192, (32, 2), True, 64), (1, 4, 8192, (32, 2), True, 32),
        # Tiles of 128 rows: steps of 64 keys under a mask, of 80 without, of 64 where fewer keys
        # would be wasted.
        (1, 100, 2048, (8, 8), True, 11), (1, 100, 2048, (8, 8), False, 13),
        (1, 64, 1024, (8, 1), True, 8), (1, 16, 2048, (16, 2), True, 16),
        (1, 100, 512, (8, 8), False, 1),
    ],
)  # fmt: skip
def test_the_rule_of_splits(on_hopper, batch, queries, keys, heads, causal, parts):
    one, where = torch.zeros(1, dtype=torch.bfloat16), gpu_of(torch.device("cpu"))
    q, k = (one.expand(batch, *size, 256) for size in ((queries, heads[0]), (keys, heads[1])))
    problem = Problem.describe((q, k, k), Options.check(None, causal, (None, None), 0.0))
    assert forward_spec(problem, where).config.tiles == problem.tiles
    assert splits_for(problem, where) == parts
