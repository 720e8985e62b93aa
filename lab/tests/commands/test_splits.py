"""KV splits over CTA pairs: on costs by hand, and measured by a timer of the test's own."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_timer import FakeTimer

from bench.suite import Case
from lab.commands import splits
from lab.model import ours
from lab.model.calls import Kind, default_splits
from lab.model.forward import combine_seconds
from lab.model.machines import B200
from lab.model.peers import flash_attn_4_code
from lab.model.peers.flash_attn_4 import split_numbers
from lab.model.predictor import Predicted
from lab.model.tiles import ForwardTiling, forward_tiles
from lab.paths import Paths
from lab.whole.problem import ALONE, Tile, schedule
from sm100_sim.timing import load

pytest.importorskip("cutlass")

MACHINE = load("b200")
VALUES = MACHINE.values()
TILING = ForwardTiling("static", packs_heads=True)
STEP_CLOCKS = 2048
DECODING = Case("decoding", ((1, 2048),) * 8, 16, 2, True)
#: 72 rows per tile, more than the decode kernel takes.
MANY_ROWS = Case("decoding", ((9, 2048),) * 8, 16, 2, True)


def test_parts_share_the_work_and_the_keys():
    whole, parts = (forward_tiles(DECODING, replace(TILING, num_splits=n)) for n in (1, 5))
    assert len(whole) == 16 and len(parts) == 80
    # 16 steps in 5 parts: 3, 3, 3, 3, 4.
    assert sorted(tile.work for tile in parts) == [3 * STEP_CLOCKS] * 64 + [4 * STEP_CLOCKS] * 16
    assert len({tile.group for tile in parts}) == 80
    assert sum(t.shared_bytes for t in parts) == pytest.approx(sum(t.shared_bytes for t in whole))


def test_parts_of_a_window_hold_its_masked_steps_where_they_are():
    """1500 keys that end in the sequence's last one: 12 steps, masked at both ends for 32 rows."""
    case = Case("window", ((32, 8192),), 1, 1, True, (1499, None))
    tiles = forward_tiles(case, replace(TILING, num_splits=4))
    masked = [tile.masked / STEP_CLOCKS for tile in tiles]
    (whole,) = forward_tiles(case, TILING)
    assert sum(tile.work for tile in tiles) == whole.work
    assert sum(masked) * STEP_CLOCKS == whole.masked
    assert masked[0] and masked[3] and not masked[1] and not masked[2]


def test_a_window_reads_the_keys_that_it_sees():
    case = Case("window", ((1, 65536),), 8, 4, True, (1023, None))
    (tile, *_) = forward_tiles(case, TILING)
    assert tile.shared_bytes - tile.shared_from == 4 * 256 * 1024


def test_the_second_kernel_is_a_launch_and_its_bytes():
    seconds = [combine_seconds(DECODING, n, VALUES) for n in (4, 8)]
    launch = VALUES.launch_us * 1e-6
    nbytes = 8 * 16 * (4 * 1028 + 516)
    assert seconds[0] - launch == pytest.approx(nbytes / VALUES.hbm_terabytes / 1e12)
    assert seconds[1] > seconds[0] > launch
    early = combine_seconds(DECODING, 4, VALUES, dependent=True)
    assert seconds[0] - early == pytest.approx(launch - VALUES.dependent_launch_us * 1e-6)
    assert launch > VALUES.dependent_launch_us * 1e-6


class FakePredictor:
    """A step takes a microsecond, the second kernel four; there are 16 tiles."""

    machine, draws = MACHINE, 1

    def ratio_error(self, case, direction):
        return 0.0

    def note(self, text):
        pass

    def refuses(self, provider, case, direction):
        return None

    def predict(self, provider, case, direction):
        return Predicted(*[np.array([40.0, 44.0]) * 1e-6] * 2, None)

    def predict_forward(self, provider, case, use_clc, number):
        """flash-attn-4's 16 tiles of 128 rows: 20 microseconds more than ours, least at 5 parts."""
        if provider == splits.THEIRS:
            seconds = 20.0 + 4 * abs(number - 5)
            return Predicted(*[np.array([seconds, seconds + 2]) * 1e-6] * 2, None, Paths(number, 0))
        assert use_clc, "the default of a causal mask"
        turns = -(-16 * number // 74)
        steps = turns * -(-case.seqlen_k // 128 // number) + 4 * (number > 1)
        return Predicted(*[np.array([8.0 + steps, 9.0 + steps]) * 1e-6] * 2, None, Paths(0, number))


def test_a_modelled_row():
    row = splits.modelled_row(MANY_ROWS, FakePredictor())
    assert row["parts"] == 4 and row["best"] == 4 and row["behind"] == 0
    assert row["1"] == pytest.approx(24) and row["4"] == pytest.approx(16)
    assert row["2"] == pytest.approx(20) and row["32"] == pytest.approx(19)
    assert row["gain"] == pytest.approx(1.5) and row["gain_low"] == pytest.approx(25 / 17)
    assert row["theirs, num_splits=1"] == pytest.approx(40)
    # 148 SMs for 16 tiles: 9 parts.
    assert row["theirs, num_splits=0"] == pytest.approx(36)
    assert row[splits.THEIRS] == pytest.approx(20) and row["their_parts"] == 5
    assert row["ratio"] == pytest.approx(20 / 16) and row["ratio_high"] == pytest.approx(22 / 17)
    assert row["unmatched"] == "0 / 5" and row["ambiguous"] == "4 / 0"
    # Two KV heads' 2,048 keys and values of 8 sequences in 16 microseconds of 8 TB/s.
    assert row["hbm"] == pytest.approx(8 * 2 * 2048 * 1024 / (16e-6 * 8e12))
    assert row["rows"] == 256 and row["forward"] == pytest.approx(40)
    # flash-attn-4 in 5 parts takes 20 and 22 us where ours takes 16 and 17, FROST 40 and 44.
    assert row["peer_peer"] == splits.THEIRS and row["faster"] == "ours"
    assert 20 / 16 < row["peer_ratio"] < 22 / 17 and row["peer_probability"] == 1
    few = splits.modelled_row(DECODING, FakePredictor())
    assert few["rows"] == 16 and few["parts"] == 9
    text = splits.table([row]).as_markdown()
    assert "not divided (us)" in text and "flash-attn-4 at best" in text


def test_the_best_peer_is_the_faster_one_under_each_set():
    """FROST is ahead of ours in one set of two, flash-attn-4's best call in none."""
    ours, third = np.array([10.0, 10.0]), np.array([9.0, 14.0])
    calls = {1: np.array([20.0, 12.0]), 4: np.array([12.0, 20.0])}
    found = splits._standing(ours, calls, third, 0.0)
    assert found["peer_peer"] == "FROST" and found["peer_probability"] == 0.5
    assert found["faster"] == "open"
    assert splits._standing(ours, calls, None, 0.0)["peer_peer"] == splits.THEIRS
    nobody = splits._standing(ours, {}, None, 0.0)
    assert nobody["peer_peer"] is None and nobody["faster"] is None


def test_published_times_stand_beside_the_same_call_alone():
    few = Case("few queries", ((2, 131072),) * 128, 32, 2, True)
    found = splits._published("gb200", few)
    assert found == {
        "cuDNN, as published": pytest.approx(193252.527),
        "FROST, as published": pytest.approx(5407.654),
    }
    for other in (replace(few, heads=16), replace(few, causal=False), DECODING):
        assert set(splits._published("gb200", other).values()) == {None}
    assert set(splits._published("h200", few).values()) == {None}


@pytest.mark.simulator
@pytest.mark.parametrize("sample", [(8, 1, None, 2048, 8), (16, 1, None, 4096, 32)])
@pytest.mark.sampled
def test_short_parts_take_what_their_replay_takes(sample):
    """Two steps and one a part, in numbers of parts that no cost is fitted to."""
    variant = ours.Variant(Kind(True), use_clc=True, split_rows=sample[0])
    kernel = ours.Ours().forward(variant, MACHINE, 0)
    (found,) = ours.replays(replace(variant, samples=(sample,)), MACHINE, 0)
    parts = sample[-1]
    tiles = [Tile(found.work / parts)] * parts
    one, how = VALUES._replace(sms=2), kernel.tiling
    made = schedule(tiles, kernel.costs[0], one, 2, how.policy, ALONE, True, how.claims)
    assert found.work == 2048 * sample[3] // 128
    assert made.clocks == pytest.approx(found.clocks[0], rel=0.03)
    linear = replace(kernel.costs[0], least=0.0)
    assert schedule(tiles, linear, one, 2, "static").clocks < 0.95 * found.clocks[0]


@pytest.mark.parametrize(
    ("case", "numbers"),
    [
        (DECODING, range(2, 10)),
        # Tiles of 128 packed rows: 2 queries' blocks of 16 on 8 heads each, too many for 148 SMs.
        (Case("chunk", ((128, 4096),) * 8, 16, 2, True), range(2, 2)),
        # More SMs than blocks of keys; and 4 of them are never split.
        (Case("decoding", ((1, 1024),), 16, 2, True), range(2, 9)),
        (Case("decoding", ((1, 512),), 16, 2, True), range(2, 2)),
        # The blocks that a window of 1024 keys and 128 rows may touch.
        (Case("window", ((1, 65536),), 8, 4, True, (1023, None)), range(2, 10)),
        (Case("decoding", ((1, 131072),), 16, 2, True), range(2, 75)),
    ],
)
def test_their_rule(case, numbers):
    assert split_numbers(case, 148) == numbers


def test_their_rule_is_what_their_interface_does():
    interface = pytest.importorskip("flash_attn.cute.interface")
    for tiles in (1, 2, 3, 16, 40, 74, 75, 148, 149):
        for steps in (1, 4, 5, 8, 64, 1024):
            found = flash_attn_4_code.split_numbers(tiles, steps, 148)
            chosen = interface.num_splits_heuristic(tiles, 148, steps, 128)
            assert max(found, default=1) == chosen


def test_their_parts_are_equal_but_for_the_last():
    """16 steps in 5 parts: 4, 4, 4, 4, none."""
    tiling = replace(TILING, rows=128, cluster=1, policy="single", num_splits=5, equal_parts=True)
    tiles = forward_tiles(DECODING, tiling)
    assert sorted(tile.work for tile in tiles) == [0] * 16 + [4 * STEP_CLOCKS] * 64


def test_the_default_cases_reach_both_sides_of_the_rule():
    chosen = {default_splits(case, B200) for case in splits.default_cases()}
    assert {1, 64} < chosen
    groups = {case.group for case in splits.default_cases()}
    assert groups == {"decoding", "chunk", "few queries", "window"}


@pytest.mark.parametrize("broken", [None, 1, 8])
def test_measured_beside_each_of_their_calls(monkeypatch, broken):
    """Each of their numbers of splits is a timed call, handed on under its own name; one that does
    not run leaves its own column empty."""
    asked = []

    class Theirs(splits.FlashAttention4):
        def missing(self):
            return None

        def call(self, inputs):
            asked.append(self._num_splits)
            if self._num_splits == broken:
                raise RuntimeError("does not compile")
            return Reference("reference").call(inputs)

    class Reference(splits.Ours):
        def missing(self):
            return None

        def call(self, inputs):
            q, k, v = (t.transpose(1, 2) for t in inputs.leaves)
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, enable_gqa=True
            ).transpose(1, 2)

    monkeypatch.setattr(splits, "Ours", Reference)
    monkeypatch.setattr(splits, "FlashAttention4", Theirs)
    case = Case("decoding", ((1, 1024),), 2, 1, True)
    (row,) = splits.measured([case], FakeTimer(), splits.Sampling(0, 2))
    assert set(asked) == {1, 2, 4, 8}
    assert row["their_parts"] in {1, 2, 4, 8} - {broken} and row["ratio"] is not None
    assert (row[splits.THEIR_DEFAULT] is None) == (broken == 1)
    assert (row[splits.THEIR_RULE] is None) == (broken == 8)


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
