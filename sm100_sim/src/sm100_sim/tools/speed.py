"""Speed of the simulator on a call that launches kernels, and seconds to translate a kernel.

`python -m sm100_sim speed SCRIPT.py [args...]` times a script, `speed FILE.ptx` a PTX module.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import runpy
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from sm100_sim.isa import load_table
from sm100_sim.ptx.parser import Kernel, parse_module
from sm100_sim.report import last_reports
from sm100_sim.run.blas import single_threaded
from sm100_sim.translate.kernel import routine_address, translate

__all__ = ["PARTS", "Speed", "Translation", "measure", "sanitizing", "translation", "work_seconds"]

#: Parts of a run's time, by `report.Report.seconds`.
PARTS = ("products", "operands", "copies", "instructions", "python")


@dataclass(frozen=True)
class Speed:
    """A call that launches kernels.

    seconds: the fastest of `runs` warm runs, of the first one if there is none; first_seconds: the
    first run's, with the translation of kernels that this process has not run before. cpu_seconds:
    processor time of the fastest one; spent: what of it was spent on each of `PARTS`.
    warp_instructions: executed. threads: most clusters that ran at the same time. cores: of this
    process. launches: of kernels. sanitized_cpu_seconds: processor time of the fastest of `runs`
    warm runs under the sanitizer, None without warm runs.
    """

    runs: int
    first_seconds: float
    seconds: float
    warp_instructions: int
    cpu_seconds: float
    spent: dict[str, float]
    threads: int
    peak_memory_bytes: int
    cores: int
    launches: int = 1
    sanitized_cpu_seconds: float | None = None

    @property
    def instructions_per_second(self) -> float:
        return self.warp_instructions / self.seconds

    @property
    def sanitized_ratio(self) -> float | None:
        """Processor time under the sanitizer, of that without it."""
        if self.sanitized_cpu_seconds is None:
            return None
        return self.sanitized_cpu_seconds / self.cpu_seconds


def measure(call: Callable[[], Any], runs: int = 3) -> Speed:
    """Run `call` once to warm up and `runs` times more; with 0 runs the first one counts.

    The reports of its launches are added up, of more than 64 the last ones. Raises ValueError for a
    negative number of runs.
    """
    if runs < 0:
        raise ValueError(f"runs is {runs}; accepted: whole numbers from 0 on")
    times, cpu_times, reports = [], [], []
    for _ in range(1 + runs):
        before = last_reports()
        start, cpu_start = time.perf_counter(), time.process_time()
        call()
        times.append(time.perf_counter() - start)
        cpu_times.append(time.process_time() - cpu_start)
        reports.append([r for r in last_reports() if not any(r is one for one in before)])
    sanitized = []
    if runs:
        with sanitizing():
            call()
            for _ in range(runs):
                cpu_start = time.process_time()
                call()
                sanitized.append(time.process_time() - cpu_start)
    fastest = min(range(min(1, runs), 1 + runs), key=times.__getitem__)
    chosen = reports[fastest]
    spent = {part: sum(one.seconds.get(part, 0.0) for one in chosen) for part in PARTS}
    return Speed(
        runs=runs,
        first_seconds=times[0],
        seconds=times[fastest],
        warp_instructions=sum(one.warp_instructions for one in chosen),
        cpu_seconds=cpu_times[fastest],
        spent=spent,
        threads=max((one.threads for one in chosen), default=0),
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        cores=len(os.sched_getaffinity(0)),
        launches=len(chosen),
        sanitized_cpu_seconds=min(sanitized, default=None),
    )


def sanitizing() -> AbstractContextManager:
    """Launches run under the sanitizer, as with SM100_SIM_SANITIZE=1."""
    return mock.patch.dict(os.environ, {"SM100_SIM_SANITIZE": "1"})


def work_seconds(work: Callable[[], Any], repeats: int = 200) -> float:
    """Processor time of numpy's work on one thread: median of `repeats` / 2 warm calls."""
    times = []
    with single_threaded():
        for _ in range(repeats):
            start = time.thread_time()
            work()
            times.append(time.thread_time() - start)
    return sorted(times[repeats // 2 :])[repeats // 4]


@dataclass(frozen=True)
class Translation:
    """A kernel. Seconds to parse its PTX and to translate it, plain and for the sanitizer, once for
    all processes that share the cache on disk; cached_seconds: from the cache, in each later
    one."""

    kernel: str
    instructions: int
    parse_seconds: float
    seconds: float
    sanitized_seconds: float
    cached_seconds: float


def translation(ptx: str) -> list[Translation]:
    """Time the translation of each kernel of a PTX module. The run loop and the memory checks,
    which all kernels share, are there before."""
    load_table()
    routine_address("run")
    start = time.perf_counter()
    kernels = parse_module(ptx)
    parse_seconds = time.perf_counter() - start
    return [_translation(kernel, ptx, parse_seconds) for kernel in kernels.values()]


def _translation(kernel: Kernel, ptx: str, parse_seconds: float) -> Translation:
    seconds, sanitized = _seconds(kernel), _seconds(kernel, sanitize=True)
    translate(kernel, ptx=ptx)
    return Translation(
        kernel.name, len(kernel.instructions), parse_seconds, seconds, sanitized,
        _seconds(kernel, ptx=ptx),
    )  # fmt: skip


def _seconds(kernel: Kernel, **options: Any) -> float:
    start = time.perf_counter()
    translate(kernel, **options)
    return time.perf_counter() - start


def speed(arguments: list[str]) -> int:
    """The command; 2 if the script launched nothing in the simulator."""
    parser = argparse.ArgumentParser(
        prog="python -m sm100_sim speed",
        allow_abbrev=False,
        description="time a script's launches in the simulator, plain and under the sanitizer, or "
        "the translation of a PTX module",
    )
    parser.add_argument("--runs", type=int, default=3, help="warm runs; the fastest counts")
    parser.add_argument(
        "--as-is",
        action="store_true",
        help="the script launches in the simulator by itself; otherwise it is a "
        "GPU script and runs as in `python -m sm100_sim SCRIPT.py`",
    )
    parser.add_argument("file", help="a script, or a PTX module (*.ptx)")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    choice = parser.parse_args(arguments)
    if choice.runs < 0:
        parser.error("--runs takes numbers from 0 on")
    if choice.file.endswith(".ptx"):
        for found in translation(Path(choice.file).read_text()):
            print(
                f"{found.kernel}: {found.instructions} instructions, parse "
                f"{found.parse_seconds:.2f} s, translate {found.seconds:.2f} s, for the "
                f"sanitizer {found.sanitized_seconds:.2f} s, from the cache "
                f"{found.cached_seconds:.2f} s"
            )
        return 0
    return _script(choice)


def _script(choice: argparse.Namespace) -> int:
    if not Path(choice.file).is_file():
        print(f"sm100_sim: {choice.file!r} is not a file", file=sys.stderr)
        return 2
    from sm100_sim.attach import attached

    sys.argv = [choice.file, *choice.args]
    sys.path.insert(0, str(Path(choice.file).resolve().parent))

    def call() -> None:
        with contextlib.nullcontext() if choice.as_is else attached():
            runpy.run_path(choice.file, run_name="__main__")

    found = measure(call, choice.runs)
    if not found.launches:
        print("the script launched no kernel in the simulator", file=sys.stderr)
        return 2
    print(
        f"launches: {found.launches}, {found.seconds:.2f} s ({found.cpu_seconds:.2f} s of "
        f"processor time), {found.instructions_per_second:.3g} warp instructions a second, "
        f"at most {found.threads} clusters at a time on {found.cores} cores"
    )
    parts = ", ".join(f"{part} {found.spent[part]:.2f} s" for part in PARTS)
    print(f"of the processor time: {parts}")
    if found.sanitized_ratio is not None:
        print(f"under the sanitizer {found.sanitized_ratio:.1f} times the processor time")
    return 0
