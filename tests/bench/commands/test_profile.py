"""Command lines of the profiler, and the summary of a report; the sample is made up."""

import json
import re
import stat

import pytest
import torch

pytest.importorskip("cutlass")

import sm100_sim
from bench.__main__ import main
from bench.measure import nsight
from bench.suite import BACKWARD, FORWARD, Case
from fa4_hd256 import flash_attn_func
from fa4_hd256.kernels.blackwell.backward.dkdv import DkdvKernel
from fa4_hd256.kernels.blackwell.backward.dq import DqKernel
from fa4_hd256.kernels.blackwell.backward.dv import DvKernel
from fa4_hd256.kernels.blackwell.backward.products import ProductsKernel
from fa4_hd256.kernels.blackwell.decode.e4m3 import DecodeE4m3Kernel
from fa4_hd256.kernels.blackwell.decode.kernel import DecodeKernel
from fa4_hd256.kernels.blackwell.forward.kernel import ForwardKernel
from fa4_hd256.kernels.small.backward_preprocess import PreprocessKernel
from fa4_hd256.kernels.small.forward_combine import CombineKernel

CASE = Case("chosen", ((300, 400),) * 2, 8, 4, True)

HEADER = [
    "ID", "Process Name", "Kernel Name", "Device", "device__attribute_display_name",
    "gpu__time_duration.sum",
    "sm__pipe_tensor_subpipe_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "lts__t_sector_hit_rate.pct",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_barrier_not_issued_per_issue_active.ratio",
    "smsp__pcsamp_dropped_bytes",
]  # fmt: skip
UNITS = ["", "", "", "", "", "ns", "%", "%", "%", "%", "warp", "warp", "warp", "byte"]
LAUNCH = ["0", "python", "kernel_cutlass_kernel_fa4_hd256forwardForwardKernel_object", "0", "GB",
          "1,234,567", "91.5", "88.25", "97.0", "44.0", "1.5", "2.75", "9.0", "0"]  # fmt: skip


def page(*launches, units=UNITS):
    lines = [HEADER, units, *launches]
    text = "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines)
    return "==PROF== Disconnected from process 1\n" + text + "\n"


def test_summary_of_a_raw_page(tmp_path, capsys):
    other = [*LAUNCH[:2], "some_other_kernel", *LAUNCH[3:-1], "4096"]
    file = tmp_path / "raw.csv"
    file.write_text(page(LAUNCH, other))
    files = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.svg")]
    assert main(["profile", "--read", str(file), *files]) == 0
    assert (tmp_path / "out.svg").stat().st_size
    assert "Samples of warps were lost" in capsys.readouterr().out
    found = json.loads((tmp_path / "out.json").read_text())["tables"][0]["rows"]
    row = found[0]
    assert row["kernel"] == "ForwardKernel" and found[1]["kernel"] == "some_other_kernel"
    assert (row["basis"], row["machine"]) == ("measured", "GB")
    assert row["duration"] == pytest.approx(1234.567)
    # The metric over the elapsed time is requested first, then what there is.
    assert row["tensor"] == 88.25 and row["metrics"]["tensor"] == HEADER[7]
    assert row["mufu"] == 44.0 and row["l2_hits"] == 97.0
    assert row["smem"] is None and row["metrics"]["smem"] is None
    assert row["all_stalls"] == {"barrier": 2.75, "long_scoreboard": 1.5}
    assert row["stalls"] == "barrier 2.75, long_scoreboard 1.50"
    assert (row["samples_lost"], found[1]["samples_lost"]) == (False, True)


@pytest.mark.parametrize(
    ("unit", "value", "expected"),
    [("us", "1234.567", 1234.567), ("msecond", "1.5", 1500.0), ("second", "0.001", 1000.0),
     ("usecond", "7", 7.0), ("ns", "500", 0.5)],
)  # fmt: skip
def test_units_of_a_page(unit, value, expected):
    units = [*UNITS[:5], unit, *UNITS[6:]]
    launches = nsight.read_raw_page(page([*LAUNCH[:5], value, *LAUNCH[6:]], units=units))
    assert nsight.rows(launches)[0]["duration"] == pytest.approx(expected)


def test_what_is_no_raw_page(tmp_path, capsys):
    file = tmp_path / "other.csv"
    file.write_text("a,b\n1,2\n")
    assert main(["profile", "--read", str(file)]) == 2
    assert "--page raw" in capsys.readouterr().err


def test_command_line():
    sampling = nsight.Sampling(interval=2, buffer_bytes=1 << 26)
    command = nsight.collect_command(CASE, BACKWARD, "out.ncu-rep", sampling)
    options = dict(zip(command, command[1:]))
    assert command[0] == "ncu" and options["--set"] == "full"
    assert options["--import-source"] == "no"
    assert options["--target-processes"] == "application-only"
    assert options["--warp-sampling-interval"] == "2"
    assert options["--warp-sampling-buffer-size"] == str(1 << 26)
    # The workload starts the profiler for its second call; no count of launches is assumed.
    assert options["--profile-from-start"] == "off" and "--launch-count" not in command
    with pytest.raises(ValueError, match="0 to 31"):
        nsight.Sampling(interval=32)
    with pytest.raises(ValueError, match="1 MiB"):
        nsight.Sampling(buffer_bytes=1)


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_classes_of_the_kernels_match_the_filter(direction):
    """The name of a compiled kernel holds its class's."""
    specs = {
        FORWARD: (ForwardKernel, DecodeKernel, DecodeE4m3Kernel, CombineKernel),
        BACKWARD: (PreprocessKernel, ProductsKernel, DqKernel, DvKernel, DkdvKernel),
    }
    for of_direction, classes in specs.items():
        for one in classes:
            name = LAUNCH[2].replace("ForwardKernel", one.__name__)
            assert (re.search(nsight.KERNELS[direction], name) is not None) == (
                of_direction == direction
            ), one


@pytest.mark.simulator
@pytest.mark.sampled
def test_names_of_the_kernels_match_the_filter():
    earlier = sm100_sim.last_reports()
    q, k, v = (torch.randn(1, 64, 1, 256).bfloat16().requires_grad_() for _ in range(3))
    flash_attn_func(q, k, v, causal=True).sum().backward()
    reports = [r for r in sm100_sim.last_reports() if not any(r is e for e in earlier)]
    names = [report.kernel for report in reports]
    for direction, count in ((FORWARD, 1), (BACKWARD, 3)):
        matching = [name for name in names if re.search(nsight.KERNELS[direction], name)]
        assert len(matching) == count, (direction, names)
    assert len(names) == 4


def test_the_workload_reads_its_own_options(capsys):
    """The command that is profiled parses, and stops here for want of a GPU."""
    words = nsight.workload(CASE, FORWARD)
    assert words[:3] == ["python", "-m", "bench"]
    status = main(words[3:])
    if not torch.cuda.is_available():
        assert status == 2 and "no CUDA device" in capsys.readouterr().err


def test_running_the_tool(tmp_path, monkeypatch, capsys):
    """A stand-in for ncu on PATH that answers with the sample page."""
    (tmp_path / "page.csv").write_text(page(LAUNCH))
    tool = tmp_path / "ncu"
    answer = f'case "$*" in *--import-source*) ;; *) cat {tmp_path}/page.csv;; esac'
    tool.write_text(f"#!/bin/sh\n{answer}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert main(["profile", "--run", "--direction", "forward"]) == 0
    assert "ForwardKernel" in capsys.readouterr().out
    tool.write_text("#!/bin/sh\nexit 3\n")
    assert main(["profile", "--run"]) == 2
    assert "status 3" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert main(["profile", "--run"]) == 2
    assert "not installed" in capsys.readouterr().err


def test_ranges_of_the_kernels(capsys):
    command = "run-iket profile -- python -m bench profile --workload --direction="
    for options, directions in (([], [FORWARD, BACKWARD]), (["--direction", BACKWARD], [BACKWARD])):
        assert main(["profile", "--iket", "--json", *options]) == 0
        rows = json.loads(capsys.readouterr().out)["tables"][0]["rows"]
        assert [row["purpose"] for row in rows] == [f"trace {one}" for one in directions]
        for row, direction in zip(rows, directions, strict=True):
            assert row["command"].startswith(f"{command}{direction} ")
