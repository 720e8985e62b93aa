"""Decoding over K and V in e4m3 as it is modelled."""

import json

import numpy as np
import pytest

from bench.__main__ import main
from bench.suite import Case
from bench.tables.comparison import OURS
from lab.model.predictor import OURS_E4M3, OURS_NVFP4, Predicted
from lab.modelled import decode
from sm100_sim.timing import load

CASE = Case("kv types", ((2, 140),) * 2, 4, 2, True)


class FakePredictor:
    """Ours takes 30 and 20 microseconds, over e4m3 20 and 16, over NVFP4 15 and 16, under two sets
    of constants."""

    machine = load("b200")

    class Provider:
        def __init__(self, parts):
            self.parts = parts

        def default(self, case, direction, machine):
            return "kernel", self.parts

    providers = {OURS: Provider(3), OURS_E4M3.name: Provider(5), OURS_NVFP4.name: Provider(6)}
    times = {OURS: [30.0, 20.0], OURS_E4M3.name: [20.0, 16.0], OURS_NVFP4.name: [15.0, 16.0]}

    def predict(self, provider, case, direction):
        return Predicted(*[np.array(self.times[provider]) * 1e-6] * 2, None)


def test_a_row_of_a_prediction(monkeypatch):
    monkeypatch.setattr(decode, "PROVIDERS", FakePredictor.providers)
    row = decode.kv_types_row(CASE, FakePredictor())
    assert (row["bf16"], row["e4m3"], row["NVFP4"]) == pytest.approx((30, 20, 15))
    for kind, wanted in (("e4m3", (1.5, 1.25, 1.5)), ("NVFP4", (2, 1.25, 2))):
        ratios = [row[f"{name}_{kind}"] for name in ("ratio", "least", "most")]
        assert ratios == pytest.approx(wanted)
    assert [row[f"parts_{kind}"] for kind in ("bf16", "e4m3", "NVFP4")] == [3, 5, 6]
    assert row["rows"] == 16
    # 2 sequences of 140 keys and values of two heads over 8 TB/s.
    least = 2 * 140 * 2 * 2 * 256 / 8e12
    assert row["hbm_e4m3"] == pytest.approx(least / 20e-6)
    assert row["hbm_bf16"] == pytest.approx(2 * least / 30e-6)
    assert row["hbm_NVFP4"] == pytest.approx(0.5625 * least / 15e-6)
    assert (row["basis"], row["shape"], row["heads"]) == ("modelled", CASE.shape, "4/2")
    text = decode.kv_types_table([row]).as_markdown()
    assert "2x(2, 140)" in text and "parts, e4m3" in text


class PagesPredictor(FakePredictor):
    """A call takes 10 microseconds, in pages of n rows 1 / n of it longer, 2 / n at worst."""

    def predict(self, provider, case, direction):
        longer = np.array([1.0, 2.0]) / case.page_size if case.page_size else np.zeros(2)
        seconds = (1 + longer) * 1e-5
        return Predicted(seconds, seconds, None)


def test_a_row_of_pages():
    row = decode.pages_row(CASE, PagesPredictor())
    assert [row[name] for name in ("none", "pages_128", "pages_16")] == pytest.approx(
        [10, 10 * 129 / 128, 10.625]
    )
    assert (row["behind_128"], row["behind_16"]) == pytest.approx((1 / 128, 1 / 16))
    assert row["worst"] == pytest.approx(1 / 8)
    assert "pages of 16 over none" in decode.pages_table([row]).as_markdown()


@pytest.mark.simulator
@pytest.mark.sampled
def test_a_modelled_row(capsys, tmp_path):
    """Fewer bytes at HBM's rate, and in NVFP4 by what a step takes, with tiles of 16 rows."""
    found = tmp_path / "found.json"
    command = ["decode", "kv-types", "--modelled", "--draws", "0", "--only", "128x(1, 131072)"]
    assert main([*command, "--json", str(found)]) == 0
    (row,) = json.loads(found.read_text())["tables"][0]["rows"]
    assert row["rows"] == 16 and row["basis"] == "modelled"
    assert row["bf16"] == pytest.approx(row["e4m3"] * row["ratio_e4m3"])
    assert 1.9 < row["ratio_e4m3"] < 2 < row["ratio_NVFP4"] < 32 / 9
    for kind in ("e4m3", "NVFP4"):
        assert row[f"least_{kind}"] == row[f"ratio_{kind}"] == row[f"most_{kind}"]
    assert 0.75 < row["hbm_e4m3"] < row["hbm_bf16"] < 1
