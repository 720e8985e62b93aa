"""The report as a machine of the timing model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT
from simulated_target import SIMULATOR

from bench.bringup import report
from bench.bringup.outcome import Target
from bench.bringup.runner import BringupRun
from sm100_sim.timing.machine_constants import load

pytestmark = pytest.mark.simulator


def figure(constant: str, value: float) -> dict:
    values = {"value": value, "low": value - 1, "high": value + 2, "unit": "clocks",
              "constant": constant, "what": "a test"}  # fmt: skip
    return {"state": "measured", "text": "", "values": values}


RESULTS = {
    "machine": {"device": {"state": "measured", "values": {"SMs": 152, "L2, bytes": 126e6}}},
    "micro": {"TMEM load": figure("tmem_load", 91.5), "hand-over": figure("", 60.0),
              "CLC query": {"state": "hang", "text": "no end"}},
}  # fmt: skip
GPU = Target("gpu", "NVIDIA GB200", (10, 0), 152)


def write(directory, target, results) -> Path:
    """The report of a run that has these results."""
    run = BringupRun(directory, target)
    run.results = results
    report.write_reports(run)
    return directory / "report.json"


@pytest.fixture
def path(tmp_path):
    return write(tmp_path, GPU, RESULTS)


def test_what_was_measured_replaces_the_defaults(path):
    machine, default = load(str(path)), load("b200")
    assert machine.name == "NVIDIA GB200" and "measured on NVIDIA GB200" in machine.basis
    found = machine.constants["tmem_load"]
    assert (found.value, found.low, found.high) == (91.5, 90.5, 93.5)
    assert "TMEM load: a test" in found.source and not found.fitted
    assert machine.values().sms == 152 and machine.values().l2_megabytes == 126
    changed = {n for n, c in machine.constants.items() if c != default.constants[n]}
    assert changed == {"tmem_load", "sms", "l2_megabytes"}


def test_no_constant_is_below_nothing():
    """A difference of two launches may be: then the default stays, and no draw is negative."""
    micro = {"MMA switch": figure("mma_switch", -0.3), "fence.cta": figure("fence_cta", 0.5)}
    found = report.content(GPU, {**RESULTS, "micro": micro}, "")["machine"]["constants"]
    assert "mma_switch" not in found
    assert (found["fence_cta"]["value"], found["fence_cta"]["range"]) == (0.5, [0.0, 2.5])


def test_the_reuse_of_a_slot_is_in_clocks(tmp_path):
    """Half a microsecond at 2 GHz."""
    micro = {"CTA reuse": figure("", 0.5), "SM clock under load": figure("clock_ghz", 2.0)}
    content = report.content(GPU, {**RESULTS, "micro": micro}, "")
    found = content["machine"]["constants"]["cta_reuse"]
    assert found["value"] == 1000 and found["unit"] == "clocks"


@pytest.mark.parametrize(
    ("name", "capability", "like"), [("H100", (9, 0), "h200"), ("GB300", (10, 3), "b300")]
)
def test_what_is_not_measured_is_as_on_a_gpu_of_the_same_capability(
    tmp_path, name, capability, like
):
    write(tmp_path, Target("gpu", name, capability, 132), RESULTS)
    machine = load(str(tmp_path / "report.json"))
    found, other = machine.values()._asdict(), load(like).values()._asdict()
    assert {n for n in found if found[n] != other[n]} <= {"tmem_load", "sms", "l2_megabytes"}
    assert other != load("b200").values()._asdict()


def test_a_gpu_without_constants_of_its_own_is_like_a_b200():
    assert report.like(Target("gpu", "Rubin", (10, 7), 212)) == "b200"


def test_the_simulator_measures_nothing():
    assert "machine" in report.content(GPU, RESULTS, "")
    assert "machine" not in report.content(SIMULATOR, RESULTS, "")


def test_a_report_without_a_machine_is_refused(tmp_path):
    write(tmp_path, SIMULATOR, RESULTS)
    with pytest.raises(ValueError, match="describes no machine"):
        load(str(tmp_path / "report.json"))
    with pytest.raises(ValueError, match="is not known; there are .*b200.* and files"):
        load(str(tmp_path / "none.json"))


@pytest.mark.sampled
def test_the_command_takes_the_file(path, tmp_path):
    """`python -m sm100_sim predict --machine FILE`; a wrong file is an error of the arguments."""
    script = tmp_path / "script.py"
    script.write_text("")
    for machine, says in ((path, "launched no kernel"), (tmp_path / "none.json", "none.json")):
        command = [sys.executable, "-m", "sm100_sim", "predict", "--machine", str(machine),
                   str(script)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2 and says in done.stderr.splitlines()[-1], done.stderr
    assert "is not known" in done.stderr


def test_json_has_no_infinity(path):
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))


def test_the_h200_of_the_docs_is_a_machine():
    """Single instructions as other programs measured them there (hopper_measured.json)."""
    found, other = load(str(ROOT / "docs" / "bringup_h200.json")), load("h200").values()
    assert found.name == "NVIDIA H200"
    names = ("sms", "mufu_interval", "mufu_latency", "shared_load", "shuffle",
             "shared_bytes_per_clock", "named_barrier", "named_barrier_warp",
             "clock_ghz")  # fmt: skip
    for name in names:
        assert getattr(found.values(), name) == pytest.approx(getattr(other, name), rel=0.01)
