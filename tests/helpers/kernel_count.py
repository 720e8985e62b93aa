"""A ceiling for the kernels that the default cases compile, each of them 4 s of processor time.

A run from empty caches counts all of them, CI's among these. With cases of `--all-cases` there is
no ceiling. Workers of pytest-xdist hand their numbers to the process that started them.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from suite import takes_all_cases

#: Kernels that one run of the default cases may compile. Only ever lower it.
MOST = 110
#: Name of the number in what a worker hands over.
KEY = "compiled_kernels"


def pytest_configure(config: pytest.Config) -> None:
    if not takes_all_cases(config):
        from fa4_hd256.run import compile

        count = KernelCount()
        count.follow(compile)
        config.pluginmanager.register(count)


class KernelCount:
    """A plugin of pytest that counts what is compiled, and fails a run that compiles too much."""

    def __init__(self, most: int = MOST) -> None:
        self.most, self.compiled = most, 0

    def follow(self, module: Any) -> None:
        """Count calls of the compiler. What a test puts in its place compiles nothing."""
        plain = module.trace_and_compile

        @functools.wraps(plain)
        def counted(spec: Any) -> Any:
            self.compiled += 1
            return plain(spec)

        module.trace_and_compile = counted

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.compiled += getattr(node, "workeroutput", {}).get(KEY, 0)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[KEY] = self.compiled
        elif self.compiled > self.most and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.compiled > self.most:
            terminalreporter.write_line(
                f"{self.compiled} kernels were compiled; accepted: {self.most}. Let new cases use "
                "kernels of others, or mark them sampled (CONTRIBUTING.md)",
                red=True,
            )
