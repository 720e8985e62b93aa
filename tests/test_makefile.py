"""Goals of the Makefile: what they install and run."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from checkout import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

#: Stands in for the Python of .venv: logs the scheduler, or architecture, that it is called with
#: and fails if told to.
PYTHON = """#!/bin/sh
part="${FA_CLC:-static}"
test "$3" = --arch && part="$4"
echo "$2 $part" >> "$LOG"
test "$part" != "$RED"
"""


def make(tmp_path, *arguments, **environment):
    """make with a .venv in `tmp_path`."""
    ours = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "FA_CLC")  # of a `make test` that runs this test
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run(
        ["make", *arguments, f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
    )


#: Goal -> what runs, in order, and under which scheduler or for which architecture.
PARTS = {
    "test": ["mypy static", "pytest 1", "pytest sm_90a", "pytest static"],
    "test-lab": ["pytest static"],
    "test-cuda": ["pytest static", "pytest 1", "pytest static", "bench static"],
}


@pytest.mark.parametrize(("goal", "red"), [
    *(("test", red) for red in ("none", "static", "1", "sm_90a")),
    *(("test-cuda", red) for red in ("none", "static", "1")),
    *(("test-lab", red) for red in ("none", "static")),
])  # fmt: skip
def test_every_part_of_the_tests_runs(tmp_path, goal, red):
    """The goal fails if a part does."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    for stamp in ("installed-torch", "installed-demo", "installed"):
        (tmp_path / "venv" / stamp).touch()
    log = tmp_path / "log"
    made = make(tmp_path, goal, LOG=str(log), RED=red)
    ran = log.read_text().splitlines()
    if goal == "test":
        ran.remove("pytest static")  # beside the others
    assert ran == PARTS[goal]
    assert (made.returncode != 0) == (red != "none"), made.stderr


@pytest.mark.parametrize("goal, extras", [
    ("demo", [".[demo]"]),
    ("lint", [".[test,bench]"]),
    ("test-static", [".[test,bench]"]),
])  # fmt: skip
def test_a_goal_installs_what_it_needs_and_no_more(tmp_path, goal, extras):
    lines = make(tmp_path, "-n", goal, "TORCH_INDEX=https://index").stdout.splitlines()
    installs = [line.split("constraints.txt ")[1] for line in lines if "pip install" in line]
    assert installs[0] == "--extra-index-url https://index torch"
    package = [line.split()[-1].strip("'") for line in installs if "--editable" in line]
    assert [name for name in package if name.startswith(".[")] == extras
    assert ("--no-deps nvidia-cudnn-frontend" in installs) == (goal != "demo")


def test_every_part_of_test_all_has_all_cases(tmp_path):
    lines = make(tmp_path, "-n", "test-all", "TESTS=tests/operator").stdout.splitlines()
    parts = [line for line in lines if "-m pytest" in line]
    assert len(parts) == 4 and "-m pytest -o testpaths=tests tests/operator --all-cases" in parts[0]
    assert all(line.endswith(" --all-cases") for line in parts)


def test_the_check_runs_its_three_parts(tmp_path):
    lines = make(tmp_path, "-n", "check").stdout.splitlines()
    commands = [line.split("/bin/")[1] for line in lines if line.startswith(str(tmp_path))]
    assert [c for c in commands if "pip install" not in c] == [
        "ruff check .",
        "ruff format --check --quiet .",
        "python -m mypy",
        "python -m pytest -q -n 2 @tests/check.txt",
    ]


def test_the_check_has_tests_of_each_room():
    """Each folder has tests, but those of other projects' kernels, and all listed tests exist."""
    listed = (ROOT / "tests" / "check.txt").read_text().split()
    files = {entry.partition("::")[0] for entry in listed}
    assert [file for file in files if not (ROOT / file).is_file()] == []
    for entry in listed:
        file, _, name = entry.partition("::")
        assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text(), entry
    tests = (ROOT / "tests", ROOT / "sm100_sim/tests")
    folders = {path.parent for folder in tests for path in folder.rglob("test_*.py")}
    wanted = {folder.relative_to(ROOT).as_posix() for folder in folders}
    missing = wanted - {file.rpartition("/")[0] for file in files}
    others = {"sm100_sim/tests/third_party", "tests/bench/peers"}
    assert missing == others, "tests/check.txt needs a quick test of each"
