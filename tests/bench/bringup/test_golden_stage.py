"""The golden vectors on another GPU than the one that recorded them."""

from __future__ import annotations

import importlib.util
import itertools
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from simulated_target import SIMULATOR

from bench.bringup.outcome import Target
from bench.bringup.stages import golden as stage
from sm100_sim.tools import golden
from sm100_sim.tools.golden.cases import head, retargeted
from sm100_sim.tools.golden.record import DriverError

pytestmark = pytest.mark.simulator

B200 = Target("gpu", "a B200", (10, 0), 148)
#: A case that must end in an error; for sm_100a ptxas is the first to say so.
REFUSED = {"found/dec within the granule"}


def quiet(text: str) -> None:
    """Takes a note."""


@pytest.mark.sampled
def test_the_recorded_cases_assemble_for_blackwell(tmp_path):
    """Cases name sm_90a, which no other GPU loads; under the head of a B200 ptxas takes all but the
    known ones. A module has a hundred kernels."""
    found = importlib.util.find_spec("triton")
    home = Path(found.submodule_search_locations[0]) if found else Path("triton")
    tool = home / "backends" / "nvidia" / "bin" / "ptxas-blackwell"
    if not tool.exists():
        pytest.skip("ptxas comes with triton, which is not installed")
    cases = [case for case in stage._recorded().values() if case.name not in REFUSED]
    for start in range(0, len(cases), 100):
        bodies = []
        for number, case in enumerate(itertools.islice(cases, start, start + 100)):
            ptx = retargeted(case.ptx, (10, 0))
            assert ptx.startswith(head((10, 0)))
            bodies.append(re.sub(r"\bgolden\b", f"golden{number}", ptx[len(head((10, 0))) :]))
        path = tmp_path / "cases.ptx"
        path.write_text(head((10, 0)) + "\n".join(bodies))
        command = [str(tool), "-arch=sm_100a", "-O0", str(path), "-o", str(tmp_path / "cubin")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, (cases[start].name, done.stderr[-1000:])


@pytest.mark.parametrize(
    ("capability", "version", "name"),
    [((8, 9), "8.6", "sm_89"), ((9, 0), "8.6", "sm_90a"), ((10, 0), "8.8", "sm_100a"),
     ((10, 3), "8.8", "sm_103a"), ((12, 0), "8.8", "sm_120a")],
)  # fmt: skip
def test_a_module_names_a_target_that_there_is(capability, version, name):
    """The head has a version of PTX that has the target and what the cases need of it, and no newer
    one: drivers refuse versions that they do not know."""
    assert head(capability).splitlines()[:2] == [f".version {version}", f".target {name}"]


def raising(message: str):
    def run(target, case):
        raise DriverError(message)

    return run


def test_a_module_that_the_driver_refuses_fails(monkeypatch):
    """A driver too old for every module would else leave nothing compared, and nothing wrong."""
    name = next(n for n in stage._recorded() if n.startswith("integer/"))
    monkeypatch.setattr(stage, "run_case", raising("cuModuleLoadData: CUDA_ERROR_INVALID_PTX"))
    for target in (B200, Target("gpu", "an H200", (9, 0), 132)):
        outcome = stage.run(name, target, quiet)
        assert outcome.state == "failed" and "refuses a module" in outcome.text
    monkeypatch.setattr(stage, "run_case", raising("cuCtxSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS"))
    with pytest.raises(DriverError):
        stage.run(name, B200, quiet)


def test_a_difference_on_blackwell_shows_both_values(monkeypatch):
    """A GPU whose accumulator is off by one word: "differs", with what the simulator has there."""
    (probe,) = (p for p in stage._probes().values() if p.case.name == "tcgen05/cp 4x256b")
    found = [array.copy() for array in probe.expected]
    found[0][32, 5] ^= 0x10
    monkeypatch.setattr(stage, "run_case", lambda target, case: found)
    outcome = stage.run(probe.case.name, B200, quiet)
    assert outcome.state == "differs" and "1 of" in outcome.text
    assert outcome.values["places"] == [[32, 5]]
    assert int(outcome.values["found"][0], 16) ^ 0x10 == int(outcome.values["predicted"][0], 16)


def test_launch_control_reports_its_raw_words(monkeypatch):
    """Words of the GPU and of the simulator stand side by side."""
    (probe,) = (p for p in stage._probes().values() if p.case.name == "pairs/launch control")
    count = len(probe.case.outputs[0])
    counts, words = np.ones(count, np.uint32), np.zeros((count, 4), np.uint32)
    said = np.zeros(count, np.uint32)
    monkeypatch.setattr(stage, "run_case", lambda target, case: [counts, words, said])
    outcome = stage.run(probe.case.name, B200, quiet)
    assert outcome.state == "passed"
    assert outcome.values["here"]["refused"]["words"] == ["00000000 " * 3 + "00000000"] * 3
    assert outcome.values["simulator"]["cancelled"]["number"] > 0
    words[5, 2] = 1
    assert stage.run(probe.case.name, B200, quiet).state == "differs"


def test_launch_control_tells_both_ctas_of_a_pair_the_same():
    probe = stage._probes()["pairs/launch control cluster 2"]
    count = len(probe.case.outputs[0])
    counts, words = np.ones(count, np.uint32), np.zeros((count, 4), np.uint32)
    said = np.zeros(count, np.uint32)
    said[4:6], words[4:6, 0], words[4:6, 2] = 1 + 8, 8, 1
    assert probe.judge([counts, words, said]) == ""
    said[4:6], words[4:6, 0] = 1 + 9, 9
    assert "not the first CTA" in probe.judge([counts, words, said])
    said[5], words[5] = 0, 0
    assert "CTAs of cluster 2 were told different things" in probe.judge([counts, words, said])


def test_a_wrong_result_of_a_recorded_case_fails(monkeypatch):
    case = next(c for c in golden.all_cases() if c.group == "integer")
    wrong = [array ^ 1 for array in golden.Vectors().outputs(case)]
    monkeypatch.setattr(stage, "run_case", lambda target, case: wrong)
    outcome = stage.run(case.name, SIMULATOR, quiet)
    assert outcome.state == "failed" and "recorded" in outcome.text


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuCtxSynchronize"])
def test_a_case_that_is_refused_says_by_whom(call, monkeypatch):
    """A module that did not load is no kernel that ended with an error, nor the other way round."""
    monkeypatch.setattr(stage, "run_case", raising(f"{call}: CUDA_ERROR_INVALID_PTX\nmore"))
    said = f"DriverError: {call}: CUDA_ERROR_INVALID_PTX"
    for name, recorded in golden.Vectors().manifest["faults"].items():
        outcome = stage.run(name, B200, quiet)
        assert outcome.values["broken"]
        if call in recorded:
            assert (outcome.state, outcome.text) == ("passed", f"refused, as recorded: {said}")
        else:
            assert (outcome.state, outcome.text) == ("failed", f"{said}; recorded: {recorded}")
