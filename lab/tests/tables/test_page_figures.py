"""Figures that lab/docs/timing.md repeats are those of the table beside it."""

import re

import pytest
from checkout import ROOT

from lab.tables.documents import path_of

TIMING = ROOT / "lab" / "docs" / "timing.md"


def rows_of(text):
    """Each Markdown table as a list of dictionaries by heading."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        heading, _, *lines = (
            [cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()
        )
        found.append([dict(zip(heading, line, strict=True)) for line in lines])
    return found


def table(name):
    return rows_of(path_of(name).read_text("utf-8"))[0]


def page_rows(text, heading):
    """Return the page's table whose first heading begins so: its first column -> cells by
    heading."""
    (found,) = [rows for rows in rows_of(text) if next(iter(rows[0])).startswith(heading)]
    return {next(iter(row.values())): dict(list(row.items())[1:]) for row in found}


#: Aims as the table of lab/docs/timing.md names them -> as lab/docs/tables/validate_aims.md does.
AIMS = {
    "rows that count within 10 %": "rows at 1k to 32k within 10 %, rms 5 %, at the machine's clock",
    "the same at clocks fitted": "the same at fitted clocks",
    "of these the half of the test": "the same, the half of the test alone",
    "cuDNN's CuTe DSL forward": "cuDNN's CuTe DSL forward within 8 %, at the machine's clock",
    "ratios of builds": "ratios of kernels on one machine within 2 points rms",
    "GB300 over GB200": "GB300 over GB200 within 4 points",
}


def in_words(row):
    """Format a figure as the page has it: 107 of 109, 3.8 %."""
    found = row["found"].replace("%", " %").replace("rms ", "")
    inside, _, spread = found.rpartition(", ")
    return f"{inside.split()[0]} of {row['rows']}, {spread}" if inside else spread


def check_aims(text):
    printed = {row["aim"]: row for row in table("validate_aims")}
    shown = page_rows(text, "aim")
    for begin, aim in AIMS.items():
        (cells,) = [cells for name, cells in shown.items() if name.startswith(begin)]
        assert cells["now"].removesuffix(" rms").removesuffix(" %") == in_words(
            printed[aim]
        ).removesuffix(" %"), begin


def test_the_aims_are_those_of_the_table():
    check_aims(TIMING.read_text("utf-8"))


@pytest.mark.parametrize("figure", ["107 of 109, 3.8 %", "36 of 38", "| 2.3 |", "13 of 20"])
def test_another_aim_is_seen(figure):
    text = TIMING.read_text("utf-8")
    assert figure in text
    with pytest.raises(AssertionError):
        check_aims(text.replace(figure, figure.replace("3", "9").replace("14", "15")))
