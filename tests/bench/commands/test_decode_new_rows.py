"""A decoding step with new rows as it is measured, with ours in the simulator or in PyTorch,
and a timer that counts."""

import pytest
import torch
from fake_timer import CountingTimer
from in_torch import in_torch

from bench.measure import new_rows
from bench.measure.settings import Sampling
from bench.suite import Case

CASE = Case("decode", ((1, 32),) * 2, new_rows.HEADS, new_rows.HEADS_KV, True)


@pytest.fixture(params=["PyTorch", "simulator"])
def here(monkeypatch, request):
    if request.param == "PyTorch":
        in_torch(monkeypatch, new_rows)


@pytest.mark.simulator
@pytest.mark.sampled("PyTorch")
def test_calls_write_where_they_say(here):
    """All kinds have a result; with new rows the last of the keys is another one."""
    calls = new_rows.calls_of(CASE, torch.device("cpu"))
    found = {kind: call() for kind, call in calls.items()}
    assert all(out.isfinite().all() for out in found.values())
    assert not torch.equal(found[new_rows.NONE], found[new_rows.ROWS])
    assert not torch.equal(found[new_rows.ROTATED], found[new_rows.ROWS])
    # Written again behind the rotated one, it is among the keys of a call without new rows.
    calls[new_rows.ROWS]()
    assert torch.equal(calls[new_rows.NONE](), found[new_rows.ROWS])
    assert torch.equal(calls[new_rows.E4M3](), found[new_rows.E4M3_ROWS])


def test_a_row(monkeypatch):
    monkeypatch.setattr(new_rows, "calls_of", lambda *given: dict.fromkeys("abc", None))
    monkeypatch.setattr(new_rows, "ROWS", "b")
    row = new_rows.measured(CASE, CountingTimer(), Sampling(0, 3))
    assert [row[kind] * new_rows.CALLS for kind in "abc"] == pytest.approx([1, 2, 3])
    assert row["shape"] == "2 x 32" and row["basis"] == "measured"
