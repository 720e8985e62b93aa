"""The stage of the throughput: bench's tables are judged."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace

import numpy as np

from bench.bringup.outcome import Target
from bench.bringup.stages import throughput
from bench.commands.throughput import table, times_of
from bench.peers.flash_attn_4 import PACKAGE
from bench.suite import cases
from bench.tables.comparison import OURS, comparison_row
from bench.tables.results import json_text
from bench.tables.table import BASIS, MACHINE

GPU = Target("gpu", "a B200", (10, 0), 148)
FAST = {"status": "ok", "tflops": 1500.0, "tflops_low": 1490.0, "tflops_high": 1510.0}


def tables(ours: dict) -> str:
    """Return what bench writes of two cases, flash-attn-4 beside ours."""
    details = {OURS: ours, PACKAGE: FAST}
    seconds = {name: np.ones(2) for name, one in details.items() if "tflops" in one}
    origin = {BASIS: "measured", MACHINE: "a B200", "l2": "cold"}
    rows = []
    for case in cases(["dense"])[:2]:
        row = comparison_row(case, "forward", details, seconds)
        rows.append(row | times_of(row, case, "forward") | origin)
    return json_text([table(rows)])


def run(monkeypatch, ours: dict, status: int):
    """The stage where bench writes these tables and ends with this status."""
    written = tables(ours)

    def bench(command, **_):
        with open(command[command.index("--json") + 1], "w") as file:
            file.write(written)
        return SimpleNamespace(returncode=status, stderr="forward, the last case")

    monkeypatch.setattr(subprocess, "run", bench)
    return throughput.run("forward dense 32/2", GPU, lambda text: None)


def test_rates_of_both_are_reported(monkeypatch):
    outcome = run(monkeypatch, FAST, 0)
    assert (outcome.state, outcome.text) == ("measured", "2 rows")
    assert "tflops" in outcome.values["tables"][0]["rows"][0]["details"][OURS]


def test_the_items_are_the_suite():
    """Every case is in exactly one item of a direction, and none has many."""
    found = []
    for item in throughput.items(GPU):
        direction, group, heads = throughput.selection(item)
        chosen = [case for case in cases([group]) if not heads or case.heads_text == heads[1]]
        assert 0 < len(chosen) <= 20
        assert min(sum(q for q, _ in case.lengths) for case in chosen) <= throughput._TOKENS
        found += [(direction, case) for case in chosen]
    assert len(found) == len(set(found)) == 2 * len(cases())


def test_a_wrong_result_of_ours_is_told(monkeypatch):
    wrong = {"status": "wrong: error 1, accepted 0.1", "failed": True}
    outcome = run(monkeypatch, wrong, 1)
    assert outcome.state == "failed"
    assert "2 of 2 rows of ours, first " in outcome.text and wrong["status"] in outcome.text
    json.dumps(outcome.as_json(), allow_nan=False)


def test_without_tables_the_last_words_are_told(monkeypatch):
    dead = SimpleNamespace(returncode=-9, stderr="no memory\nkilled")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: dead)
    outcome = throughput.run("forward dense", GPU, lambda text: None)
    assert (outcome.state, outcome.text) == ("fault", "status -9: killed")
