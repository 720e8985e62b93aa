"""Losses of a training: what is kept of results, and the picture of them."""

from __future__ import annotations

import math

import pytest
from checkout import ROOT
from test_pictures import complaints

from bench.commands import training as command
from bench.measure.training import SMOOTHED, Run
from bench.tables.results import json_text
from lab.__main__ import main
from lab.pictures import inputs, losses
from lab.tables.documents import read_markdown

TABLE = ROOT / "docs" / "tables" / "training.md"
STEPS = 120


def run(shift):
    return Run([1 + 5 * math.exp(-(step + shift) / 30) for step in range(STEPS)], 1.0)


def results(seeds=(3, 4), others=None):
    own = {"SDPA float32": run(0), "ours": run(0.1), "flash-attn-4": run(-0.2)} | (others or {})
    origin = {"basis": "measured", "machine": "a GPU"}
    return json_text([command.table(dict.fromkeys(seeds, own), STEPS, origin, "2 layers")])


def test_what_is_kept_is_what_the_table_has():
    """Both are of one run, of which more steps are kept than the table shows."""
    found, text = losses.read_losses(), TABLE.read_text("utf-8")
    table = {(row["seed"], row["attention"]): row for row in read_markdown(text)}
    machine, commit = found["origin"].split(", commit ")
    assert f"Measured: {machine}." in text and f"commit {commit}" in text
    assert [(row["seed"], row["attention"]) for row in found["rows"]] == [
        (seed, name) for seed in (0, 1) for name in losses.LINES
    ]
    for one in found["rows"]:
        shown = table[str(one["seed"]), one["attention"]]
        for step, loss in zip(one["steps"], one["losses"], strict=True):
            assert float(shown.get(f"loss at {step}", loss)) == pytest.approx(loss, abs=6e-4)
        if "apart" in one:
            apart = shown["at step"], shown[f"farthest from {losses.EXACT}"]
            assert [int(apart[0]), float(apart[1])] == one["apart"]


def test_what_is_kept_of_results():
    found = losses.kept(results(others={"SDPA bf16": run(1), "ours, again": run(0.1)}))
    assert found["origin"].startswith("a GPU, commit ")
    assert [row["seed"] for row in found["rows"]] == [3] * 3 + [4] * 3
    exact, ours, _ = found["rows"][:3]
    assert ours["steps"] == [1, *range(losses.EVERY, STEPS + 1, losses.EVERY)]
    of_last = run(0.1).losses[-SMOOTHED:]
    assert ours["losses"][-1] == pytest.approx(sum(of_last) / SMOOTHED, abs=1e-4)
    assert "apart" not in exact and ours["apart"][0] == 1
    assert ours["apart"][1] == pytest.approx(ours["losses"][0] - exact["losses"][0], abs=2e-4)


@pytest.mark.parametrize("text", [
    results(seeds=(3,)), results(others={"ours": "out of memory"}),
], ids=["one seed", "without ours"])  # fmt: skip
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="accepted: of 2 seeds"):
        losses.kept(text)


def test_the_picture_of_all_steps_is_legible(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "DATA", tmp_path)
    (tmp_path / "results.json").write_text(results())
    given = ["training-losses", "--write", str(tmp_path)]
    assert main(["pictures", *given, "--losses", str(tmp_path / "results.json")]) == 0
    assert not complaints(losses.training_losses())
    text = (tmp_path / "training-losses.svg").read_text("utf-8")
    assert "measured on a GPU, commit" in text and "farthest: ours " in text
