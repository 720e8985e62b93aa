"""Static against CLC: on costs written by hand, and measured by a timer of the test's own."""

import os

import numpy as np
import pytest
import torch
from fake_timer import FakeTimer

from bench.commands import schedulers
from bench.suite import BACKWARD, FORWARD, Case

pytest.importorskip("cutlass")


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
    assert schedulers.better(np.array(gains)) == better


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
    row = schedulers.measured((case, direction), FakeTimer(), schedulers.Sampling(0, 2))
    assert set(seen) == {"0", "1"} and os.environ["FA_CLC"] == "1"
    assert row["direction"] == direction
    assert row["basis"] == "measured" and row["better"] == "not ranked"
    assert row["static"] > 0 and row["CLC"] > 0
    assert "unmatched" not in schedulers.table([row]).as_markdown(), "nothing was replayed"
