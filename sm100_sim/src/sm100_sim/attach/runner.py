"""`python -m sm100_sim SCRIPT.py [args...]`: run a GPU script in the simulator and sum up."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sm100_sim.causes import causes_of, listed
from sm100_sim.errors import MissingExtra, SimulationError
from sm100_sim.report import Report

from . import Session, attached

USAGE = """usage: python -m sm100_sim SCRIPT.py [args...]

Runs a CuTe DSL script that was written for a B200 on this machine's CPU: device queries answer as
the GPU that SM100_SIM_DEVICE names (a B200), CUDA tensors lie in host memory, compiled functions
launch in the simulator. A summary of all launches is printed at the end, and behind it what was
found, by cause, also if the script fails; the exit status is the script's. SM100_SIM_* environment
variables apply (sm100_sim.settings); SM100_SIM_SANITIZE=1 looks for races.
"""
#: Exit status of a script that an exception, an interrupt or a termination ends.
_FAILED, _INTERRUPTED, _TERMINATED = 1, 130, 143


def summary(reports: Iterable[Report], failures: Sequence[BaseException] = ()) -> str:
    """One line for each kernel (launches, grid, seconds, warp instructions), then its findings.

    failures: errors that ended launches; what was found before them counts.
    """
    kernels: dict[str, list[Report]] = {}
    for report in reports:
        kernels.setdefault(report.kernel, []).append(report)
    if not kernels and not failures:
        return "sm100_sim: no kernel was launched"
    lines = [
        f"sm100_sim: {sum(map(len, kernels.values()))} launches of {len(kernels)} kernels"
        f"{f', {len(failures)} more failed' if failures else ''}",
        f"{'launches':>8} {'translate s':>11} {'run s':>8} {'warp instr.':>12}  kernel",
    ]
    for name, launches in kernels.items():
        count = sum(part["warps"] for r in launches for part in r.instructions.values())
        last = launches[-1]
        shape = f"grid {last.grid}, cluster {last.cluster}, block {last.block}"
        lines.append(
            f"{len(launches):8} {sum(r.translate_seconds for r in launches):11.2f} "
            f"{sum(r.wall_seconds for r in launches):8.2f} {count:12}  {name[:80]} ({shape})"
        )
    return "\n".join([*lines, *_found(kernels, failures)])


def _found(kernels: dict[str, list[Report]], failures: Sequence[BaseException]) -> Iterator[str]:
    """The findings of each kernel by cause, those of failed launches included."""
    found = {
        name: [f for report in some for f in report.findings] for name, some in kernels.items()
    }
    for failure in failures:
        name = getattr(failure, "kernel", None) or "a launch that failed"
        found.setdefault(name, []).extend(getattr(failure, "findings", ()))
    for name, findings in found.items():
        causes = causes_of(findings)
        if causes:
            count = sum(len(cause.findings) for cause in causes)
            yield (
                f"sm100_sim: {count} finding{'s' * (count > 1)} of {len(causes)} "
                f"cause{'s' * (len(causes) > 1)} in {name}"
            )
            yield listed(causes)


def run_script(arguments: list[str]) -> int:
    """Run the script `arguments[0]` with the rest as its arguments; returns the exit status.

    If an exception ends the script, its traceback is printed, then the summary.
    """
    script = arguments[0]
    if not os.path.isfile(script):
        print(f"sm100_sim: {script!r} is not a file", file=sys.stderr)
        return 2
    saved = sys.argv, list(sys.path)
    sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.abspath(script))
    try:
        with contextlib.ExitStack() as stack:
            try:
                session = stack.enter_context(attached())
            except MissingExtra as error:
                print(f"sm100_sim: {error}", file=sys.stderr)
                return 2
            stack.enter_context(_terminations())
            status = _run(script, session)
            print(summary(session.reports, session.failures), flush=True)
    finally:
        sys.argv, sys.path[:] = saved
    return status


class _Terminated(KeyboardInterrupt):
    """SIGTERM."""


@contextlib.contextmanager
def _terminations() -> Iterator[None]:
    """Let SIGTERM end the script as an interrupt does, so that its findings are printed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(*_: Any) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(script: str, session: Session) -> int:
    """Run the script; its exit status. Prints the traceback of what ends it."""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return _FAILED
    except BaseException as error:
        _print_traceback(error, script, session.failures)
        if isinstance(error, KeyboardInterrupt):
            return _TERMINATED if isinstance(error, _Terminated) else _INTERRUPTED
        return _FAILED
    return 0


def _print_traceback(error: BaseException, script: str, failures: list[BaseException]) -> None:
    """The script's own frames, without the findings: the summary has them."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != script:
        frames = frames.tb_next
    findings = [getattr(failure, "findings", ()) for failure in failures]
    for failure in failures:
        if isinstance(failure, SimulationError):
            failure.findings = ()
    sys.stdout.flush()
    traceback.print_exception(type(error), error, frames or error.__traceback__)
    sys.stderr.flush()
    for failure, found in zip(failures, findings, strict=True):
        if isinstance(failure, SimulationError):
            failure.findings = found
