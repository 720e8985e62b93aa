"""docs/silicon.md: its form, its counts, and that what it names as a check exists."""

from __future__ import annotations

import re

import pytest
from checkout import ROOT

from bench.bringup.stages import STAGES
from sm100_sim.tools import golden

NAMES = {stage.name for stage in STAGES}
#: State of the rules of a table -> its columns, in the order of the tables.
TABLES = {
    "unverified": ("rule", "if false", "source", "relied on by", "check"),
    "two independent sources": ("rule", "if false", "source", "relied on by", "check"),
    "checked on silicon": ("rule", "if false", "relied on by", "check"),
}
#: In the order of each table.
DANGERS = ("silent", "hang", "fault", "slow")


def rows(text: str, state: str) -> list[dict[str, str]]:
    """The rules of a state. Raises ValueError for a row of another form."""
    columns = TABLES[state]
    lines = text.partition(f"\n### {state}: ")[2].partition("\n#")[0].splitlines()
    start = lines.index("| " + " | ".join(columns) + " |")
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) != len(columns):
            raise ValueError(f"{len(cells)} columns, {len(columns)} wanted: {line}")
        found.append(dict(zip(columns, cells, strict=True)))
    return found


def problems(text: str) -> list[str]:
    """Return what is wrong with the page, as sentences."""
    wrong, names = [], []
    for state in TABLES:
        table = rows(text, state)
        if f"\n### {state}: {len(table)} rules\n" not in text:
            wrong.append(f"the heading of {state!r} does not count {len(table)} rules")
        names += [re.match(r"`([a-z0-9-]+)`: ", row["rule"]) for row in table]
        order = [
            next((i for i, d in enumerate(DANGERS) if row["if false"].startswith(d)), None)
            for row in table
        ]
        if None in order or order != sorted(order):
            wrong.append(f"'if false' begins with one of {DANGERS}, and rows are sorted by it")
        for row in table:
            wrong += [f"{row['rule'][:30]}: {text}" for text in _row_problems(row, state)]
    if None in names or len({match[1] for match in names}) != len(names):
        wrong.append("every rule begins with a name of its own in backquotes and a colon")
    return wrong


def _row_problems(row: dict[str, str], state: str) -> list[str]:
    check = row["check"]
    found = []
    measured = re.findall(r"golden `([^`]+)`|^(facts)\b", check)
    if state == "checked on silicon" and not measured:
        found.append("names no golden vector and no measurement of docs/facts.md")
    if state == "two independent sources" and ";" not in row["source"]:
        found.append("names one source")
    stages = re.findall(r"stage `([a-z0-9-]+)`", check)
    if state == "unverified" and not stages:
        found.append("names no stage of bringup that would settle it")
    found += [f"no stage is called {stage!r}" for stage in stages if stage not in NAMES]
    for path in re.findall(r"`((?:tests|bench|lab|sm100_sim|fa4_hd256)/[\w/]+\.py)`", check):
        if not (ROOT / path).is_file():
            found.append(f"{path} does not exist")
    recorded = golden.Vectors().manifest["cases"]
    for prefix in re.findall(r"golden `([^`]+)`", check):
        if not any(name.startswith(prefix) for name in recorded):
            found.append(f"no golden case is called {prefix!r}")
    return found


PAGE = (ROOT / "docs" / "silicon.md").read_text("utf-8")


def test_the_page():
    assert problems(PAGE) == []


@pytest.mark.parametrize(
    "old, new, complaint",
    [
        ("golden `tma/`", "golden `no such case/`", "no golden case"),
        ("facts; `sm100_sim", "`sm100_sim", "names no golden vector and no measurement"),
        ("sm100_sim/tests/isa/test_tma.py", "sm100_sim/tests/test_none.py", "does not exist"),
        ("stage `micro`", "", "names no stage"),
        ("stage `micro`", "stage `macro`", "no stage is called"),
        ("; CuTe's descriptor |", " |", "names one source"),
        ("| slow: dK/dV", "| quick: dK/dV", "sorted"),
        ("| `m128-rate`", "| `mma-order`", "name of its own"),
        ("unverified: 14 rules", "unverified: 15 rules", "count"),
    ],
)
def test_an_error_in_the_page_is_noticed(old, new, complaint):
    assert old in PAGE
    assert any(complaint in text for text in problems(PAGE.replace(old, new, 1)))
