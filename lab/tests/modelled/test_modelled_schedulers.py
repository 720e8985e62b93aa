"""Static against CLC on costs written by hand."""

import numpy as np
import pytest

from bench.suite import BACKWARD, Case
from lab.model.forward import Kernel
from lab.model.tiles import ForwardTiling
from lab.modelled import schedulers
from lab.paths import Paths
from lab.whole.problem import TileCosts
from sm100_sim.timing import load

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
