"""The stage of rules: endings here beside those that a Hopper GPU recorded."""

from __future__ import annotations

import pytest

from bench.bringup.outcome import Target
from bench.bringup.stages import rules as stage
from sm100_sim.tools import golden

pytestmark = pytest.mark.simulator

SIMULATOR = Target("simulator", "simulator", (10, 0), 148)
B200 = Target("gpu", "B200", (10, 0), 148)
HANGS = "rules/registers/384 threads at 168: 224/224/64"
FAULTS = "rules/registers/decrease to more takes nothing"


def quiet(text: str) -> None:
    """Notes are not looked at."""


def test_the_simulator_passes():
    names = stage.items(SIMULATOR)
    asked = [case for case in golden.all_cases() if case.rule and not case.hopper]
    assert len(names) == len(asked) > 200
    for name in (HANGS, FAULTS, "rules/barrier/two of two warps"):
        outcome = stage.run(name, SIMULATOR, quiet)
        assert outcome.state == "passed" and "broken" not in outcome.values


class Answers:
    """A GPU that ends every case in one way; `ptx`: what it was given."""

    def __init__(self, ending: str) -> None:
        self.answer = ending

    def ending(self, case):
        """Answer like `record.Gpu`."""
        self.ptx = case.ptx
        outputs = golden.Vectors().outputs(stage._cases()[case.name])
        return self.answer, [array.copy() for array in outputs], 168


def test_a_gpu_that_answers_otherwise(monkeypatch):
    """A hang or fault costs the process; another ending is a difference."""
    gpu = Answers("hang")
    monkeypatch.setattr(stage, "gpu", lambda: gpu)
    outcome = stage.run(HANGS, B200, quiet)
    assert (outcome.state, outcome.values["broken"]) == ("passed", True)
    assert ".target sm_100a" in gpu.ptx
    gpu.answer = "done"
    outcome = stage.run(HANGS, B200, quiet)
    assert outcome.state == "differs" and "done, recorded hang" in outcome.text
    assert "broken" not in outcome.values
    gpu.answer = "run: CUDA_ERROR_ILLEGAL_INSTRUCTION"
    assert stage.run(FAULTS, B200, quiet).state == "passed"
    gpu.answer = "run: CUDA_ERROR_LAUNCH_FAILED"
    assert "recorded run: CUDA_ERROR_ILLEGAL_INSTRUCTION" in stage.run(FAULTS, B200, quiet).text
