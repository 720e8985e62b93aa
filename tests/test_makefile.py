"""`make test` runs both of its parts, and fails if either does."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from checkout import ROOT

#: Stands in for the Python of .venv: logs the scheduler it is asked for and fails if told to.
PYTHON = """#!/bin/sh
echo "$2 ${FA_CLC:-static}" >> "$LOG"
test "${FA_CLC:-static}" != "$RED"
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("red", ["none", "static", "1"])
def test_both_parts_of_the_tests_run(tmp_path, red):
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    (tmp_path / "venv" / "installed").touch()
    log = tmp_path / "log"
    ours = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "FA_CLC")  # of a `make test` that runs this test
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    made = subprocess.run(
        ["make", "test", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        env={**environment, "LOG": str(log), "RED": red},
        capture_output=True,
        text=True,
    )
    assert log.read_text().splitlines() == ["pytest static", "pytest 1"]
    assert (made.returncode != 0) == (red != "none"), made.stderr
