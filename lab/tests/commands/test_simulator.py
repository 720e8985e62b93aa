"""`python -m lab simulator` on a small shape."""

import json
from types import SimpleNamespace

import pytest

from lab.__main__ import main
from lab.commands import simulator
from sm100_sim.tools import speed
from sm100_sim.translate import kernel as translation

pytestmark = pytest.mark.simulator
pytest.importorskip("cutlass")


@pytest.mark.parametrize("runs", [0, 1])
def test_a_small_shape(runs, capsys):
    arguments = ["--seqlen", "300", "--heads", "2", "--heads-kv", "1", "--runs", str(runs)]
    assert main(["simulator", *arguments, "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    (row,) = table["rows"]
    assert (row["seqlen"], row["heads"], row["runs"]) == (300, 2, runs)
    assert (row["seconds"] == row["first_seconds"]) is (runs == 0)
    assert row["floor_seconds"] == pytest.approx(row["product_seconds"] / row["cores"])
    # 300 queries are two tiles of 256, 300 keys three steps of 128, for each of two heads.
    assert row["ratio_to_floor"] == pytest.approx(row["seconds"] / row["floor_seconds"])
    assert simulator.steps(simulator.Shape(300, 2, 1), simulator.ForwardConfig()) == 12
    assert (row["sanitized_cpu_seconds"] is None) is (runs == 0)
    if runs:
        ratio = row["sanitized_cpu_seconds"] / row["cpu_seconds"]
        assert row["sanitized_ratio"] == pytest.approx(ratio)
    spent = [row[part] for part in speed.PARTS]
    assert all(seconds > 0 for seconds in spent)
    assert sum(spent) <= row["cpu_seconds"]


def noted(function, done):
    def spy(*arguments):
        done.append(function.__name__)
        return function(*arguments)

    return spy


def test_wrong_numbers_of_runs(capsys):
    assert main(["simulator", "--seqlen", "300", "--runs", "-1"]) == 2
    assert "accepted: whole numbers from 0 on" in capsys.readouterr().err


def test_kernels_whose_translation_is_timed():
    kinds = {name: spec.kind for name, spec in simulator.kernels().items()}
    assert sorted(kinds.values()) == [
        "backward_dkdv", "backward_dq", "backward_dv", "forward", "forward", "forward",
    ]  # fmt: skip
    plain, *others = simulator.kernels().values()
    assert not plain.problem_class.ragged
    for spec in others:
        problem_class = spec.problem_class
        forward = getattr(problem_class, "problem", problem_class)
        assert forward.softcap and forward.bounded_left and len(forward.ragged) == 2


def test_a_table_of_translations(monkeypatch):
    """Each kernel by its name, with the PTX of its own specification."""
    monkeypatch.setattr(simulator, "compile_kernel", lambda spec: SimpleNamespace(ptx=spec))
    monkeypatch.setattr(
        simulator.speed, "translation",
        lambda ptx: [speed.Translation("in the PTX", len(ptx), 1.0, 2.0, 3.0, 0.5)],
    )  # fmt: skip
    rows = simulator.translation_table({"first": "a", "second": "bb"}).rows
    assert [(row["kernel"], row["instructions"]) for row in rows] == [("first", 1), ("second", 2)]
    names = ("parse_seconds", "seconds", "sanitized_seconds", "cached_seconds")
    assert {tuple(row[name] for name in names) for row in rows} == {(1.0, 2.0, 3.0, 0.5)}
    assert {row["basis"] for row in rows} == {"measured"}


@pytest.mark.sampled
def test_translation(monkeypatch):
    """Every kernel is one that the project makes; what the cache on disk has is not compiled."""
    done = []
    for step in ("compile_module", "link"):
        monkeypatch.setattr(translation, step, noted(getattr(translation, step), done))
    specs = simulator.kernels()
    kinds = {"forward", "backward_dv", "backward_dkdv", "backward_dq"}
    assert {spec.kind for spec in specs.values()} == kinds
    name = "dQ, packed windows, softcap"
    (row,) = simulator.translation_table({name: specs[name]}).rows
    assert row["kernel"] == name and row["instructions"] > 5000
    assert min(row["seconds"], row["sanitized_seconds"], row["cached_seconds"]) > 0
    # Both that are timed, perhaps the one that is kept, and the kept one once more.
    assert done[:2] == ["compile_module"] * 2 and done[3:] == ["link"]
