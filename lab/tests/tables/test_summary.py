"""The measured figures of docs/benchmarks.md are those of docs/tables."""

from __future__ import annotations

import pytest

from lab.tables import summary


def test_the_page_has_the_figures_of_the_tables():
    """A page that differs is written again by `python -m lab.tables.summary`."""
    text = summary.PAGE.read_text("utf-8")
    assert summary.with_sections(text) == text


@pytest.mark.parametrize("old, new", [("736", "737"), ("821", "781"), ("79.6", "70.6")])
def test_another_figure_is_seen(old, new):
    text = summary.PAGE.read_text("utf-8")
    planted = text.replace(old, new, 1)
    assert planted != text and summary.with_sections(planted) == text


def test_a_section_or_row_that_is_missing_is_refused(tmp_path, monkeypatch):
    text = summary.PAGE.read_text("utf-8")
    with pytest.raises(ValueError, match="no section 'decode'"):
        summary.with_sections(text.replace("<!-- decode:end -->", ""))
    monkeypatch.setattr(summary, "FOLDER", tmp_path)
    (tmp_path / "throughput_h200.md").write_text(
        "| direction | shape | heads | mask |\n|-|-|-|-|\n"
    )
    with pytest.raises(ValueError, match="throughput_h200 has 0 rows of forward"):
        summary.dense()
