"""Static against CLC: on costs written by hand, and measured by a timer of the test's own."""

import os

import numpy as np
import pytest
import torch
from fake_timer import FakeTimer

from bench import suite
from bench.commands import schedulers
from bench.suite import BACKWARD, FORWARD, Case
from bench.tables.paths import Paths
from lab.model.forward import Kernel
from lab.model.tiles import ForwardTiling
from sm100_sim.timing import TileCosts, load

pytest.importorskip("cutlass")

MACHINE = load("b200")


class FakePredictor:
    machine = MACHINE

    def forward(self, provider, case, use_clc):
        values = [MACHINE.values()] * 2
        costs = [TileCosts(7000.0, 1500.0, rate) for rate in (1.04, 1.1)]
        policy = "dynamic" if use_clc else "static"
        paths = Paths(int(use_clc), 40 + use_clc)
        return Kernel(provider, ForwardTiling(policy), values, costs, paths)

    def backward(self, provider, case, use_clc):
        return FakeBackward(use_clc)


class FakeBackward:
    def __init__(self, use_clc):
        self._use_clc = use_clc

    def seconds(self, case):
        return np.array([1.0, 1.2]) * (0.8 if self._use_clc else 1.0) * 1e-3

    def paths_of(self, case):
        return Paths(0, 7 + self._use_clc)


def test_clc_wins_where_tiles_differ_and_only_there():
    dense = Case("dense", ((4096, 4096),) * 4, 16, 2, False)
    ragged = Case("ragged", ((8192, 8192), *((256, 256),) * 7), 16, 2, True, packed=True)
    rows = [schedulers.modelled_row(case, FakePredictor()) for case in (dense, ragged)]
    assert rows[0]["better"] == "not ranked" and abs(rows[0]["gain"]) < 0.05
    assert rows[1]["better"] == "CLC" and rows[1]["clc_balance"] > rows[1]["static_balance"]
    assert rows[1]["gain_low"] <= rows[1]["gain"] <= rows[1]["gain_high"]
    assert {(row["unmatched"], row["ambiguous"]) for row in rows} == {("0 / 1", "40 / 41")}
    text = schedulers.table(rows).as_markdown()
    assert "Modelled: B200 modelled" in text and "in one direction over the whole range" in text
    assert "40 / 41 " in text and "of the replays behind a row, static / CLC" in text


def test_the_backward_has_times_and_no_launch_to_describe():
    case = Case("dense", ((4096, 4096),) * 4, 16, 2, False)
    row = schedulers.modelled_row(case, FakePredictor(), BACKWARD)
    assert row["direction"] == BACKWARD and row["better"] == "CLC"
    assert row["static"] == pytest.approx(case.flop(BACKWARD) / 1e-3 / 1e12)
    assert row["gain"] == pytest.approx(0.25) and row["ambiguous"] == "7 / 8"
    assert row["tiles"] is row["bound"] is row["static_balance"] is None
    assert "| backward " in schedulers.table([row]).as_markdown()


@pytest.mark.parametrize(
    ("gains", "better"),
    [
        ([0.06, 0.01, 0.08], "CLC"),
        ([0.06, -0.01, 0.08], "not ranked"),
        ([0.04, 0.04, 0.2], "not ranked"),
        ([-0.07, -0.06, -0.08], "static"),
    ],
)
def test_what_is_ranked(gains, better):
    assert schedulers._better(np.array(gains)) == better


def test_default_cases_are_the_kinds_asked_for():
    groups = {case.group for case in schedulers.default_cases()}
    assert groups == {"dense", "causal", "window", "varlen", "ragged"}
    parsed = type("Arguments", (), {
        "group": None, "heads": ["8/4"], "max_tokens": None, "only": None,
    })  # fmt: skip
    assert {c.group for c in suite.selected(parsed, schedulers.default_cases)} == {"window"}


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_measured_by_the_environment_variable(direction, monkeypatch):
    """FA_CLC is 0 and 1 while the calls run, and afterwards what it was."""
    monkeypatch.setenv("FA_CLC", "1")
    seen = []

    def call(self, inputs):
        seen.append(os.environ["FA_CLC"])
        exact = torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in inputs.leaves), enable_gqa=True
        )
        return exact.transpose(1, 2)

    monkeypatch.setattr(schedulers.Ours, "call", call)
    monkeypatch.setattr(schedulers.Ours, "missing", lambda self: None)
    case = Case("dense", ((64, 64),), 2, 1, False)
    (row,) = schedulers.measured([case], FakeTimer(), schedulers.Sampling(0, 2), direction)
    assert set(seen) == {"0", "1"} and os.environ["FA_CLC"] == "1"
    assert row["direction"] == direction
    assert row["basis"] == "measured" and row["better"] == "not ranked"
    assert row["static"] > 0 and row["CLC"] > 0
    assert "unmatched" not in schedulers.table([row]).as_markdown(), "nothing was replayed"
