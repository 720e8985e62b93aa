"""The plugin for pytest: what the sanitizer finds fails a marked test, a case for each seed."""

import os
import subprocess
import sys
from xml.etree import ElementTree

from project import PACKAGE

TESTS = '''
import os
import numpy as np, pytest, sm100_sim

HEAD = """.version 8.6
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 out) {
.shared .align 4 .b32 cell;
.reg .pred %p; .reg .b32 %r<2>; .reg .b64 %rd;
mov.u32 %r0, %tid.x; setp.eq.u32 %p, %r0, 0;
@%p st.shared.u32 [cell], 5;
"""
TAIL = """
ld.shared.u32 %r1, [cell]; ld.param.u64 %rd, [out];
@%p st.global.u32 [%rd], %r1;
ret; }
"""

def run(between):
    out = np.zeros(1, np.uint32)
    report = sm100_sim.launch_ptx(HEAD + between + TAIL, "k", [out], block=64)
    assert out[0] == 5
    return report

@pytest.mark.sm100_sim(sanitize=True, seeds=2)
def test_racy():
    run("")

@pytest.mark.sm100_sim(sanitize=True, device="h200", clusters=1)
def test_right():
    assert sm100_sim.device().name == "h200"
    assert run("bar.sync 0;").seed is None

def test_unmarked():
    assert run("").findings == [] and "SM100_SIM_SANITIZE" not in os.environ
'''


def run(tmp_path, text):
    (tmp_path / "test_kernel.py").write_text(text)
    # An installed simulator brings the plugin by its entry point: one of the two ways is left.
    environment = {
        **os.environ, "PYTHONPATH": str(PACKAGE.parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }  # fmt: skip
    environment.pop("SM100_SIM_SANITIZE", None)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "sm100_sim.pytest_plugin", "-p", "no:cacheprovider",
         "--strict-markers", "-q", "-rA", "--junitxml=found.xml", str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True, env=environment,
    )  # fmt: skip


def test_findings_fail_the_cases_of_a_marked_test(tmp_path):
    done = run(tmp_path, TESTS)
    assert done.returncode == 1, done.stdout + done.stderr
    for line in (
        *(f"FAILED test_kernel.py::test_racy[{how}]" for how in ("plain", "seed0", "seed1")),
        "PASSED test_kernel.py::test_right[plain]", "PASSED test_kernel.py::test_unmarked",
        "sm100_sim: 1 finding of 1 cause in k", "  1. race in shared memory: 1 finding",
    ):  # fmt: skip
        assert f"\n{line}" in done.stdout, line
    (suite,) = ElementTree.parse(tmp_path / "found.xml").getroot()
    assert suite.get("failures") == "3" and suite.get("tests") == "5"


def test_arguments_that_the_mark_does_not_take_are_an_error(tmp_path):
    done = run(tmp_path, "import pytest\n@pytest.mark.sm100_sim(seed=3)\ndef test(): pass\n")
    assert done.returncode != 0 and "mark sm100_sim got seed; accepted: " in done.stdout
