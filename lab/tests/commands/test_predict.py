"""`python -m lab predict`: errors by row and by whether a row was known before."""

import pytest

from lab.commands import predict
from lab.model.hopper import rows as hopper_rows
from lab.model.hopper.attention import Times

KNOWN = "fa4_hd256 forward: 4x4096, 16/16, full"
UNSEEN = "fa4_hd256 forward: 5x3072, 16/16, full"
DECODING = "fa4_hd256 forward: 1x(1, 131072), 32/2, causal"


@pytest.fixture
def fixed(monkeypatch):
    """Every row takes a millisecond, 1.1 sustained, and a million clocks; measured is what is said
    here."""
    times = Times(clocks=1e6, busy=0.9, seconds=1e-3, for_good=1.1e-3)
    monkeypatch.setattr(hopper_rows.Row, "times", lambda row, clocks: times)
    found = {
        KNOWN: {"first": [800.0, 1600.0], "late": [1000.0, 1400.0], "clocks": 800_000},
        UNSEEN: {"first": [1250.0, 1600.0], "late": [1250.0, 1400.0]},
        DECODING: {"us": 1000.0, "from": "a test"},
    }
    monkeypatch.setattr(hopper_rows, "measured", lambda: found)


def test_first_launches_and_those_for_good_each_have_an_error(fixed):
    """An empty graph takes 4.25 us beside the launch that the model has."""
    table = predict.predictions()
    rows = {row["row"]: row for row in table.rows}
    known, unseen, decoding = (rows[name] for name in (KNOWN, UNSEEN, DECODING))
    assert known["first"] == pytest.approx(1004.25) and known["late"] == pytest.approx(1104.25)
    assert known["first_error"] == pytest.approx(0.2553, abs=1e-4)
    assert known["late_error"] == pytest.approx(0.10425)
    assert known["clock_error"] == pytest.approx(0.25) and known["ghz"] == pytest.approx(1.4)
    assert unseen["late_error"] == pytest.approx(-0.1166) and unseen["clock_error"] is None
    assert decoding["first_error"] == pytest.approx(0.00425) and decoding["late_error"] is None
    notes = " ".join(table.notes)
    assert "prediction: no: times for good of 1 rows, within 10 % 0, mean -11.7%" in notes
    assert "before the prediction: yes: clocks of 1 rows, within 10 % 0, mean +25.0%" in notes


def test_rows_are_chosen_by_name(fixed):
    table = predict.predictions("head_dim 128")
    assert len(table.rows) == 12
