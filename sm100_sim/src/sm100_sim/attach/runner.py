"""`python -m sm100_sim SCRIPT.py [args...]`: run a GPU script in the simulator and sum up."""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

from sm100_sim.command import flags
from sm100_sim.command.files import write_files
from sm100_sim.command.outcome import Outcome
from sm100_sim.command.summary import summary
from sm100_sim.errors import MissingExtra, SimulationError
from sm100_sim.report import collected
from sm100_sim.terminal import wants_colour

from . import Session, attached

USAGE = """usage: python -m sm100_sim [flags] SCRIPT.py [args...]

Runs a script in CuTe DSL or Triton that was written for a B200 on this machine's CPU: device
queries answer as the GPU that --device names (a B200), CUDA tensors lie in host memory, kernels
launch in the simulator. A summary of all launches is printed at the end, and behind it what was
found, by cause, also if the script fails; the exit status is the script's. --sanitize looks for
races. SM100_SIM_* environment variables apply, too (sm100_sim.settings).

flags: --sanitize[=wait-ld|strict|strict-order] --seed N --device b200[:SMS] --clusters N
       --keep-ptx DIR --html FILE --sarif FILE --junit FILE
"""
#: Folders of packages whose frames say nothing to the author of a kernel.
_MACHINERY = frozenset({"sm100_sim", "triton", "nvidia_cutlass_dsl", "cutlass", "tvm_ffi"})
#: Exit status of a script that an exception, an interrupt or a termination ends.
_FAILED, _INTERRUPTED, _TERMINATED = 1, 130, 143


def run_script(arguments: list[str]) -> int:
    """Run a script; returns the exit status.

    arguments: flags (`command.flags`), the script, its own arguments. If an exception ends the
    script, its traceback is printed, then the summary.
    """
    made = flags.parser("", "Runs a GPU script in the simulator.", "SCRIPT.py")
    made.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    choice = flags.parsed(made, arguments, in_front=True)
    if not os.path.isfile(choice.file):
        print(f"sm100_sim: {choice.file!r} is not a file", file=sys.stderr)
        return 2
    saved = sys.argv, list(sys.path)
    sys.argv = [choice.file, *choice.args]
    sys.path[0] = os.path.dirname(os.path.abspath(choice.file))
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(flags.applied(vars(choice)))
            try:
                session = stack.enter_context(attached(trace=bool(choice.html)))
                # Launches by launch_ptx and its like are not the session's, but count.
                reports = stack.enter_context(collected())
            except MissingExtra as error:
                print(f"sm100_sim: {error}", file=sys.stderr)
                return 2
            stack.enter_context(_terminations())
            status = _run(choice.file, session)
            print(summary(reports, session.failures, wants_colour(sys.stdout)), flush=True)
            write_files(choice, Outcome(reports, session.failures, session.modules))
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
    """The script's own frames, without the findings: the summary has them. Of an error of a launch
    the frames below the script's are the compilers' and the simulator's, and are left out."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != script:
        frames = frames.tb_next
    findings = [getattr(failure, "findings", ()) for failure in failures]
    for failure in failures:
        if isinstance(failure, SimulationError):
            failure.findings = ()
    sys.stdout.flush()
    told = traceback.TracebackException(type(error), error, frames or error.__traceback__)
    if isinstance(error, SimulationError):
        told.stack = traceback.StackSummary.from_list(
            [frame for frame in told.stack if not _is_machinery(frame.filename)]
        )
        told.__cause__ = told.__context__ = None
    print("".join(told.format()), end="", file=sys.stderr, flush=True)
    for failure, found in zip(failures, findings, strict=True):
        if isinstance(failure, SimulationError):
            failure.findings = found


def _is_machinery(file: str) -> bool:
    """Return True for a file of the simulator or of a compiler."""
    parts = os.path.normpath(file).split(os.sep)
    return not _MACHINERY.isdisjoint(parts[:-1])
