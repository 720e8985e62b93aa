"""Losses of a training: what is kept of results and of their table, and the picture of both."""

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

TABLE = ROOT / "docs" / "tables" / "training.md"
STEPS = 120


def run(shift):
    return Run([1 + 5 * math.exp(-(step + shift) / 30) for step in range(STEPS)], 1.0)


def results(seeds=(3, 4), others=None):
    """JSON of `bench training`."""
    own = {"SDPA float32": run(0), "ours": run(0.1), "flash-attn-4": run(-0.2)} | (others or {})
    origin = {"basis": "measured", "machine": "a GPU"}
    return json_text([command.table(dict.fromkeys(seeds, own), STEPS, origin, "2 layers")])


def test_what_is_kept_is_what_the_table_has():
    """Both are of one run, also where more steps are stored than the table shows."""
    found, table = losses.read_losses(), losses.kept(TABLE.read_text("utf-8"))
    assert found["origin"] == table["origin"]
    assert [(row["seed"], row["attention"]) for row in found["rows"]] == [
        (seed, name) for seed in (0, 1) for name in losses.LINES
    ]
    for one, shown in zip(found["rows"], table["rows"], strict=True):
        of_steps = dict(zip(one["steps"], one["losses"], strict=True))
        expected = [of_steps[step] for step in shown["steps"]]
        assert shown["losses"] == pytest.approx(expected, abs=6e-4)
        assert shown.get("apart") == one.get("apart")


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
    "| seed | attention |\n", "| seed |\n|--|\n| 0 |\n",
], ids=["one seed", "without ours", "no origin", "another table"])  # fmt: skip
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match=r"accepted: of 2 seeds|neither results nor a table"):
        losses.kept(text)


def test_the_picture_of_all_steps_is_legible(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "DATA", tmp_path)
    (tmp_path / "results.json").write_text(results())
    given = ["training-losses", "--write", str(tmp_path)]
    assert main(["pictures", *given, "--losses", str(tmp_path / "results.json")]) == 0
    assert not complaints(losses.training_losses())
    text = (tmp_path / "training-losses.svg").read_text("utf-8")
    assert "measured on a GPU, commit" in text and "farthest: ours " in text
