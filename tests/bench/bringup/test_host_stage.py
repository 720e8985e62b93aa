"""The stage of the host time, without launches."""

from __future__ import annotations

import pytest

from bench.bringup.outcome import Target
from bench.bringup.stages import host as stage
from bench.measure import host

HERE = Target("simulator", "a CPU", (10, 0), 148)

pytestmark = pytest.mark.simulator


def test_a_call_is_measured_and_its_quartiles_are_told(monkeypatch):
    monkeypatch.setattr(host, "REPETITIONS", 3)
    assert "packed forward" in stage.items(HERE)
    said = []
    with host.stand_in():
        outcome = stage.run("packed forward", HERE, said.append)
    assert (outcome.state, said) == ("measured", ["packed forward"])
    values = outcome.values
    assert 0 < values["low"] <= values["value"] <= values["high"]
    assert values["unit"] == "microseconds" and " us a call (" in outcome.text


def test_a_simulated_call_has_no_host_time():
    assert "needs a GPU" in stage.missing(HERE)
