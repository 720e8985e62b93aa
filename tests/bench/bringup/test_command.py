"""`python -m bench bringup` as a user runs it, in the simulator."""

from __future__ import annotations

import json
import subprocess

import pytest

from bench.__main__ import main
from bench.commands import bringup as command

pytestmark = pytest.mark.simulator


def bringup(directory, *arguments: str) -> int:
    return main(["bringup", "--simulate", "--out", str(directory), *arguments])


def report_of(directory) -> dict:
    return json.loads((directory / "report.json").read_text())["stages"]


@pytest.mark.sampled
def test_golden_vectors_and_a_kernel(tmp_path):
    """A recorded case of each kind: exact, approximate, one that the hardware refuses."""
    only = (
        "golden/cluster/exchange 2",
        "golden/approximate/ex2.approx.ftz.f32",
        "golden/tma/load 2d u16 coordinate",
        "kernels/smallest backward_preprocess",
    )
    status = bringup(tmp_path, "--stages", "golden", "kernels", *(f"--only={o}" for o in only))
    stages = report_of(tmp_path)
    assert status == 0
    assert stages["golden"]["counts"] == {"passed": 3}
    assert "within the bound" in stages["golden"]["steps"]["approximate/ex2.approx.ftz.f32"]["text"]
    assert stages["kernels"]["steps"]["smallest backward_preprocess"]["state"] == "passed"
    assert "3 passed" in (tmp_path / "report.txt").read_text()


def test_again_and_report(tmp_path, capsys):
    assert bringup(tmp_path, "--stages", "machine") == 0
    assert bringup(tmp_path, "--stages", "machine") == 0
    assert capsys.readouterr().out.count("machine/host: measured") == 1, "kept, not run again"
    assert bringup(tmp_path, "--stages", "machine", "--again", "machine") == 0
    assert capsys.readouterr().out.count("machine/host: measured") == 1
    (tmp_path / "report.txt").unlink()
    assert bringup(tmp_path, "--report") == 0
    assert "machine: 3 measured" in (tmp_path / "report.txt").read_text()


def test_a_planted_failure_is_not_the_exit_status(tmp_path):
    """Planted failures are not held against the machine."""
    assert bringup(tmp_path, "--stages", "machine", "--plant", "--only", "planted/wrong") == 0
    assert report_of(tmp_path)["planted"]["steps"]["wrong"]["state"] == "failed"


def test_the_simulator_is_called_what_it_passes_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SM100_SIM_DEVICE", "gb300:20")
    assert bringup(tmp_path, "--stages", "machine", "--only", "machine/host") == 0
    target = json.loads((tmp_path / "report.json").read_text())["target"]
    assert target["name"] == "sm100_sim, answering as a GB300"
    assert (target["capability"], target["sms"]) == ([10, 3], 20)
    monkeypatch.setenv("SM100_SIM_DEVICE", "h100")
    assert bringup(tmp_path, "--stages", "machine") == 2
    assert "SM100_SIM_DEVICE is 'h100'; accepted are b200" in capsys.readouterr().err


@pytest.mark.parametrize("driver", [False, True], ids=["no driver", "driver"])
def test_a_gpu_that_cannot_be_used_is_no_machine_without_one(driver, monkeypatch, capsys):
    """The simulator steps in only where there is no GPU at all."""
    failed = subprocess.CompletedProcess([], 1, "", "Traceback\nModuleNotFoundError: cuda.bindings")
    monkeypatch.setattr(command.subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setattr(command, "has_driver", lambda: driver)
    if driver:
        with pytest.raises(ValueError, match="cannot be used: ModuleNotFoundError.*--simulate"):
            command.find_target(simulate=False)
        return
    assert not command.find_target(simulate=False).is_gpu
    assert "no GPU here (ModuleNotFoundError" in capsys.readouterr().err
