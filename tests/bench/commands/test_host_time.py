"""`bench host` without a GPU: all but the launch."""

from __future__ import annotations

import pytest

from bench.commands import host as command
from bench.measure import host

pytestmark = pytest.mark.simulator


@pytest.fixture
def quick(monkeypatch):
    """Few repetitions."""
    monkeypatch.setattr(host, "REPETITIONS", 3)
    monkeypatch.setattr(host, "CALLS", 4)


@pytest.mark.parametrize("name", ["forward, no gradients", "packed forward"])
@pytest.mark.sampled("packed forward")
def test_rows(name, quick):
    """A call that came before takes less than one on the long way, and launches nothing real."""
    table = command.measure(name)
    found = {row["how"]: row for row in table.rows}
    assert set(found) == {"came before", "long way"}
    assert found["came before"]["median"] < found["long way"]["median"] / 2
    assert "allocation" in found["came before"]["parts"]
    assert "validation" in found["long way"]["parts"]
    assert all(0 < row["loop"] < 1000 < 1e3 * row["median"] for row in table.rows)
    assert "stand-in" in found["came before"]["machine"]


def test_the_stand_in_is_taken_away_again(quick):
    from fa4_hd256 import plans
    from fa4_hd256.run import launch

    before = launch.host_function, plans.repeats
    with host.stand_in():
        assert launch.host_function is not before[0]
    assert (launch.host_function, plans.repeats) == before


def test_a_call_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="no call has 'nope' in its name; there are: "):
        command.measure("nope")
