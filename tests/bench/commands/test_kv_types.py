"""Decoding over K and V in e4m3 beside bf16 as it is measured, with ours in the simulator or in
PyTorch and a timer that counts, and as it is modelled."""

import json

import numpy as np
import pytest
import torch
from fake_timer import CountingTimer
from in_torch import in_torch

from bench.__main__ import main
from bench.commands import kv_types
from bench.measure.timer import Sampling
from bench.suite import Case
from bench.tables.comparison import OURS
from lab.model.predictor import OURS_E4M3, Predicted
from sm100_sim.timing import load

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
    assert row["refused"] == ""
    assert "2x(2, 140)" in kv_types.measured_table([row]).as_markdown()


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
    assert row["refused"].startswith("e4m3: wrong: error")


class FakePredictor:
    """Ours takes 30 and 20 microseconds, over e4m3 20 and 16, under two sets of constants."""

    machine = load("b200")

    class Provider:
        def __init__(self, parts):
            self.parts = parts

        def default(self, case, direction, machine):
            return "kernel", self.parts

    providers = {OURS: Provider(3), OURS_E4M3.name: Provider(5)}

    def predict(self, provider, case, direction):
        seconds = {OURS: [30.0, 20.0], OURS_E4M3.name: [20.0, 16.0]}[provider]
        return Predicted(*[np.array(seconds) * 1e-6] * 2, None)


def test_a_row_of_a_prediction():
    row = kv_types.modelled(CASE, FakePredictor())
    assert (row["bf16"], row["e4m3"]) == pytest.approx((30, 20))
    assert (row["ratio"], row["least"], row["most"]) == pytest.approx((1.5, 1.25, 1.5))
    assert (row["parts_bf16"], row["parts_e4m3"]) == (3, 5) and row["rows"] == 16
    # 2 sequences of 140 keys and values of two heads over 8 TB/s.
    least = 2 * 140 * 2 * 2 * 256 / 8e12
    assert row["hbm_e4m3"] == pytest.approx(least / 20e-6)
    assert row["hbm_bf16"] == pytest.approx(2 * least / 30e-6)
    assert (row["basis"], row["shape"], row["heads"]) == ("modelled", CASE.shape, "4/2")
    text = kv_types.table([row]).as_markdown()
    assert "2x(2, 140)" in text and "parts, e4m3" in text


@pytest.mark.simulator
@pytest.mark.sampled
def test_a_modelled_row(capsys, tmp_path):
    """Half of the bytes at HBM's rate, with tiles of 16 rows."""
    found = tmp_path / "found.json"
    case = ["--only", "128x(1, 131072)"]
    assert main(["kv-types", "--modelled", "--draws", "0", *case, "--json", str(found)]) == 0
    (row,) = json.loads(found.read_text())["tables"][0]["rows"]
    assert row["rows"] == 16 and row["basis"] == "modelled"
    assert row["bf16"] == pytest.approx(row["e4m3"] * row["ratio"])
    assert 1.9 < row["ratio"] < 2 and row["least"] == row["ratio"] == row["most"]
    assert 0.75 < row["hbm_e4m3"] < row["hbm_bf16"] < 1
