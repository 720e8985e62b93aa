"""`bench host` without a GPU: all but the launch."""

from __future__ import annotations

import pytest

from bench.commands import host as command
from bench.measure import host

pytestmark = pytest.mark.simulator


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(host, "REPETITIONS", 3)
    monkeypatch.setattr(host, "CALLS", 4)


@pytest.mark.parametrize("name", ["forward, no gradients", "packed forward"])
@pytest.mark.sampled("packed forward")
def test_rows(name, quick):
    """A row of ours, beside an empty loop; nothing real is launched."""
    (row,) = command.measure(name).rows
    assert row["provider"] == "ours" and "stand-in" in row["machine"]
    assert 0 < row["low"] <= row["median"] <= row["high"]
    assert 0 < row["loop"] < 1000 < 1e3 * row["median"]


def test_a_backward_stands_beside_one_that_computes_nothing(quick):
    rows = command.measure("packed backward").rows
    assert [row["provider"] for row in rows] == ["ours", "autograd alone"]
    assert rows[1]["median"] < rows[0]["median"]


def test_the_stand_in_is_taken_away_again(quick):
    from fa4_hd256 import plans
    from fa4_hd256.run import execute, launch

    before = launch.host_function, execute.compile_kernel, plans.repeats
    with host.stand_in():
        assert launch.host_function is not before[0] and execute.compile_kernel is not before[1]
    assert (launch.host_function, execute.compile_kernel, plans.repeats) == before


def test_a_call_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="no call has 'nope' in its name; there are: "):
        command.measure("nope")
