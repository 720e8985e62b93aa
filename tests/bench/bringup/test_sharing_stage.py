"""Two processes that share a GPU: what is made of their answers. They are replaced by scripts."""

from __future__ import annotations

import sys

import pytest
from simulated_target import SIMULATOR

from bench.bringup.stages import sharing

pytestmark = pytest.mark.simulator

ENDING = 'print(json.dumps({"calls": 3, "different": DIFFERENT}), flush=True)'
SCRIPT = """
import json, sys
print("ready", flush=True)
assert sys.stdin.readline() == "go\\n"
print(json.dumps({"call": 0}), flush=True)
"""


@pytest.mark.parametrize(
    ("script", "state", "text"),
    [
        (SCRIPT + ENDING.replace("DIFFERENT", "0"), "passed", "6 calls, 0 with other bits"),
        (SCRIPT + ENDING.replace("DIFFERENT", "1"), "failed", "6 calls, 2 with other bits"),
        (SCRIPT, "fault", "2 of 2 processes ended before their last call"),
        ("raise SystemExit(1)", "fault", "ended in its first call"),
    ],
)
def test_what_they_say_is_judged(script, state, text, monkeypatch):
    monkeypatch.setattr(sharing, "command", lambda item, target: [sys.executable, "-c", script])
    notes: list[str] = []
    outcome = sharing.run("forward clc", SIMULATOR, notes.append)
    assert outcome.state == state and text in outcome.text, outcome
    assert ("call 0" in notes) == (SCRIPT in script)


@pytest.mark.sampled
def test_two_processes_in_the_simulator():
    outcome = sharing.run("forward static", SIMULATOR, lambda text: None)
    assert outcome.state == "passed", outcome
