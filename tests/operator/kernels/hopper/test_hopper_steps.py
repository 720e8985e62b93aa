"""The steps of Hopper's kernels: the tables are what the simulator traces."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from step_edits import lacking, waiting_less
from step_traces import (
    assert_as_declared,
    attend,
    declared,
    first_and_last,
    happened,
    steps_of,
    table_of,
    traced_launches,
    warps_of,
)

from fa4_hd256.kernels.hopper.architecture import E4M3_COLUMNS
from fa4_hd256.kernels.hopper.backward.config import BackwardConfig
from fa4_hd256.kernels.hopper.decode.config import DECODE_E4M3
from fa4_hd256.kernels.hopper.forward.config import ForwardConfig
from fa4_hd256.kernels.hopper.forward.e4m3.config import E4m3ForwardConfig
from fa4_hd256.kernels.hopper.proof.forward_steps import ByWarpgroup
from fa4_hd256.kernels.proof.steps import Verb

STORED, RECOMPUTED = BackwardConfig(), BackwardConfig(ds_bytes=0)
PAIRS = ForwardConfig(ctas=2)

# ------------------------------------------------------------------------------------- traces


@pytest.fixture
def reports(monkeypatch):
    """Reports, with traces, of the launches that follow, on one cluster."""
    monkeypatch.setenv("FA4_HD256_ARCH", "sm_90a")
    return traced_launches(monkeypatch, "h200:2")


def plans_of(config):
    """Return the plans of the kernels that make gradients, in the order of their launches."""
    if config is STORED:
        return config.dv, config.products
    return config.single_dk, config.single_dv, config.single_dq


# Causal with more queries than keys, or fewer: tiles of none, of one and of more steps. Both
# schedulers; with a softcap the products come in another order.
@pytest.mark.simulator
@pytest.mark.parametrize("config", [RECOMPUTED, STORED], ids=["recomputed", "stored"])
@pytest.mark.parametrize(
    ("lengths", "causal", "options"),
    [
        ((600, 300), True, {}),
        ((300, 600), True, {"use_clc": True}),
        ((300, 150), False, {"softcap": 20.0}),
    ],
)
@pytest.mark.sampled
def test_the_backward_does_what_its_tables_say(lengths, causal, options, config, reports):
    seen = attend(lengths, causal, backward=config, **options)
    capped = "softcap" in options
    of_gradients = reports[2:]
    order = -1 if causal else 1
    plans = plans_of(config)
    if config is RECOMPUTED:
        of_keys, of_queries = steps_of(seen.T, 256, 64), steps_of(seen, 256, 64)[::order]
        tiles = of_keys, of_keys, of_queries
    else:
        # dS is written in blocks of 256 x 256; tiles of dK and of dQ are interleaved.
        blocks = tuple(4 * count for count in steps_of(seen.T, 256, 256))
        pairs = itertools.zip_longest(steps_of(seen.T, 256, 128), steps_of(seen, 256, 128)[::order])
        tiles = blocks, tuple(tile for pair in pairs for tile in pair if tile is not None)
    assert len(of_gradients) == len(plans)
    for report, plan, steps in zip(of_gradients, plans, tiles, strict=True):
        table = table_of(plan, capped)
        assert_as_declared(report, plan, steps, table)
        for wrong in (lacking(table, Verb.ARRIVE), lacking(table, Verb.AGAIN), waiting_less(table)):
            if wrong != table:
                with pytest.raises(AssertionError):
                    assert_as_declared(report, plan, steps, wrong)
        with pytest.raises(AssertionError):
            assert_as_declared(report, plan, (*steps, 1), table)


def work_of(seen, config, warpgroup, first):
    """Return the steps of a tile whose first row is `first`, and how many of its first and last
    ones a warpgroup of a CTA leaves out; warpgroup: its number in the cluster."""

    def blocks(rows):
        columns = seen[rows].any(0)
        seen_in = [
            number for number in range(-(-seen.shape[1] // config.block_kv))
            if columns[number * config.block_kv : (number + 1) * config.block_kv].any()
        ]  # fmt: skip
        return (seen_in[0], seen_in[-1] + 1) if seen_in else (0, 0)

    begin, end = blocks(slice(first, first + config.tile_q))
    start = first + 64 * warpgroup
    own_begin, own_end = blocks(slice(start, start + 64))
    if own_begin == own_end:
        return end - begin, (0, end - begin)
    return end - begin, (end - own_end, own_begin - begin)


def assert_forward(report, config, seen, order):
    """order: 1, or -1 where later tiles come first."""
    plan, steps = ByWarpgroup(config), table_of(config)
    firsts = list(range(0, seen.shape[0], config.tile_q))[::order]
    left_out = set()
    for cta in range(2):
        mine, rank = (firsts, cta) if config.ctas == 2 else (firsts[cta::2], 0)
        skipped = {}
        for w in range(config.warpgroups):
            number = rank * config.warpgroups + w
            work = [work_of(seen, config, number, first) for first in mine]
            tiles, skipped[f"consumers {w}"] = zip(*work, strict=True)
            left_out |= set(skipped[f"consumers {w}"])
        expected = declared(plan.edges, steps, tiles, skipped)
        transposers = [role.name for role in steps.roles if role.name == "transposers"]
        for role in ("load", *transposers, *skipped):
            for warp in first_and_last(warps_of(role, plan, steps)):
                assert happened(report, plan, warp, cta) == expected[role, rank], (role, cta)
    return left_out


# Causal with more queries than keys, or fewer: warpgroups that leave out some steps of their tile,
# and all of them; a window: first and last ones.
@pytest.mark.simulator
@pytest.mark.parametrize(
    "config",
    [ForwardConfig(), PAIRS, E4m3ForwardConfig(), E4M3_COLUMNS],
    ids=["one", "pairs", "e4m3", "e4m3, V^T"],
)
@pytest.mark.parametrize(
    ("lengths", "causal", "options"),
    [
        ((600, 260), True, {}),
        ((300, 600), True, {"use_clc": True}),
        ((300, 600), False, {"window_size": (100, 40)}),
        ((300, 150), False, {}),
    ],
)
@pytest.mark.sampled("lengths0-True-options0-one")
def test_the_forward_does_what_its_table_says(lengths, causal, options, config, reports):
    dtype = config.tiles.q_dtype or torch.bfloat16
    seen = attend(lengths, causal, None, dtype, dtype, config=config, **options)
    if "window_size" in options:
        distance = torch.arange(lengths[1]) - torch.arange(lengths[0])[:, None]
        distance -= lengths[1] - lengths[0]
        seen = (distance >= -100) & (distance <= 40)
    # V may have been transposed before.
    left_out = assert_forward(reports[-1], config, seen, -1 if causal or options else 1)
    assert (0, 0) in left_out and len(left_out) > 1
    with pytest.raises(AssertionError):
        assert_forward(reports[-1], config, seen[:, :64], -1 if causal or options else 1)


@pytest.mark.simulator
@pytest.mark.parametrize("use_clc", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("config", [DECODE_E4M3[0], DECODE_E4M3[-1]], ids=lambda c: str(c.rows))
@pytest.mark.parametrize(("lengths", "q_stages"), [((100, 330), 2), ((60, 40), 1)])
@pytest.mark.sampled
def test_the_decode_kernel_of_e4m3_does_what_its_table_says(
    lengths, q_stages, config, use_clc, monkeypatch
):
    """Tiles of none to three steps: on one CTA, which runs first, every other one, or all but the
    other CTA's first."""
    monkeypatch.setenv("FA4_HD256_ARCH", "sm_90a")
    monkeypatch.setenv("SM100_SIM_CLUSTERS", "1")
    reports = traced_launches(monkeypatch, "h200:2")
    config = replace(config, q_stages=min(q_stages, config.q_stages))
    seen = attend(lengths, True, kv_dtype=torch.float8_e4m3fn, config=config, use_clc=use_clc)
    tiles = steps_of(seen, config.rows, config.block_kv)[::-1]
    tiles = (*tiles[:1], *tiles[2:]) if use_clc else tiles[::2]
    table = table_of(config)
    assert_as_declared(reports[0], config, tiles, ctas=(0,))
    for wrong in (lacking(table, Verb.ARRIVE), waiting_less(table)):
        with pytest.raises(AssertionError):
            assert_as_declared(reports[0], config, tiles, wrong, ctas=(0,))
