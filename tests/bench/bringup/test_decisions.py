"""Configurations that follow from a report, made up here: nothing of it was measured."""

from __future__ import annotations

import argparse
import json

import pytest
from fake_timer import FakeTimer

from bench.bringup import decisions, report
from bench.bringup.outcome import Target
from bench.bringup.stages import choices, decoding, golden, graph, kernels, sharing
from bench.commands import bringup as command
from fa4_hd256 import environment

pytestmark = pytest.mark.simulator

GPU = Target("gpu", "NVIDIA B200", (10, 0), 148)
SIMULATED = Target("simulator", "B200", (10, 0), 148)
PASSED = {"state": "passed"}
MASKS = ("full", "causal")
RIGHT = {
    "golden": {
        "pairs/launch control": PASSED,
        "tcgen05/mma bf16 128x256 group 2 A k plain B mn": PASSED,
        "tcgen05/mma e4m3 128x32 group 1 A k B k": PASSED,
        "tcgen05/mma bf16 128x16 group 1 A k B k": PASSED,
        "tcgen05/mma order of S over P": PASSED,
        "integer/add": PASSED,
    },
    "sharing": {"forward clc": PASSED, "forward static": PASSED},
    "micro": {"SM clock of tensor cores": {
        "state": "measured", "values": {"value": 1.73, "low": 1.7, "high": 1.75, "unit": "GHz",
                                        "constant": "clock_ghz", "what": "made up"}}},
}  # fmt: skip


def made_report(**stages):
    """Return a report of the right results, with other steps in some stages."""
    results = {stage: {**RIGHT.get(stage, {}), **steps} for stage, steps in stages.items()}
    return report.content(GPU, {**RIGHT, **results}, "2027-01-01 00:00")


def chosen(found):
    return {d.question: (d.chosen, d.settings) for d in decisions.decide(found)}


def test_right_results_change_nothing():
    found = made_report()
    assert {c for c, _ in chosen(found).values()} == {decisions.UNCHANGED, decisions.UNKNOWN}
    assert chosen(found)["negative softmax scales"] == (decisions.UNKNOWN, {})
    assert decisions.settings(decisions.decide(found)) == {}
    assert len(found["decisions"]) == len(decisions.RULES) + 1
    # What no decision reads is counted, not listed.
    assert "integer/add" not in found["stages"]["golden"]["steps"]


@pytest.mark.parametrize("state", ["failed", "hang", "fault", "differs"])
@pytest.mark.parametrize(
    ("stage", "step", "settings"),
    [
        ("golden", "pairs/launch control", {"FA_CLC": "0"}),
        ("sharing", "forward clc", {"FA_CLC": "0"}),
        ("graph", "forward and backward clc", {"FA_CLC": "0"}),
        ("decoding", "repeated calls", {"FA_CLC": "0"}),
        ("kernels", "backward causal 257x255 clc", {"FA_CLC": "0"}),
        ("golden", "tcgen05/mma bf16 128x256 group 2 A k plain B mn", {"FA4_HD256_DS_BYTES": "0"}),
        ("kernels", "smallest backward_products", {"FA4_HD256_DS_BYTES": "0"}),
        ("golden", "tcgen05/mma order of S over P", {}),
    ],
)
def test_a_wrong_result_decides(stage, step, settings, state):
    found = made_report(**{stage: {step: {"state": state, "text": "made up"}}})
    assert decisions.settings(decisions.decide(found)) == settings
    said = decisions.text(decisions.decide(found))
    assert f"{stage}/{step}: {state}" in said
    for name, value in settings.items():
        assert f"export {name}={value}" in said


@pytest.mark.parametrize(
    ("ratios", "settings"),
    [((1.04, 1.02), {"FA4_HD256_DS_BYTES": "0"}), ((1.04, 1.002), {}), ((1.3, 0.97), {})],
)
def test_the_faster_configuration_is_taken(ratios, settings):
    """Be faster in all that was measured, by more than the margin, or stay."""
    names = ("dS of the full backward", "dS of the causal backward")
    steps = {
        name: choices.outcome({"usual": ratio * 1e-3, "other": 1e-3}).as_json()
        for name, ratio in zip(names, ratios, strict=True)
    }
    found = made_report(choices=steps)
    assert decisions.settings(decisions.decide(found)) == settings


def test_waits_without_a_hint():
    """Decide for each direction, by times alone."""
    names = [f"waits of the {mask} {way}" for way in ("forward", "backward") for mask in MASKS]
    question, other = "waits of the forward", "waits of the backward"
    assert chosen(made_report())[question][0] == decisions.UNKNOWN
    steps = {
        name: choices.outcome({"usual": ratio, "other": 1.0}).as_json()
        for name, ratio in zip(names, (1.03, 1.02, 1.03, 0.99), strict=True)
    }
    found = chosen(made_report(choices=steps))
    assert "polls=True" in found[question][0] and found[other][0] == decisions.UNCHANGED
    polling = choices.choices()["waits of the full backward"].other
    assert choices.configured("backward", polling)["backward_config"].dv.polls


def test_runs_are_interleaved():
    """Medians of what counts; the clock that changes meets both alike."""
    timer, usual, other = FakeTimer(), object(), object()
    found = choices.medians(lambda: {"usual": usual, "other": other}, timer)
    # 20 runs of each do not count; each takes a microsecond longer than the one before.
    assert found == pytest.approx(dict.fromkeys(("usual", "other"), 1e-3 + 50.5e-6))
    assert [timer.order[n : n + 2].count(usual) for n in range(0, 160, 2)] == [1] * 80
    assert choices.outcome({"usual": 2.0, "other": 1.0}).values == {"ratio": 2.0}


def test_the_clock_decides_about_the_model():
    values = {**RIGHT["micro"]["SM clock of tensor cores"]["values"], "value": 1.93}
    slow = {"SM clock of tensor cores": {"state": "measured", "values": values}}
    assert (
        "--machine report.json" in chosen(made_report(micro=slow))["clock of the timing model"][0]
    )


def test_rules_read_steps_that_there_are():
    """A renamed step or variable would leave a rule with nothing to read, or without effect."""
    there = {
        f"{name}/{item}"
        for name, module in (("golden", golden), ("sharing", sharing), ("kernels", kernels),
                             ("graph", graph), ("decoding", decoding), ("choices", choices))
        for item in module.items(SIMULATED)
    }  # fmt: skip
    for rule in decisions.RULES:
        for pattern in (*rule.reads, *rule.compares):
            assert any(decisions._matches(name, (pattern,)) for name in there), pattern
        assert set(rule.settings) <= {v.name for v in environment.VARIABLES} | {"FA_CLC"}


def test_the_command_prints_them(tmp_path, capsys):
    path = tmp_path / "report.json"
    found = made_report(graph={"forward clc": {"state": "hang", "text": "made up"}})
    path.write_text(json.dumps(found))
    assert command.main(argparse.Namespace(decide=path)) == 0
    assert "tile scheduler: the static one (graph/forward clc: hang)" in capsys.readouterr().out
    path.write_text("{}")
    with pytest.raises(ValueError, match="no report.json of a bringup"):
        command.main(argparse.Namespace(decide=path))
    path.write_text("no JSON")
    with pytest.raises(ValueError, match="cannot be read"):
        command.main(argparse.Namespace(decide=path))
    assert "decisions" in report.text(GPU, {**RIGHT})
