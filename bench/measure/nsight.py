"""Nsight Compute on our kernels: its command lines, and what matters of its raw page.

Options: Nsight Compute CLI manual, command line options; names of metrics: Nsight Compute profiling
guide. None of it has been tried on an SM100 GPU: a metric that a report does not have is listed as
such.
"""

from __future__ import annotations

import csv
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.suite import BACKWARD, FORWARD, Case
from bench.tables.table import BASIS, MACHINE

from .providers import Inputs, Ours, attempt, backward_call, forward_call

#: Direction -> regular expression of its kernels' names.
KERNELS = {
    FORWARD: "(Forward|Decode|DecodeE4m3|Combine)Kernel",
    BACKWARD: "(Preprocess|Products|Dq|Dv|Dkdv)Kernel",
}
#: 2^(5 + n) clocks between two samples of a warp scheduler; 0 to 31 are accepted.
INTERVAL = 3
BUFFER_BYTES = 512 << 20


@dataclass(frozen=True)
class Metric:
    """A column of the summary: the first of the patterns that a report has a metric for."""

    name: str
    unit: str
    format: str
    patterns: tuple[str, ...]
    #: One unit of the report's base unit, in `unit`.
    scale: float = 1.0


_PERCENT = r"\.avg\.pct_of_peak_sustained_elapsed"
_EITHER = r"\.avg\.pct_of_peak_sustained_(elapsed|active)"
METRICS = (
    Metric("duration", "us", ".1f", (r"gpu__time_duration\.sum",), 1e-3),
    Metric("clock", "MHz", ".0f", (r"smsp?__cycles_elapsed\.avg\.per_second",), 1e-6),
    Metric("tensor", "%", ".1f", (
        "sm__pipe_tensor_subpipe_hmma_cycles_active" + _PERCENT,
        "sm__pipe_tensor_(op_hmma_)?cycles_active" + _EITHER,
        "sm__pipe_tensor_subpipe_hmma_cycles_active" + _EITHER,
    )),
    Metric("smem", "%", ".1f", (
        "l1tex__data_pipe_lsu_wavefronts_mem_shared" + _PERCENT,
        "l1tex__data_pipe_lsu_wavefronts" + _PERCENT,
        "l1tex__data_bank_(reads|writes)" + _PERCENT,
    )),
    Metric("l2", "%", ".1f", ("lts__t_sectors" + _PERCENT, "lts__throughput" + _PERCENT)),
    Metric("l2_hits", "%", ".1f", (r"lts__t_sector_hit_rate\.pct",)),
    Metric("dram", "%", ".1f", (r"(gpu__)?dram__?throughput" + _PERCENT,)),
    Metric("mufu", "%", ".1f", (
        "sm__pipe_xu_cycles_active" + _EITHER, "sm__inst_executed_pipe_xu" + _EITHER,
    )),
    Metric("fma", "%", ".1f", (
        "sm__pipe_fma_cycles_active" + _EITHER, "sm__inst_executed_pipe_fma" + _EITHER,
    )),
    Metric("issue", "%", ".1f", (r"smsp?__issue_active" + _EITHER,
                                 r"sm__inst_issued" + _EITHER)),
)  # fmt: skip
#: Average number of warps stalled for a reason whenever one issues; "not issued" is counted apart.
_STALL = re.compile(
    r"smsp__average_warps_issue_stalled_(?!.*not_issued)(\w+)_per_issue_active\.ratio"
)
_SAMPLES_LOST = ("smsp__pcsamp_dropped_bytes", "smsp__pcsamp_buffer_overflow")
_SHOWN_STALLS = 4
#: File descriptor: what the tools say while they collect must not mix with our own results.
_STDERR = 2
#: Units that a raw page may be in, as multiples of the base units that METRICS expects.
_PREFIXES = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}


@dataclass(frozen=True)
class Sampling:
    """Sampling of warps. interval: see `INTERVAL`. buffer_bytes: device memory for the samples.

    Raises ValueError for values that Nsight Compute does not take.
    """

    interval: int = INTERVAL
    buffer_bytes: int = BUFFER_BYTES

    def __post_init__(self) -> None:
        if not 0 <= self.interval <= 31:
            raise ValueError(f"interval {self.interval}; accepted are 0 to 31: 2^(5 + n) clocks")
        if self.buffer_bytes < 1 << 20:
            raise ValueError(f"a buffer of {self.buffer_bytes} bytes; accepted are 1 MiB and more")


def workload(case: Case, direction: str) -> list[str]:
    """The command that is profiled: compile, then call twice, in one process."""
    lengths = [] if case.seqlen_k == case.seqlen_q else [f"--seqlen-k={case.seqlen_k}"]
    causal = ["--causal"] if case.causal else []
    window = [] if case.window[0] is None else [f"--window={case.window[0]}"]
    return [
        "python", "-m", "bench", "profile", "--workload", f"--direction={direction}",
        f"--batch={case.batch}", f"--seqlen={case.seqlen_q}", f"--heads={case.heads_text}",
        *lengths, *causal, *window,
    ]  # fmt: skip


def collect_command(case: Case, direction: str, report: str, sampling: Sampling) -> list[str]:
    """ncu on the part of the workload that enables it: our kernels only, all sections, no sources.

    How many launches that is depends on the shape: the backward may take several rounds.
    """
    return [
        "ncu", "--set", "full", "--import-source", "no",
        "--target-processes", "application-only",
        "--kernel-name", f"regex:{KERNELS[direction]}", "--profile-from-start", "off",
        "--warp-sampling-interval", str(sampling.interval),
        "--warp-sampling-buffer-size", str(sampling.buffer_bytes),
        "--export", report, "--force-overwrite", *workload(case, direction),
    ]  # fmt: skip


def read_command(report: str) -> list[str]:
    """The raw page of a report as CSV, in base units."""
    return ["ncu", "--import", report, "--page", "raw", "--csv", "--print-units", "base"]


def trace_command(case: Case, direction: str) -> list[str]:
    """Timelines of the ranges in the kernel (`kernels.ranges`), by CuTe DSL's own tool."""
    return ["run-iket", "profile", "--", *workload(case, direction)]


def read_raw_page(text: str) -> list[dict[str, tuple[str, str]]]:
    """The launches of a raw page: name of a metric or a column -> (value, unit).

    Raises ValueError if it is none.
    """
    lines = text.splitlines()
    # The tool writes messages of its own before the table.
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    rows = list(csv.reader(lines[begin:])) if begin is not None else []
    if len(rows) < 2 or "Kernel Name" not in rows[0]:
        raise ValueError(
            "not a raw page of Nsight Compute as CSV; make one with "
            + shlex.join(read_command("FILE.ncu-rep"))
        )
    header, units, *launches = rows
    return [
        {name: (value, unit) for name, value, unit in zip(header, launch, units)}
        for launch in launches if len(launch) == len(header)
    ]  # fmt: skip


def _number(value: str) -> float | None:
    try:
        return float(value.replace(",", ""))
    except ValueError:
        return None


def _in_base_unit(value: float, unit: str) -> float:
    """Seconds as nanoseconds, hertz as hertz, as `--print-units base` gives them."""
    if unit in ("second", "s"):
        return value * 1e9
    for name, base in (("second", 1e9), ("s", 1e9), ("hz", 1.0), ("Hz", 1.0)):
        prefix = unit.removesuffix(name)
        if prefix != unit and prefix in ("nano", "micro", "milli"):
            return value * {"nano": 1e-9, "micro": 1e-6, "milli": 1e-3}[prefix] * base
        if prefix != unit and prefix in _PREFIXES:
            return value * _PREFIXES[prefix] * base
    return value


def find(metric: Metric, launch: dict[str, tuple[str, str]]) -> tuple[float | None, str | None]:
    """Return (value, name in the report), None where the report has no such metric."""
    for pattern in metric.patterns:
        for name, (text, unit) in launch.items():
            value = _number(text)
            if value is not None and re.fullmatch(pattern, name):
                return _in_base_unit(value, unit) * metric.scale, name
    return None, None


def stalls(launch: dict[str, tuple[str, str]]) -> dict[str, float]:
    """Reason -> warps that wait for it on average when one issues, the largest first."""
    found = {}
    for name, (text, _) in launch.items():
        matched, value = _STALL.fullmatch(name), _number(text)
        if matched and value:
            found[matched[1]] = value
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def rows(launches: Iterable[dict[str, tuple[str, str]]]) -> list[dict[str, Any]]:
    """A row for each launch; `metrics` names what each figure was read from."""
    result = []
    for launch in launches:
        found = {metric.name: find(metric, launch) for metric in METRICS}
        reasons = stalls(launch)
        listed = ", ".join(
            f"{name} {value:.2f}" for name, value in list(reasons.items())[:_SHOWN_STALLS]
        )
        lost = {name: _number(launch.get(name, ("0", ""))[0]) for name in _SAMPLES_LOST}
        device = launch.get("device__attribute_display_name", ("", ""))[0]
        result.append({
            "kernel": short_name(launch["Kernel Name"][0]),
            **{name: value for name, (value, _) in found.items()},
            "stalls": listed or None, "all_stalls": reasons,
            "samples_lost": any(lost.values()),
            "metrics": {name: source for name, (_, source) in found.items()},
            BASIS: "measured", MACHINE: device or "GPU of the report",
        })  # fmt: skip
    return result


def short_name(kernel: str) -> str:
    """The class that a mangled name ends with, else its start."""
    found = re.search(r"(Forward|Combine|Preprocess|Products|Dq|Dv|Dkdv)Kernel", kernel)
    return found[0] if found else kernel[:40]


def run(wanted: Sequence[tuple[str, list[str]]]) -> list[dict[str, Any]]:
    """Run commands as `commands` gives them; rows of the pages read.

    Raises ValueError if the tool is missing or fails, with what it said.
    """
    found = []
    for purpose, command in wanted:
        if shutil.which(command[0]) is None:
            raise ValueError(f"{command[0]} is not installed, or not on PATH")
        print(shlex.join(command), file=sys.stderr, flush=True)
        reading = purpose.startswith("read")
        started = [sys.executable if word == "python" else word for word in command]
        output = subprocess.PIPE if reading else _STDERR
        done = subprocess.run(started, stdout=output, text=True)
        if done.returncode:
            raise ValueError(f"{command[0]} ended with status {done.returncode}")
        if reading:
            found += rows(read_raw_page(done.stdout))
    return found


def call_twice(case: Case, direction: str) -> None:
    """The workload: one call that compiles, one that is profiled.

    Raises ValueError without an SM100 and for a call that fails.
    """
    reason = Ours().missing()
    if reason:
        raise ValueError(f"nothing to profile: {reason}")
    inputs = Inputs.random(case, torch.device("cuda"), torch.bfloat16)
    prepare = forward_call if direction == FORWARD else backward_call
    call = prepare(Ours(), inputs)
    for profiled in (False, True):
        torch.cuda.synchronize()
        if profiled:
            torch.cuda.profiler.start()
        _, failed = attempt(call)
        if failed:
            raise ValueError(failed)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
