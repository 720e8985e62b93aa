"""The stage of microbenchmarks: figures of a GPU; in the simulator the kernels only run."""

from __future__ import annotations

import numpy as np
import pytest
from simulated_target import SIMULATOR

from bench.bringup.micro import microbenchmarks
from bench.bringup.stages import micro

pytestmark = pytest.mark.simulator


def test_a_figure_is_the_median_with_quartiles():
    benchmark = microbenchmarks(148, has_tcgen05=True)["mbarrier arrive"]
    outcome = micro._figure(benchmark, np.array([benchmark.figure(8 * x) for x in range(20, 41)]))
    assert outcome.state == "measured"
    assert outcome.values["value"] == 15 and outcome.values["low"] == 10
    assert outcome.values["high"] == 20 and "sets barrier_arrive" in outcome.text


@pytest.mark.parametrize(("name", "says"), [
    ("mbarrier arrive", "ran without an error"), ("CLC query", "too large"), ("HBM rate", "whole"),
])  # fmt: skip
def test_the_simulator_has_no_figure(name, says):
    notes = []
    outcome = micro.run(name, SIMULATOR, notes.append)
    assert outcome.state == "not measured" and says in outcome.text and not outcome.values
    assert bool(notes) == (name == "mbarrier arrive")
