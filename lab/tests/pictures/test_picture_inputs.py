"""Figures taken from the tables of other commands, and how files are written."""

from __future__ import annotations

import json

from lab.pictures import inputs


def test_rates_are_taken_from_the_tables():
    rate = {"status": "ok", "tflops": 1733.4, "tflops_low": 1700.6, "tflops_high": 1800.5}
    dense = {
        "direction": "forward", "mask": "full", "heads": "8/8", "shape": "16x2048",
        "details": {
            "ours": rate, "cuDNN": {"status": "measured only"},
            "cuDNN, published": {"status": "published", "tflops": 1224.0},
        },
    }  # fmt: skip
    tables = {"dense": [{"rows": [dense]}], "few KV heads": [{"rows": []}]}
    assert inputs.rates(tables) == [
        {"group": "dense", "provider": "ours", "direction": "forward", "mask": "full",
         "heads": "8/8", "batch": 16, "seqlen": 2048, "tflops": 1733, "tflops_low": 1701,
         "tflops_high": 1800},
    ]  # fmt: skip


def test_accuracy_is_taken_of_rows_that_count():
    published = {
        "case": "a case", "published": 1000.4, "modelled": 1100.2, "error_fitted": 0.02,
        "counts": True, "direction": "forward", "gpu": "B200", "kernel": "a kernel",
    }  # fmt: skip
    tables = [{"rows": [{"n": 64}]}, {"rows": [published, {**published, "counts": False}]}]
    assert inputs.accuracy(tables) == [
        {"kind": "forward, B200", "kernel": "a kernel", "case": "a case", "published": 1000,
         "modelled": 1100, "fitted": 1020},
    ]  # fmt: skip


def test_files_say_what_made_them(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "DATA", tmp_path)
    inputs._write("timeline", {"steps": 8, "spans": [["load K", "K", 0, 1, 5, 9], [1]]})
    text = (tmp_path / "timeline.json").read_text("utf-8")
    assert json.loads(text) == {
        "command": "python -m lab pictures --replay",
        "constants": inputs.constants(),
        "steps": 8,
        "spans": [["load K", "K", 0, 1, 5, 9], [1]],
    }
    assert inputs.read("timeline")["steps"] == 8


def test_kept_files_are_of_this_form():
    """Every seqlen of the suite is there for all providers, and validation on three GPUs."""
    rows = inputs.read("rates")["rows"]
    lengths = {
        (row["provider"], row["direction"], row["mask"]): set()
        for row in rows if row["group"] == "dense"
    }  # fmt: skip
    for row in rows:
        if row["group"] == "dense":
            lengths[row["provider"], row["direction"], row["mask"]].add(row["seqlen"])
    providers = {direction: {name for name, of, _ in lengths if of == direction}
                 for direction in ("forward", "backward")}  # fmt: skip
    assert providers["forward"] == {"ours", "flash-attn-4", "FROST"}
    assert providers["backward"] == {*providers["forward"], "flash-attn-4, five products"}
    assert {len(found) for found in lengths.values()} == {9}
    kinds = {row["kind"] for row in inputs.read("accuracy")["rows"]}
    assert kinds >= {"forward, B200", "forward, GB200", "forward, GB300"}
    assert {row[0] for row in inputs.read("timeline")["spans"]} == {
        "load Q", "load K", "load V", "tensor core", "softmax", "correction", "epilogue"
    }  # fmt: skip
