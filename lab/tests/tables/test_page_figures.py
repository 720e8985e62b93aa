"""Figures that lab/docs/throughput.md and timing.md repeat are those of the tables beside them."""

import re

import pytest
from checkout import ROOT

from lab.tables.documents import path_of

PAGE = ROOT / "lab" / "docs" / "throughput.md"
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


def length_of(shape):
    """A shape's length as the page's headings have it: 512, 2k, (64, 1); packed 2x8192 as 2x8192,
    ragged ones by their number."""
    if "packed" in shape or "ragged" in shape:
        return shape.removeprefix("packed ").split(",")[0]
    text = shape.split("x", 1)[1]
    return text if "(" in text or int(text) < 1024 else f"{int(text) // 1024}k"


def summarised(name, **of):
    """Length -> cell of the page, of the rows of a table with these values."""
    found = {}
    for row in table(name):
        if all(row[key] == value for key, value in of.items()):
            length, ratio = length_of(row["shape"]), row["best peer / ours"]
            ratio = f"**{ratio}**" if row["faster"] == "ours" else ratio
            found[length] = f"{ratio} ({row['probability'].replace('%', ' %')})"
    return found


def page_rows(text, heading):
    """Return the page's table whose first heading begins so: its first column -> cells by
    heading."""
    (found,) = [rows for rows in rows_of(text) if next(iter(rows[0])).startswith(heading)]
    return {next(iter(row.values())): dict(list(row.items())[1:]) for row in found}


def check_lengths(text):
    shown = page_rows(text, "B200, heads 8/8")
    assert len(shown) == 4
    for name, cells in shown.items():
        direction, mask = name.split(", ")
        printed = summarised("throughput", direction=direction, mask=mask)
        assert cells == {length: printed[length] for length in cells}, name


def check_one_sequence(text):
    shown = page_rows(text, "one causal sequence")
    assert len(shown) == 6
    for name, cells in shown.items():
        machine, direction = name.split(", ")
        suffix = "one_sequence" if machine == "B200" else machine.lower()
        assert cells == summarised(f"throughput_{suffix}", direction=direction), name


def check_windows(text):
    shown = page_rows(text, "forward, window")
    assert len(shown) == 3
    for left, cells in shown.items():
        of = {"direction": "forward", "mask": f"window ({left}, 0)"}
        assert cells == summarised("throughput_windows", **of), left


def check_unequal(text):
    shown = page_rows(text, "8 x (queries, keys)")
    assert len(shown) == 4
    for name, cells in shown.items():
        direction, mask = name.split(", ")
        assert cells == summarised("throughput_unequal", direction=direction, mask=mask), name


def check_varlen(text):
    shown = page_rows(text, "packed, causal")
    assert len(shown) == 2
    for direction, cells in shown.items():
        printed = summarised("throughput_varlen", direction=direction)
        assert cells == {length: printed[length] for length in cells}, direction


def check_prompts(text):
    shown = page_rows(text, "B200, one causal prompt")
    assert len(shown) == 3
    for name, cells in shown.items():
        assert cells == summarised("throughput_prompts", heads=name.removeprefix("heads ")), name


#: Check -> a ratio that the page has of it.
CHECKS = {
    check_lengths: "1.74", check_one_sequence: "1.30", check_windows: "1.97", check_unequal: "2.50",
    check_varlen: "1.92", check_prompts: "1.12",
}  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
def test_the_page_repeats_the_tables(check):
    check(PAGE.read_text("utf-8"))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("planted", ["a ratio", "a probability", "ahead"])
def test_another_figure_is_seen(check, planted):
    text, first = PAGE.read_text("utf-8"), CHECKS[check]
    old, new = {
        "a ratio": (f"**{first}** (100 %)", "**1.99** (100 %)"),
        "a probability": (f"**{first}** (100 %)", f"**{first}** (98 %)"),
        "ahead": (f"**{first}** (100 %)", f"{first} (100 %)"),
    }[planted]
    assert old in text
    with pytest.raises(AssertionError):
        check(text.replace(old, new))


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
