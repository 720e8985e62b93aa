"""The page made of other commands' results."""

import re
from html.parser import HTMLParser

import pytest

from bench.__main__ import main
from bench.tables import results
from bench.tables.table import Column, Plot, Table

pytest.importorskip("cutlass")


def table(name: str, basis: str, machine: str) -> Table:
    rows = [
        {"what": f"<{name}> & more", "tflops": value, "basis": basis, "machine": machine}
        for value in (1234.5, None)
    ]
    columns = (Column("what"), Column("tflops", "TFLOPS", ".0f"))
    notes = ("One line.", "two\nlines <b>")
    return Table(name, f"Title of {name}", columns, rows, notes, Plot("what", "tflops"),
                 {"python": "3"})  # fmt: skip


class Balanced(HTMLParser):
    """Raises where a tag closes another one than the last opened; collects text and sources."""

    EMPTY = ("meta", "img")

    def __init__(self) -> None:
        super().__init__()
        self.open, self.text, self.sources = [], [], []

    def handle_starttag(self, tag, attributes):
        if tag not in self.EMPTY:
            self.open.append(tag)
        self.sources += [v for k, v in attributes if k in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_a_page_of_several_results(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    measured, modelled = table("one", "measured", "a GPU"), table("two", "modelled", "B200")
    (tmp_path / "a.json").write_text(results.json_text([measured, modelled]))
    (tmp_path / "b.json").write_text('{"exp2": []}')
    assert main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "b.json is left out" in said and "report.html, 2 tables" in said
    parser = Balanced()
    parser.feed((tmp_path / "report.html").read_text())
    assert parser.open == []
    text = "".join(parser.text)
    assert text.count("<one> & more") == 2 and "1234" in text and "lines <b>" in text
    assert "measured" in parser.text and "modelled" in parser.text
    # Plots lead.
    page = (tmp_path / "report.html").read_text()
    assert page.index("<h2>Plots") < page.index("<img") and page.rindex("<img") < page.index("<tr")
    # Nothing is loaded from elsewhere.
    assert all(re.match(r"#t\d|data:image/svg", source) for source in parser.sources)
    assert sum(source.startswith("data:") for source in parser.sources) == 2


def test_a_directory_without_results_is_an_error(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no result; write some there" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "absent")]) == 2
    assert not (tmp_path / "report.html").exists()
