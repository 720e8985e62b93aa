"""Waits and signals of every warp, as the simulator traces them, against the table of steps, as the
check of the plan knows them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from step_edits import lacking
from step_traces import assert_as_declared, attend, of_entry, steps_of, table_of, traced_launches

from fa4_hd256 import BackwardConfig, ForwardConfig
from fa4_hd256.kernels.blackwell.decode.config import DECODE, DECODE_E4M3, DECODE_NVFP4
from fa4_hd256.kernels.blackwell.forward.mxfp8_config import Mxfp8Config
from fa4_hd256.kernels.context import CLAIM_STEPS
from fa4_hd256.kernels.proof.programs import OperationKind
from fa4_hd256.kernels.proof.steps import Verb

pytestmark = [pytest.mark.simulator, pytest.mark.architecture("sm_100a")]

TILE_Q, TILE_K = 256, 128


@pytest.fixture
def reports(monkeypatch):
    """Reports, with traces, of the launches that follow, on one CTA pair."""
    return traced_launches(monkeypatch, "b200:2")


def assert_told(report, plan, tiles, **options):
    """The trace is what the table says, and not what one with a signal less or a tile more says."""
    assert_as_declared(report, plan, tiles, **options)
    steps = table_of(plan)
    silent = lacking(steps, Verb.ARRIVE)
    for wrong, of in ((silent, tiles), (steps, (*tiles, 1))):
        with pytest.raises(AssertionError):
            assert_as_declared(report, plan, of, wrong, **options)


@pytest.mark.parametrize("keys", [128, 1100])
@pytest.mark.sampled
def test_the_next_tile_is_asked_for_when_few_steps_are_left(keys, reports):
    """Three tiles: each query waits until the leader's load warp has what comes before the tile's
    last steps behind it, so that no tile is kept from clusters that have nothing to do."""
    attend((700, keys), False, config=ForwardConfig(), use_clc=True)
    waits, found = 0, []
    for entry in reports[0].trace:
        if entry.warp == ForwardConfig().warps.load and not entry.ctaid[0]:
            waits += of_entry(entry.opcode)[0] is OperationKind.WAIT
        if entry.opcode.startswith("clusterlaunchcontrol.try_cancel"):
            found.append(waits)
    steps = -(-keys // TILE_K)
    # A wait for each K and V, for Q and for the scheduler's response; V is a step behind.
    earliest = 2 + 2 * (max(steps - CLAIM_STEPS, 1) - 1)
    assert len(found) == 3
    for tile, waited in enumerate(found):
        assert waited - tile * (2 * steps + 2) >= earliest


# Causal with more queries than keys: tiles of three steps, of one and of none, the longest first.
# Two equal tiles of one step. Both schedulers.
@pytest.mark.parametrize("use_clc", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("lengths", "causal", "kind"),
    [
        ((1200, 300), True, ForwardConfig),
        ((512, 100), False, ForwardConfig),
        ((1200, 300), True, Mxfp8Config),
    ],
)
@pytest.mark.sampled("lengths0-True-ForwardConfig-static", "lengths1-False-ForwardConfig-static")
def test_the_forward_does_what_its_table_says(lengths, causal, kind, use_clc, reports):
    config = kind()
    seen = attend(lengths, causal, config=config, use_clc=use_clc)
    tiles = steps_of(seen, TILE_Q, TILE_K)
    tiles = tiles[::-1] if causal else tiles
    assert not causal or {0, 1, 3} <= set(tiles)
    assert_told(reports[0], config, tiles)


@pytest.mark.parametrize("use_clc", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    "kind", [DECODE[0], DECODE_E4M3[0], DECODE_NVFP4[0]], ids=["bf16", "e4m3", "nvfp4"]
)
@pytest.mark.parametrize(("lengths", "q_stages"), [((100, 330), 2), ((60, 40), 1)])
@pytest.mark.sampled
def test_the_decode_kernel_does_what_its_table_says(lengths, q_stages, kind, use_clc, monkeypatch):
    """Tiles of none to three steps, all of them on one CTA, or every other one of them."""
    monkeypatch.setenv("SM100_SIM_CLUSTERS", "1")
    reports = traced_launches(monkeypatch, "b200:2")
    config = replace(kind, q_stages=q_stages)
    kv_dtype = config.tiles.kv_dtype or torch.bfloat16
    seen = attend(lengths, True, kv_dtype=kv_dtype, config=config, use_clc=use_clc)
    tiles = steps_of(seen, config.rows, TILE_K)[::-1]
    assert set(tiles) == ({2, 3} if lengths[1] > TILE_K else {0, 1})
    assert_told(reports[0], config, tiles if use_clc else tiles[::2], ctas=(0,))


@pytest.mark.parametrize("ds_bytes", [0, BackwardConfig().ds_bytes], ids=["recomputed", "stored"])
@pytest.mark.parametrize(("lengths", "causal"), [((600, 300), True), ((300, 150), False)])
@pytest.mark.sampled("lengths0-True-stored")
def test_the_backward_does_what_its_tables_say(lengths, causal, ds_bytes, reports):
    config = BackwardConfig(ds_bytes=ds_bytes)
    seen = attend(lengths, causal, backward=config)
    _, _, of_keys, of_queries = reports
    tiles = steps_of(seen, TILE_Q, TILE_K)
    tiles = tiles[::-1] if causal else tiles
    if not ds_bytes:
        assert_told(of_keys, config.dkdv, steps_of(seen.T, TILE_K, TILE_Q))
        assert_told(of_queries, config.dq, tiles)
        return
    # Tiles of 256 keys, in steps of 128 queries; those of dK and of dQ are interleaved.
    of_dk = steps_of(seen.T, TILE_Q, TILE_K)
    assert_told(of_keys, config.dv, of_dk)
    pairs = itertools.zip_longest(of_dk, tiles)
    in_turns = tuple(tile for pair in pairs for tile in pair if tile is not None)
    assert_told(of_queries, config.products, in_turns)
