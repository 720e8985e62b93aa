"""Keys divided among CTA pairs: on costs by hand, and measured by a timer of the test's own."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_timer import FakeTimer

from bench import modelled, splits, workload
from bench.predicting import Predicted
from bench.replays import Paths
from bench.suite import Case
from sm100_sim.timing.machine_constants import load
from sm100_sim.timing.problem import TileCosts

pytest.importorskip("cutlass")

MACHINE = load("b200")
VALUES = MACHINE.values()
COSTS = TileCosts(7000.0, 1500.0, 1.04)
KERNEL = modelled.Kernel(
    "ours", 256, 256, 2, "static", [VALUES], [COSTS], packs_heads=True, num_splits=1
)
STEP_CLOCKS = 2048
DECODING = Case("decoding", ((1, 2048),) * 8, 16, 2, True)


def test_parts_share_the_work_and_the_keys():
    whole, parts = (workload.tiles(DECODING, replace(KERNEL, num_splits=n)) for n in (1, 5))
    assert len(whole) == 16 and len(parts) == 80
    # 16 steps in 5 parts: 3, 3, 3, 3, 4.
    assert sorted(tile.work for tile in parts) == [3 * STEP_CLOCKS] * 64 + [4 * STEP_CLOCKS] * 16
    assert len({tile.group for tile in parts}) == 80
    assert sum(t.shared_bytes for t in parts) == pytest.approx(sum(t.shared_bytes for t in whole))


def test_parts_of_a_window_hold_its_masked_steps_where_they_are():
    """1500 keys that end in the sequence's last one: 12 steps, masked at both ends for 32 rows."""
    case = Case("window", ((32, 8192),), 1, 1, True, (1499, None))
    tiles = workload.tiles(case, replace(KERNEL, num_splits=4))
    masked = [tile.masked / STEP_CLOCKS for tile in tiles]
    (whole,) = workload.tiles(case, KERNEL)
    assert sum(tile.work for tile in tiles) == whole.work
    assert sum(masked) * STEP_CLOCKS == whole.masked
    assert masked[0] and masked[3] and not masked[1] and not masked[2]


def test_a_window_reads_the_keys_that_it_sees():
    case = Case("window", ((1, 65536),), 8, 4, True, (1023, None))
    (tile, *_) = workload.tiles(case, KERNEL)
    assert tile.shared_bytes == 4 * 256 * 1024


def test_the_second_kernel_is_a_launch_and_its_bytes():
    seconds = [workload.combine_seconds(DECODING, n, VALUES) for n in (4, 8)]
    launch = VALUES.launch_us * 1e-6
    nbytes = 8 * 16 * (4 * 1028 + 516)
    assert seconds[0] - launch == pytest.approx(nbytes / VALUES.hbm_terabytes / 1e12)
    assert seconds[1] > seconds[0] > launch


class FakePredictor:
    """A step takes a microsecond, the second kernel four; there are 16 tiles."""

    machine = MACHINE

    def refuses(self, provider, case, direction):
        return None

    def predict(self, provider, case, direction):
        return Predicted(np.array([40.0, 44.0]) * 1e-6, None)

    def predict_forward(self, provider, case, use_clc, number):
        assert use_clc, "the default of a causal mask"
        turns = -(-16 * number // 74)
        steps = turns * -(-case.seqlen_k // 128 // number) + 4 * (number > 1)
        return Predicted(np.array([8.0 + steps, 9.0 + steps]) * 1e-6, None, Paths(0, number))


def test_a_modelled_row():
    row = splits.modelled_row(DECODING, FakePredictor())
    assert row["parts"] == 4 and row["best"] == 4 and row["behind"] == 0
    assert row["1"] == pytest.approx(24) and row["4"] == pytest.approx(16)
    assert row["2"] == pytest.approx(20) and row["32"] == pytest.approx(19)
    assert row["gain"] == pytest.approx(1.5) and row["gain_low"] == pytest.approx(25 / 17)
    assert row["ratio"] == pytest.approx(2.5) and row["ambiguous"] == 4
    text = splits.table([row]).as_markdown()
    assert "not divided (us)" in text and "does not divide keys" in text


def test_the_default_cases_reach_both_sides_of_the_rule():
    chosen = {workload.default_splits(case, modelled.B200) for case in splits.default_cases()}
    assert {1, 32} < chosen
    assert {case.group for case in splits.default_cases()} == {"decoding", "chunk", "window"}


def test_measured_with_every_number(monkeypatch):
    """Each is a provider of its own, that hands its number on."""
    asked = []

    def attention(*tensors, causal, num_splits, **others):
        asked.append(num_splits)
        q, k, v = (t.transpose(1, 2) for t in tensors)
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        mask = mask.tril(k.shape[2] - q.shape[2])
        exact = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, enable_gqa=True
        )
        return exact.transpose(1, 2)

    monkeypatch.setattr("fa4_hd256.flash_attn_func", attention)
    monkeypatch.setattr(splits.Ours, "missing", lambda self: None)
    monkeypatch.setattr(splits.FlashAttention4, "missing", lambda self: "not here")
    case = Case("decoding", ((2, 1024),), 2, 1, True)
    (row,) = splits.measured([case], FakeTimer(), splits.Sampling(0, 2))
    assert set(asked) == {1, 2, 4, 8, 16, 32}
    assert row["basis"] == "measured" and row["parts"] == 8 and row["ratio"] is None
    assert "unmatched" not in splits.table([row]).as_markdown(), "nothing was replayed"
