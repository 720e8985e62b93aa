"""The ceiling for kernels that the default cases compile."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kernel_count import KEY, KernelCount

OK, FAILED = pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED


def counting(most: int, calls: int) -> KernelCount:
    """Return the count behind so many calls of a compiler."""
    count, module = KernelCount(most), SimpleNamespace(trace_and_compile=lambda spec: spec)
    count.follow(module)
    assert [module.trace_and_compile(i) for i in range(calls)] == list(range(calls))
    return count


@pytest.mark.parametrize(("most", "ending"), [(5, OK), (4, FAILED)])
def test_workers_are_counted_with_the_process_that_started_them(most, ending):
    count = counting(most, 2)
    count.pytest_testnodedown(SimpleNamespace(workeroutput={KEY: 3}))
    count.pytest_testnodedown(SimpleNamespace())  # it died
    session = SimpleNamespace(config=SimpleNamespace(), exitstatus=OK)
    count.pytest_sessionfinish(session)
    lines = []
    count.pytest_terminal_summary(SimpleNamespace(write_line=lambda line, red: lines.append(line)))
    assert session.exitstatus == ending
    assert [line.startswith("5 kernels") for line in lines] == [True] * (ending == FAILED)


def test_a_worker_hands_its_number_over():
    count, output = counting(1, 2), {}
    config = SimpleNamespace(workeroutput=output)
    session = SimpleNamespace(config=config, exitstatus=OK)
    count.pytest_sessionfinish(session)
    assert output == {KEY: 2} and session.exitstatus == OK
