"""Whole launches of kernels of others: what was predicted, and the command."""

import json

import pytest

from lab.__main__ import main
from lab.commands.foreign import PREDICTED
from lab.validation.foreign.cases import CASES

pytest.importorskip("numba")


def test_every_case_has_a_prediction(capsys):
    assert main(["foreign", "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    rows = {row["kernel"]: row for row in table["rows"]}
    assert set(rows) == {case.name for case in CASES}
    assert {case.language for case in CASES} == {"Triton", "CUDA C++", "CuTe DSL"}
    assert all(row["low"] <= row["predicted"] <= row["high"] for row in rows.values())


def test_a_prediction_repeats():
    from lab.validation.foreign.predicting import predict

    (case,) = (case for case in CASES if case.name.startswith("transpose"))
    kept = json.loads(PREDICTED.read_text())["rows"][case.name]
    found = predict(case, draws=0)
    assert found["microseconds"] == pytest.approx(kept["microseconds"], rel=0.01)
    assert (found["bound"], found["resident"], found["unmatched"]) == ("HBM", 8, 0)


def test_a_name_that_is_no_kernel_is_refused(capsys):
    assert main(["foreign", "--predict", "--kernels", "nothing"]) != 0
    assert "no kernel has 'nothing'" in capsys.readouterr().err
