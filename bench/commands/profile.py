"""`python -m bench profile`: Nsight Compute on our kernels.

Prints the command lines; with --run it runs them on this machine's GPU, and `ncu` prints what it
found. Options: Nsight Compute CLI manual, command line options.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence

import torch

from bench.measure.providers import Inputs, Ours, attempt, backward_call, forward_call
from bench.suite import BACKWARD, DIRECTIONS, FORWARD, Case
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Table

#: Direction -> regular expression of its kernels' names.
KERNELS = {
    FORWARD: "(Forward|Decode|DecodeE4m3|Combine)Kernel",
    BACKWARD: "(Preprocess|Products|Dq|Dv|Dkdv)Kernel",
}
#: Device memory for samples of warps: long kernels lose some of them in the default one.
BUFFER_BYTES = 512 << 20


def workload(case: Case, direction: str) -> list[str]:
    """Return the command that is profiled: compile, then call twice, in one process."""
    lengths = [] if case.seqlen_k == case.seqlen_q else [f"--seqlen-k={case.seqlen_k}"]
    causal = ["--causal"] if case.causal else []
    window = [] if case.window[0] is None else [f"--window={case.window[0]}"]
    return [
        "python", "-m", "bench", "profile", "--workload", f"--direction={direction}",
        f"--batch={case.batch}", f"--seqlen={case.seqlen_q}", f"--heads={case.heads_text}",
        *lengths, *causal, *window,
    ]  # fmt: skip


def collect_command(case: Case, direction: str, report: str) -> list[str]:
    """Return ncu on the part of the workload that enables it: our kernels only, all sections, no
    sources. How many launches that is depends on the shape: the backward may take several
    rounds."""
    return [
        "ncu", "--set", "full", "--import-source", "no",
        "--target-processes", "application-only",
        "--kernel-name", f"regex:{KERNELS[direction]}", "--profile-from-start", "off",
        "--warp-sampling-buffer-size", str(BUFFER_BYTES),
        "--export", report, "--force-overwrite", *workload(case, direction),
    ]  # fmt: skip


def commands(case: Case, arguments: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """Return (purpose, command line), in order, for the directions chosen."""
    found = []
    for direction in [arguments.direction] if arguments.direction else DIRECTIONS:
        if arguments.iket:
            # Timelines of the ranges in the kernel (`kernels.ranges`), by CuTe DSL's own tool.
            trace = ["run-iket", "profile", "--", *workload(case, direction)]
            found.append((f"trace {direction}", trace))
            continue
        report = f"{arguments.report}-{direction}.ncu-rep"
        found.append((f"collect {direction}", collect_command(case, direction, report)))
        found.append((f"read {direction}", ["ncu", "--import", report, "--page", "details"]))
    return found


def table(wanted: Sequence[tuple[str, list[str]]]) -> Table:
    """List command lines that were not run: below the table, where they can be copied."""
    rows = [
        {"purpose": purpose, "tool": command[0], "command": shlex.join(command),
         BASIS: "computed", MACHINE: "not run"}
        for purpose, command in wanted
    ]  # fmt: skip
    lines = "\n".join(row["command"] for row in rows)
    notes = f"```\n{lines}\n```", "Not run: --run runs them on a GPU that the kernels are for."
    return Table("profile", "Commands", (Column("purpose"), Column("tool")), rows, notes)


def run(wanted: Sequence[tuple[str, list[str]]]) -> None:
    """Run commands. Raises ValueError if a tool is missing or fails."""
    for _, command in wanted:
        if shutil.which(command[0]) is None:
            raise ValueError(f"{command[0]} is not installed, or not on PATH")
        print(shlex.join(command), file=sys.stderr, flush=True)
        started = [sys.executable if word == "python" else word for word in command]
        if status := subprocess.run(started).returncode:
            raise ValueError(f"{command[0]} ended with status {status}")


def call_twice(case: Case, direction: str) -> None:
    """Run the workload: one call that compiles, one that is profiled. Raises ValueError without a
    GPU of ours and for a call that fails."""
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


def chosen_case(arguments: argparse.Namespace) -> Case:
    """Return the case of the options. Raises ValueError for sizes that make none."""
    try:
        heads, heads_kv = map(int, arguments.heads.split("/"))
    except ValueError:
        raise ValueError(f"--heads {arguments.heads}; accepted is a pair such as 16/2") from None
    seqlen, seqlen_k = arguments.seqlen, arguments.seqlen_k or arguments.seqlen
    if min(arguments.batch, seqlen, seqlen_k, heads, heads_kv) < 1:
        raise ValueError("batch, lengths and heads must be at least 1")
    lengths = ((seqlen, seqlen_k),) * arguments.batch
    window = (arguments.window, None)
    return Case("chosen", lengths, heads, heads_kv, arguments.causal, window)


def main(arguments: argparse.Namespace) -> int:
    case = chosen_case(arguments)
    if arguments.workload:
        call_twice(case, arguments.direction or FORWARD)
        return 0
    wanted = commands(case, arguments)
    if arguments.run:
        run(wanted)
    else:
        emit(table(wanted), arguments)
    return 0
