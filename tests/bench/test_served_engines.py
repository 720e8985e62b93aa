"""Engines as `bench vllm` and `bench sglang` measure them, with a program in the place of one."""

from __future__ import annotations

import os
import sys

import pytest
from checkout import ROOT

pytest.importorskip("transformers")

from bench.measure.time_limit import TimeLimit
from bench.serving import measured
from bench.serving.models import Size

PROGRAM = (sys.executable, str(ROOT / "tests/bench/helpers/fake_engine.py"))


def test_engines_that_answer_break_and_die(tmp_path, monkeypatch):
    """An engine that ends has its last words in its row, and the others are measured."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    names = "one", "breaks", "dies", "two"
    engine = measured.Engine(
        "Fake", "fake", "1", PROGRAM, names, ("eager",),
        lambda folder, backend, mode, load, cache: {"backend": backend},
    )  # fmt: skip
    (tmp_path / "Qwen3").mkdir()
    load = measured.Load(requests=2, prompt=24, tokens=5, rounds=3)
    bench = measured.Bench(engine, Size(layers=1, vocabulary=512), load, names, tmp_path)
    origin = {"basis": "computed", "machine": "CPU"}
    rates, pairs = measured.tables(bench, [("Qwen3", "eager")], TimeLimit(), origin)
    one, breaks, dies, two = rates.rows
    assert [row["status"] for row in (one, two)] == ["ok", "ok"]
    assert one["first"] == 3 and one["later"] == 0 and one["gpu"] == pytest.approx(0.042)
    assert one["step"] == pytest.approx(1.0) and one["decoding"] == pytest.approx(2000)
    total = sum(map(len, load.prompts(512)))
    assert one["prompts"] == pytest.approx(total / 0.5)
    for row, word in ((breaks, "RuntimeError: an Error of the GPU"), (dies, "no such backend")):
        assert row["status"].startswith("ended with 1: ") and word in row["status"]
        assert ".log)" in row["status"]
    assert {(row["one"], row["other"]) for row in pairs.rows} == {
        ("one", "two"), ("one", "one, again"), ("two", "two, again"),
    }  # fmt: skip
    assert all(row["equal"] == row["requests"] == 2 for row in pairs.rows)
    assert "a line of the engine itself" in (tmp_path / "Qwen3-eager-one.log").read_text()
