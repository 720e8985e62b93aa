"""`python -m bench predict`: errors by row and by whether a row was known before."""

import pytest

from bench.commands import predict
from bench.model import hopper_rows
from bench.model.hopper_attention import Times

KNOWN = "fa4_hd256 forward: 4x4096, 16/16, full"
UNSEEN = "fa4_hd256 forward: 5x3072, 16/16, full"


@pytest.fixture
def fixed(monkeypatch):
    """Every row takes a millisecond, 1.1 for good, and a million clocks; measured is what is said
    here."""
    times = Times(clocks=1e6, busy=0.9, seconds=1e-3, for_good=1.1e-3)
    monkeypatch.setattr(hopper_rows.Row, "times", lambda row: times)
    found = {
        KNOWN: {"us": 1000.0, "from": "a test", "clocks": 800_000},
        UNSEEN: {"us": 1250.0, "from": "a test", "launches": 20},
    }
    monkeypatch.setattr(hopper_rows, "measured", lambda: found)


def test_errors_by_the_load_before_a_row(fixed):
    """72 launches of a millisecond are more than the first clock lasts, 20 are not; an empty graph
    takes 4.25 us beside the launch that the model has."""
    table = predict.predictions()
    rows = {row["row"]: row for row in table.rows}
    assert rows[KNOWN]["predicted"] == pytest.approx(1104.25)
    assert rows[KNOWN]["error"] == pytest.approx(0.10425)
    assert rows[KNOWN]["clock_error"] == pytest.approx(0.25)
    assert rows[UNSEEN]["predicted"] == pytest.approx(1004.25)
    assert rows[UNSEEN]["error"] == pytest.approx(-0.1966)
    assert rows[UNSEEN]["clock_error"] is None
    notes = " ".join(table.notes)
    assert "before the prediction: no: times of 1 rows, within 10 % 0, mean -19.7%" in notes
    assert "before the prediction: yes: clocks of 1 rows, within 10 % 0, mean +25.0%" in notes


def test_rows_are_chosen_by_name(fixed):
    table = predict.predictions("head_dim 128")
    assert len(table.rows) == 6
