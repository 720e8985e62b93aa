"""docs/silicon.md: its form, its counts, and that what it names as a check exists."""

from __future__ import annotations

import re

import pytest
from checkout import ROOT

from bench.bringup.stages import STAGES
from sm100_sim.tools import golden

NAMES = {stage.name for stage in STAGES}
STATES = ("checked on silicon", "two independent sources", "unverified")
COLUMNS = ["rule", "if false", "source", "simulator", "relied on by", "check", "state"]
#: In the order of the table.
DANGERS = ("silent", "hang", "fault", "slow")


def rows(text: str) -> list[dict[str, str]]:
    """The rules of the page's table. Raises ValueError for a row of another form."""
    lines = text.splitlines()
    start = lines.index("| " + " | ".join(COLUMNS) + " |")
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) != len(COLUMNS):
            raise ValueError(f"{len(cells)} columns, {len(COLUMNS)} wanted: {line}")
        found.append(dict(zip(COLUMNS, cells, strict=True)))
    return found


def problems(text: str) -> list[str]:
    """Return what is wrong with the page, as sentences."""
    table, wrong = rows(text), []
    counts = {state: sum(row["state"] == state for row in table) for state in STATES}
    for state, count in [*counts.items(), ("all", len(table))]:
        if f"| {state} | {count} |" not in text:
            wrong.append(f"the head does not count {count} rules as {state!r}")
    names = [re.match(r"`([a-z0-9-]+)`: ", row["rule"]) for row in table]
    if None in names or len({match[1] for match in names}) != len(names):
        wrong.append("every rule begins with a name of its own in backquotes and a colon")
    order = [
        next((i for i, d in enumerate(DANGERS) if row["if false"].startswith(d)), None)
        for row in table
    ]
    if None in order or order != sorted(order):
        wrong.append(f"'if false' begins with one of {DANGERS}, and rows are sorted by it")
    for row in table:
        wrong += [f"{row['rule'][:30]}: {text}" for text in _row_problems(row)]
    return wrong


def _row_problems(row: dict[str, str]) -> list[str]:
    state, check = row["state"], row["check"]
    found = []
    if state not in STATES:
        found.append(f"the state {state!r} is none of {STATES}")
    measured = re.findall(r"golden `([^`]+)`", check) + re.findall(r"docs/facts\.md", check)
    if state == "checked on silicon" and not measured:
        found.append("names no golden vector and no measurement of docs/facts.md")
    if state == "two independent sources" and ";" not in row["source"]:
        found.append("names one source")
    stages = re.findall(r"stage `([a-z0-9-]+)`", check)
    if state == "unverified" and not stages and not re.search(r"no stage: \w", check):
        found.append("names no stage of bringup and does not say what would settle it")
    found += [f"no stage is called {stage!r}" for stage in stages if stage not in NAMES]
    for path, name in re.findall(
        r"`((?:tests|bench|lab|sm100_sim|fa4_hd256)/[\w/]+\.py)(?:::(\w+))?`",
        row["simulator"] + check,
    ):
        file = ROOT / path
        if not file.is_file() or name and f"def {name}(" not in file.read_text("utf-8"):
            found.append(f"{path} {name} does not exist")
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
        ("| unverified |\n", "| believed |\n", "is none of"),
        ("golden `tma/`", "golden `no such case/`", "no golden case"),
        ("docs/facts.md; ", "", "names no golden vector and no measurement"),
        ("sm100_sim/tests/isa/test_tma.py", "sm100_sim/tests/test_none.py", "does not exist"),
        ("stage `micro`", "", "names no stage"),
        ("stage `micro`", "stage `macro`", "no stage is called"),
        ("| slow: dK/dV", "| quick: dK/dV", "sorted"),
        ("| `m128-rate`", "| `mma-order`", "name of its own"),
    ],
)
def test_an_error_in_the_page_is_noticed(old, new, complaint):
    assert old in PAGE
    assert any(complaint in text for text in problems(PAGE.replace(old, new, 1)))


def test_a_wrong_count_is_noticed():
    wrong = re.sub(
        r"\| unverified \| (\d+) \|", lambda match: f"| unverified | {int(match[1]) + 1} |", PAGE
    )
    assert any("count" in text for text in problems(wrong))
