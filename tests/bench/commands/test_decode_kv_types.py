"""Decoding over K and V in e4m3 beside bf16 as it is measured, with ours in the simulator or in
PyTorch and a timer that counts, and as it is modelled."""

import pytest
import torch
from fake_timer import CountingTimer
from in_torch import in_torch

from bench.decode import kv_types
from bench.measure.timer import Sampling
from bench.suite import Case

CASE = Case("kv types", ((2, 140),) * 2, 4, 2, True)


class Timer(CountingTimer):
    """A call over e4m3 takes a microsecond, one over bf16 two."""

    def seconds(self, call):
        return (2 - self.prepared.index(call)) * 1e-6


@pytest.fixture(params=["PyTorch", "simulator"])
def here(monkeypatch, request):
    """Let ours run where there is no GPU."""
    if request.param == "PyTorch":
        in_torch(monkeypatch)
    monkeypatch.setattr(kv_types.Ours, "missing", lambda self: None)


def test_both_caches_hold_the_same_numbers():
    of_bf16, of_e4m3 = kv_types._inputs(CASE, torch.device("cpu"))
    assert of_bf16.k.dtype == torch.bfloat16 and of_e4m3.k.dtype == torch.float8_e4m3fn
    assert torch.equal(of_bf16.k, of_e4m3.k.bfloat16())
    assert torch.equal(of_bf16.v, of_e4m3.v.bfloat16())
    assert torch.equal(of_bf16.q, of_e4m3.q)


@pytest.mark.simulator
@pytest.mark.sampled("PyTorch")
def test_a_row(here):
    row = kv_types.measured(CASE, Timer(), Sampling(0, 3))
    assert (row["bf16"], row["e4m3"], row["ratio"]) == pytest.approx((2, 1, 2))
    assert row["rate_e4m3"] == pytest.approx(row["rate_bf16"])
    # 2 sequences of 140 keys and values of two heads, 1 byte an element, in a microsecond.
    assert row["rate_e4m3"] == pytest.approx(2 * 140 * 2 * 2 * 256 / 1e-6 / 1e12)
    assert (row["range_bf16"], row["range_e4m3"]) == ("2.0..2.0", "1.0..1.0")
    assert (row["clock_mhz"], row["power_watts"]) == (2000, 600)
    assert row["refused"] == "" and not row["failed"]
    assert "2x(2, 140)" in kv_types.table([row]).as_markdown()


@pytest.mark.simulator
@pytest.mark.sampled("PyTorch")
def test_wrong_results_are_not_timed(here, monkeypatch):
    call = kv_types.Ours.call
    monkeypatch.setattr(
        kv_types.Ours, "call",
        lambda self, inputs: call(self, inputs) + float(inputs.k.dtype == torch.float8_e4m3fn),
    )  # fmt: skip
    row = kv_types.measured(CASE, Timer(), Sampling(0, 1))
    assert row["e4m3"] is None and row["ratio"] is None
    assert row["failed"] and row["refused"].startswith("e4m3: wrong: error")
