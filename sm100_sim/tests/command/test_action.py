"""The GitHub Action: its shell lines run a kernel, and fail by what is found."""

import json
import os
import re
import subprocess
import sys
import textwrap

import pytest
from project import PACKAGE, PROJECT

RACE = """.version 8.6
.target sm_100a
.address_size 64
.visible .entry k() {
.shared .align 4 .b32 cell;
.reg .pred %p; .reg .b32 %r<2>;
mov.u32 %r0, %tid.x; setp.eq.u32 %p, %r0, 0;
@%p st.shared.u32 [cell], 5;
BARRIER
ld.shared.u32 %r1, [cell];
ret; }
"""


@pytest.mark.parametrize(("barrier", "status"), [("bar.sync 0;", 0), ("", 1)])
def test_the_step_runs_a_kernel_and_fails_by_findings(barrier, status, tmp_path):
    text = (PROJECT / "action.yml").read_text()
    (step,) = re.findall(r"run: \|\n((?:        .*\n)+)", text)
    (tmp_path / "sm100-sim").write_text(f'#!/bin/sh\nexec {sys.executable} -m sm100_sim "$@"\n')
    (tmp_path / "sm100-sim").chmod(0o755)
    (tmp_path / "kernel.ptx").write_text(RACE.replace("BARRIER", barrier))
    done = subprocess.run(
        ["bash", "-e", "-c", textwrap.dedent(step).replace("python -c", f"{sys.executable} -c")],
        cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), "PATH": f"{tmp_path}:/usr/bin:/bin",
             "RUN": 'run kernel.ptx --kernel "k" --block 64 --sanitize'},
    )  # fmt: skip
    assert bool(done.returncode) == bool(status), done.stdout + done.stderr
    (run,) = json.loads((tmp_path / "sm100-sim.sarif").read_text())["runs"]
    assert len(run["results"]) == status
