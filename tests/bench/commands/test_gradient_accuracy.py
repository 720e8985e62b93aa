"""`python -m bench accuracy --direction backward` on small cases; the whole table is a matter of
minutes."""

import json
import math
from dataclasses import replace

import pytest
import torch

from bench.__main__ import main
from bench.commands import accuracy
from bench.measure import gradient_accuracy as measured
from fa4_hd256.run import backward

pytestmark = pytest.mark.simulator
pytest.importorskip("cutlass")

# Two packed sequences, the first without whole tiles, the second of two tiles of keys.
PACKED = measured.Call("packed", (("causal", True),), ((40, 60), (30, 140)))
DENSE = measured.Call("full", lengths=((40, 140),))


def case_of(call, architecture):
    # bf16: other tests compile these kernels, too.
    return measured.Case(call, torch.bfloat16, architecture)


@pytest.fixture
def dense(architecture):
    return measured.measure(case_of(DENSE, architecture))


@pytest.mark.parametrize("call", [DENSE, PACKED], ids=lambda call: call.name)
@pytest.mark.sampled
def test_errors(call, architecture):
    found = measured.measure(case_of(call, architecture))
    assert list(found.comparisons) == ["q", "k", "v"] and found.accurate
    for one in found.comparisons.values():
        assert 0 < one.max_error <= one.tolerance < math.inf
        assert 0 < one.rel_l2 < 5e-3


@pytest.mark.parametrize("wrong", range(3), ids=["dQ", "dK", "dV"])
@pytest.mark.sampled
def test_a_gradient_five_percent_too_large_is_seen(wrong, architecture, monkeypatch):
    results = backward._results

    def scaled(builder, *given):
        found = results(builder, *given)
        builder.operate("scale", (found[wrong].name,), lambda gradient: gradient.mul_(1.05))
        return found

    monkeypatch.setattr(backward, "_results", scaled)
    found = measured.measure(case_of(DENSE, architecture))
    above = [one.max_error > one.tolerance for one in found.comparisons.values()]
    assert above == [number == wrong for number in range(3)]
    assert not found.accurate
    assert list(found.comparisons.values())[wrong].rel_l2 == pytest.approx(0.05, rel=0.02)


@pytest.mark.sampled
def test_other_kernels_than_the_case_is_of_are_an_error(architecture):
    call = replace(DENSE, parts=True)
    with pytest.raises(RuntimeError, match="full: stored dS and parts are"):
        measured.measure(case_of(call, architecture))


@pytest.mark.sampled
def test_forms(dense, monkeypatch, capsys):
    error = dense.comparisons["v"].tolerance * 2
    wrong = dense.comparisons | {"v": replace(dense.comparisons["v"], max_error=error)}
    results = [dense, replace(dense, comparisons=wrong)]
    monkeypatch.setattr(accuracy, "stream", lambda measure, cases, jobs: results[:1])
    assert main(["accuracy", "--direction", "backward", "--json"]) == 0
    table, worst = json.loads(capsys.readouterr().out)["tables"]
    (row,) = table["rows"]
    assert row["accurate"] and row["dK_max_error"] == dense.comparisons["k"].max_error
    assert [one["kernel"] for one in worst["rows"]] == ["products", "products", "dV"]
    monkeypatch.setattr(accuracy, "stream", lambda measure, cases, jobs: results)
    assert main(["accuracy", "--direction", "backward", "--json"]) == 1
    table, worst = json.loads(capsys.readouterr().out)["tables"]
    assert [row["accurate"] for row in table["rows"]] == [True, False]
    assert [one["calls"] for one in worst["rows"]] == [2, 2, 2]
    assert worst["rows"][2]["of_tolerance"] == pytest.approx(2.0)
