"""Command lines of the profiler, and the workload that it runs."""

import json
import re
import stat

import pytest
import torch

pytest.importorskip("cutlass")

import sm100_sim
from bench.__main__ import main
from bench.commands import profile
from bench.suite import BACKWARD, FORWARD, Case
from fa4_hd256 import flash_attn_func

CASE = Case("chosen", ((300, 400),) * 2, 8, 4, True)


def test_command_line():
    command = profile.collect_command(CASE, BACKWARD, "out.ncu-rep")
    options = dict(zip(command, command[1:]))
    assert command[0] == "ncu" and options["--set"] == "full"
    assert options["--import-source"] == "no" and options["--export"] == "out.ncu-rep"
    assert options["--target-processes"] == "application-only"
    # The workload starts the profiler for its second call; no count of launches is assumed.
    assert options["--profile-from-start"] == "off" and "--launch-count" not in command


@pytest.mark.simulator
@pytest.mark.sampled
def test_names_of_the_kernels_match_the_filter():
    earlier = sm100_sim.last_reports()
    q, k, v = (torch.randn(1, 64, 1, 256).bfloat16().requires_grad_() for _ in range(3))
    flash_attn_func(q, k, v, causal=True).sum().backward()
    reports = [r for r in sm100_sim.last_reports() if not any(r is e for e in earlier)]
    names = [report.kernel for report in reports]
    for direction, count in ((FORWARD, 1), (BACKWARD, 3)):
        matching = [name for name in names if re.search(profile.KERNELS[direction], name)]
        assert len(matching) == count, (direction, names)
    assert len(names) == 4


def test_the_workload_reads_its_own_options(capsys):
    """The command that is profiled parses, and stops here for want of a GPU."""
    words = profile.workload(CASE, FORWARD)
    assert words[:3] == ["python", "-m", "bench"]
    status = main(words[3:])
    if not torch.cuda.is_available():
        assert status == 2 and "no CUDA device" in capsys.readouterr().err


def test_running_the_tool(tmp_path, monkeypatch, capfd):
    """A stand-in for ncu on PATH that says what it is asked."""
    tool = tmp_path / "ncu"
    tool.write_text('#!/bin/sh\necho "$*"\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert main(["profile", "--run", "--direction", "forward"]) == 0
    collected, read = capfd.readouterr().out.splitlines()
    assert "--export fa4_hd256-forward.ncu-rep" in collected and "ForwardKernel" not in read
    assert read == "--import fa4_hd256-forward.ncu-rep --page details"
    tool.write_text("#!/bin/sh\nexit 3\n")
    assert main(["profile", "--run"]) == 2
    assert "status 3" in capfd.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert main(["profile", "--run"]) == 2
    assert "not installed" in capfd.readouterr().err


def test_ranges_of_the_kernels(capsys):
    command = "run-iket profile -- python -m bench profile --workload --direction="
    for options, directions in (([], [FORWARD, BACKWARD]), (["--direction", BACKWARD], [BACKWARD])):
        assert main(["profile", "--iket", "--json", *options]) == 0
        rows = json.loads(capsys.readouterr().out)["tables"][0]["rows"]
        assert [row["purpose"] for row in rows] == [f"trace {one}" for one in directions]
        for row, direction in zip(rows, directions, strict=True):
            assert row["command"].startswith(f"{command}{direction} ")
