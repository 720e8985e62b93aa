"""Repeated calls over KV splits: what is made of their results, and one in the simulator."""

from __future__ import annotations

import itertools

import pytest
import torch
from simulated_target import SIMULATOR

from bench.bringup.outcome import Target
from bench.bringup.stages import decoding

pytestmark = pytest.mark.simulator


@pytest.mark.parametrize(
    ("wrong", "state", "text"),
    [
        ((), "passed", "25 calls, 0 of 4 compared"),
        ((20,), "failed", "25 calls, 1 of 4 compared"),
        ((24,), "failed", "25 calls, 1 of 4 compared"),
        ((0, 10, 20, 24), "failed", "25 calls, 4 of 4 compared"),
    ],
)
def test_every_tenth_call_and_the_last_are_compared(wrong, state, text):
    numbers = itertools.count()
    wanted = (torch.ones(3), torch.zeros(2))

    def results():
        return (torch.ones(3), torch.full((2,), float(next(numbers) in wrong)))

    outcome = decoding.repeated(results, wanted, 25, lambda note: None)
    assert outcome.state == state and text in outcome.text, outcome


@pytest.mark.parametrize(("late", "state"), [(1.0, "not measured"), (2.0, "failed")])
def test_what_ends_early_settles_nothing(monkeypatch, late, state):
    """One call is made, and the clock passes the limit."""
    monkeypatch.setattr(decoding.time, "monotonic", itertools.count(0.0, 200.0).__next__)
    notes = []
    outcome = decoding.repeated(
        lambda: (torch.full((2,), late),), (torch.ones(2),), 25, notes.append
    )
    assert outcome.state == state and outcome.values["calls"] == 1, outcome
    assert notes == ["call 0 of 25, 200.0 s"]


def test_times_are_told_by_rows():
    outcome = decoding.judged_rows({"16": 1e-3, "32": 1.1e-3, "64": 2e-3})
    assert outcome.values == {"of 16 rows": 1.0, "of 32 rows": 1.1, "of 64 rows": 2.0}
    assert "64 rows 2000.0 us" in outcome.text


def test_graphs_and_times_need_a_gpu():
    assert decoding.items(SIMULATOR) == ["repeated calls"]
    assert len(decoding.items(Target("gpu", "NVIDIA B200", (10, 0), 148))) == 3


@pytest.mark.sampled
def test_a_call_in_the_simulator():
    outcome = decoding.run("repeated calls", SIMULATOR, lambda note: None)
    assert outcome.state == "passed", outcome
