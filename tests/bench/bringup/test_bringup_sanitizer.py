"""The stage of the sanitizers: what compute-sanitizer says is understood; the simulator's runs."""

from __future__ import annotations

import stat
from collections import deque
from functools import partial
from pathlib import Path

import pytest
from simulated_target import SIMULATOR

from bench.bringup.outcome import Target
from bench.bringup.stages import planted, sanitizer
from fa4_hd256.kernels.backward import key_tiles
from sm100_sim import launcher, report
from sm100_sim.tools.golden import replay

pytestmark = pytest.mark.simulator

#: Takes the tool's place: runs what is behind its options, says what it is told to say.  Where that
#: fails the step it runs nothing.
_TOOL = """#!/bin/sh
case "{summary}" in *" 0 errors"|*"(0 errors, 0 warnings)")
    while [ "$1" != "{python}" ]; do shift; done
    "$@"
esac
echo "========= {summary}"
exit {status}
"""


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """A function that puts a tool with a given summary and status on the PATH."""
    import os
    import sys

    def make(summary: str, status: int) -> None:
        path = tmp_path / sanitizer.TOOL
        path.write_text(_TOOL.format(python=sys.executable, summary=summary, status=status))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return make


@pytest.mark.parametrize(
    ("summary", "status", "state"),
    [("ERROR SUMMARY: 0 errors", 0, "passed"),
     ("ERROR SUMMARY: 3 errors", sanitizer.FOUND, "failed"),
     ("ERROR SUMMARY: 1 error", 0, "failed"),
     ("ERROR SUMMARY: 10 errors", 0, "failed"),
     ("RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0, "passed"),
     ("RACECHECK SUMMARY: 3 hazards displayed (0 errors, 3 warnings)", 0, "failed"),
     ("no summary at all", 0, "failed")],
)  # fmt: skip
def test_the_tools_word_counts(tool, summary, status, state):
    tool(summary, status)
    found = sanitizer._under("memcheck", "answers", "triples", SIMULATOR)
    assert found.state == state, found


def test_a_wrong_result_counts_where_the_tool_is_content(tool):
    tool("ERROR SUMMARY: 0 errors", 0)
    assert sanitizer._under("memcheck", "planted", "wrong", SIMULATOR).state == "failed"


GPU = Target("gpu", "a GPU", (9, 0), 132)


def test_a_tool_that_finds_nothing_fails_on_the_planted_fault(tool):
    tool("ERROR SUMMARY: 0 errors", 0)
    found = sanitizer.run("memcheck finds a planted fault", GPU, lambda text: None)
    assert found.state == "failed" and "reports no error" in found.text


def test_the_planted_race_is_one(monkeypatch):
    """The simulator's sanitizer says so."""
    reports = []
    monkeypatch.setattr(
        replay, "run_kernel", lambda *call: reports.append(launcher.run_kernel(*call))
    )
    replay.replay(planted._case("race"), sanitize=True)
    (found,) = reports
    assert "race" in {finding.kind for finding in found.findings}


@pytest.mark.parametrize(("hazards", "status", "state"),
                         [(0, 0, "failed"), (1, sanitizer.FOUND, "passed")])  # fmt: skip
def test_a_tool_is_asked_for_the_planted_race(tool, hazards, status, state, monkeypatch):
    tool(f"RACECHECK SUMMARY: {hazards} hazards displayed", status)
    assert "racecheck finds a planted race" in sanitizer.items(GPU)
    monkeypatch.setattr(sanitizer, "_under", partial(_on_simulator, sanitizer._under))
    assert sanitizer.run("racecheck finds a planted race", GPU, print).state == state


HAZARD = """========= Error: Race reported between Write access at kernel_0+0x10 in {place}
=========     and Read access at kernel_0+0x20 in dv.py:292 [64 hazards]"""


def line_of(text: str) -> int:
    """The first line of a kernel's source that holds the text."""
    path = Path(key_tiles.__file__)
    lines = path.read_text("utf-8").splitlines()
    return 1 + next(i for i, line in enumerate(lines) if text in line)


@pytest.mark.parametrize(("texts", "count", "explained"), [
    (["cute.copy(atom, source"], 1, True),
    (["cute.copy(atom, source"] * 3, 3, True),
    # One more than is shown; a write that is no such copy; nothing at all.
    (["cute.copy(atom, source"], 2, False),
    (["cute.copy(atom, source", "def num_steps"], 2, False),
    ([], 0, False),
])  # fmt: skip
def test_hazards_of_bulk_copies_alone_are_explained(texts, count, explained):
    places = [f"key_tiles.py:{line_of(text)}" for text in texts]
    lines = "\n".join(HAZARD.format(place=place) for place in places).splitlines()
    summary = f"RACECHECK SUMMARY: {count} hazards displayed ({count} errors, 0 warnings)"
    assert sanitizer._explained(lines, summary) == explained


def _on_simulator(under, tool, stage, step, target):
    return under(tool, stage, step, SIMULATOR)


def test_the_simulators_sanitizer_sees_the_smallest_kernel(monkeypatch):
    """The finding is there even with the maximal number of stored reports."""
    monkeypatch.setattr(report, "_reports", deque([object()], maxlen=1))
    found = sanitizer.run("simulator smallest backward_preprocess", SIMULATOR, lambda text: None)
    assert found.state == "passed" and found.text.startswith("1 launches, no finding"), found


def test_without_the_tool_the_rung_says_so(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "CUDA toolkit" in sanitizer.missing(Target("gpu", "a GPU", (9, 0), 132))
    assert sanitizer.missing(SIMULATOR) == ""
