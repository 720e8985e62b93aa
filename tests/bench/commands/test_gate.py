"""`bench gate` without a GPU: its calls in PyTorch, its check, its rows under timers that count."""

from __future__ import annotations

import pytest
import torch
from fake_timer import CountingTimer
from in_torch import in_torch

from bench.commands import gate as gates
from bench.commands.gate import PASSES
from bench.measure.settings import Sampling
from bench.suite import FORWARD, Case

CPU = torch.device("cpu")
CASE = Case("gates", ((48, 48),) * 2, 4, 2, True)


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """No kernel, and no compiler of PyTorch's."""
    in_torch(monkeypatch, gates)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@pytest.mark.parametrize("passes", PASSES)
def test_calls_are_of_one_gate(passes):
    """All ways to apply a gate of each element agree; that of heads has another."""
    inputs, gate, calls = gates.calls_of(CASE, passes, CPU)
    assert list(calls) == [gates.NONE, *gates.GATED]
    assert gates.failure(inputs, gate, calls) is None
    found = {name: call() for name, call in calls.items()}
    if passes != FORWARD:
        gated = [len(found[name]) for name in gates.GATED]
        assert len(found[gates.NONE]) == 4 and gated == [5] * len(gates.GATED)
        found = {name: results[0] for name, results in found.items()}
    torch.testing.assert_close(found[gates.FUSED], found[gates.EAGER], rtol=2**-6, atol=1e-6)
    assert torch.equal(found[gates.COMPILED], found[gates.EAGER])
    assert not torch.equal(found[gates.OF_HEADS], found[gates.FUSED])


def test_a_wrong_gate_is_told_and_not_timed(monkeypatch):
    """One element of the gated result is another one's."""
    right = gates.flash_attn_func

    def wrong(*inputs, out_gate=None, **options):
        out = right(*inputs, out_gate=out_gate, **options)
        if out_gate is not None:
            out[0, 0, 0, 0] += 1
        return out

    monkeypatch.setattr(gates, "flash_attn_func", wrong)
    (row,) = gates.measured((CASE, FORWARD), {"warm": CountingTimer()}, Sampling(0, 3))
    assert row["failed"] and row["status"].startswith("wrong: 1 elements of the gated result")
    gates.table([row]).as_markdown()


@pytest.mark.parametrize("passes", PASSES)
def test_rows(passes):
    """Each state of L2 has a row; a call takes a microsecond more than the one before it."""
    timers = {"cold": CountingTimer(), "warm": CountingTimer()}
    rows = gates.measured((CASE, passes), timers, Sampling(1, 4))
    assert len(rows) == 2 and not any(row["failed"] for row in rows)
    for row in rows:
        added = [row[f"{name}: adds"] for name in gates.GATED]
        assert row[gates.NONE] == pytest.approx(1) and added == pytest.approx([1, 2, 3, 4])
        assert (row["range"], row["runs"], row["status"]) == ("+1.0 to +1.0", 4, "ok")
    assert "| warm |" in gates.table(rows).as_markdown()
