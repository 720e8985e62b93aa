"""Rows appear on stderr as each is ready, where somebody waits; all of them are returned."""

from __future__ import annotations

import re

import pytest

from bench.tables import ready
from bench.tables.table import Column

COLUMNS = (Column("shape"), Column("tflops", "TFLOPS", ".0f", "ours"))
ROWS = [{"shape": "8x4096", "tflops": 716.4}, {"shape": "a|b", "tflops": None}]


@pytest.mark.parametrize(("wanted", "shown", "bar"), [
    (None, True, False), ("1", True, True), ("0", False, False),
])  # fmt: skip
def test_rows_are_printed_as_each_is_ready(wanted, shown, bar, monkeypatch, capfd):
    monkeypatch.delenv("FA4_HD256_PROGRESS", raising=False)
    if wanted is not None:
        monkeypatch.setenv("FA4_HD256_PROGRESS", wanted)
    monkeypatch.setattr(ready, "LATER", 0.0)
    seen = []

    def rows():
        for row in ROWS:
            seen.append(capfd.readouterr().err)
            yield row

    assert ready.ready(rows(), 2, COLUMNS) == ROWS
    out, last = capfd.readouterr()
    assert out == "" and ("| 8x4096 | 716" in seen[1]) == shown
    assert ("| shape | ours (TFLOPS) |" in seen[1]) == shown
    assert bool(re.search(r"\| a\\\|b +\| - ", last)) == shown
    assert all(("left" in text) == bar for text in (seen[1], last))
    if bar:
        assert "replaying" in seen[0] and "2 left" in seen[0] and "0 left" in last


def test_a_command_that_is_quick_prints_its_table_alone(monkeypatch, capfd):
    monkeypatch.delenv("FA4_HD256_PROGRESS", raising=False)
    monkeypatch.setattr(ready, "LATER", 100.0)
    assert ready.ready(iter(ROWS), 2, COLUMNS) == ROWS
    assert capfd.readouterr() == ("", "")


def test_results_that_make_several_rows(monkeypatch, capfd):
    monkeypatch.delenv("FA4_HD256_PROGRESS", raising=False)
    monkeypatch.setattr(ready, "LATER", 0.0)
    found = ready.results(iter([2, 0]), 2, COLUMNS, lambda count: ROWS[:count])
    assert list(found) == [2, 0]
    assert len(capfd.readouterr().err.splitlines()) == 3
