"""Processor time of each test, and of the kernels that it is the first to compile or translate.

`pytest --kernel-times=FILE`, with caches that are empty, appends a line of JSON per test; workers
of pytest-xdist share the file.  `python tests/helpers/kernel_times.py FILE` prints the sums, and
the tests that take most.
"""

from __future__ import annotations

import functools
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

#: Loading a kernel from a cache takes less than this, in seconds; it is not listed.
LEAST = 0.2
#: Tests that the summary names.
NAMED = 30


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kernel-times",
        metavar="FILE",
        help="append to FILE the processor time of each test and of the kernels it compiles",
    )


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--kernel-times")
    if file:
        from fa4_hd256.run import compile
        from fa4_hd256.run.kernel_names import described
        from sm100_sim.translate import kernel

        recorder = Recorder(Path(file).absolute())
        recorder.measure(compile, "_compile_entry", lambda key, spec: described(spec))
        recorder.measure(kernel, "_native_code", lambda compiled, *_: compiled.kernel.name)
        config.pluginmanager.register(recorder)


class Recorder:
    """A plugin of pytest that writes a line per test to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kernels: list[tuple[str, str, float]] = []

    def measure(self, module: Any, name: str, describe: Callable[..., str]) -> None:
        """Replace a function of a module by one whose calls are noted.  describe: takes its
        arguments, and names the kernel."""
        plain = getattr(module, name)

        @functools.wraps(plain)
        def measured(*arguments: Any) -> Any:
            begin = time.process_time()
            result = plain(*arguments)
            seconds = time.process_time() - begin
            if seconds >= LEAST:
                self.kernels.append((name, describe(*arguments), round(seconds, 2)))
            return result

        setattr(module, name, measured)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        self.kernels.clear()
        begin = processor_seconds()
        result = yield
        seconds = round(processor_seconds() - begin, 2)
        line = {"test": item.nodeid, "seconds": seconds, "kernels": self.kernels}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return result


def processor_seconds() -> float:
    """Return the processor time of this process and of children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def summary(lines: Iterable[str]) -> str:
    """Return the sums of a recording, and its tests that take most with the kernels they make."""
    tests = [json.loads(line) for line in lines]
    kernels = [kernel for test in tests for kernel in test["kernels"]]
    parts = [f"{len(tests)} tests, {sum(test['seconds'] for test in tests):.0f} s"]
    for name in sorted({kernel[0] for kernel in kernels}):
        seconds = [kernel[2] for kernel in kernels if kernel[0] == name]
        parts.append(f"{name}: {len(seconds)} kernels, {sum(seconds):.0f} s")
    for test in sorted(tests, key=lambda test: -test["seconds"])[:NAMED]:
        made = ", ".join(f"{kernel[1]} {kernel[2]:.0f}" for kernel in test["kernels"])
        parts.append(f"{test['seconds']:6.1f} {test['test']}: {made}")
    return "\n".join(parts)


if __name__ == "__main__":
    print(summary(Path(sys.argv[1]).read_text("utf-8").splitlines()))
