"""Test the replay's compiled functions: the queue of signals, and where numba keeps their code."""

from typing import NamedTuple

import numpy as np
import pytest

pytest.importorskip("numba")

import threading
import time

from numba.core import caching

from sm100_sim.timing.replaying import signals


def double(x):
    return 2 * x


def test_installed_where_nothing_can_be_written(monkeypatch):
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    with pytest.warns(RuntimeWarning, match="in every process.*Set NUMBA_CACHE_DIR"):
        found = signals.compiled(double)
    assert found(3) == 6 and len(found.signatures) == 1


def test_kept_where_it_can_be(monkeypatch, tmp_path):
    monkeypatch.setattr(caching.config, "CACHE_DIR", str(tmp_path))
    assert signals.compiled(double)(3) == 6
    assert list(tmp_path.rglob("*.nbi"))


def test_another_version_of_a_file_keeps_its_code_elsewhere(monkeypatch, tmp_path):
    """numba itself would take the old code where a called function's file alone has changed."""
    monkeypatch.setattr(caching.config, "CACHE_DIR", str(tmp_path))
    for version in ("first", "second"):
        monkeypatch.setattr(signals, "_version", lambda version=version: version)
        signals.compiled(double)(3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["replay-first", "replay-second"]
    assert caching.config.CACHE_DIR == str(tmp_path)


def test_one_process_compiles_while_others_wait(monkeypatch, tmp_path):
    """Whoever waits for the lock finds what was kept meanwhile."""
    monkeypatch.setattr(caching.config, "CACHE_DIR", str(tmp_path))
    first, second = signals.compiled(double), signals.compiled(double)
    plain = first.compile

    def slowly(types):
        time.sleep(0.3)
        return plain(types)

    monkeypatch.setattr(first, "compile", slowly)
    compiling = threading.Thread(target=signals.compile_once, args=(first, 3))
    compiling.start()
    time.sleep(0.1)
    signals.compile_once(second, 3)
    compiling.join()
    assert sum(first.stats.cache_misses.values()) == 1
    assert not second.stats.cache_misses and sum(second.stats.cache_hits.values()) == 1
    signals.compile_once(second, 3)
    assert len(second.signatures) == 1 and second(3) == 6


class Queue(NamedTuple):
    """The tables of a model that the queue of signals works on."""

    signal: np.ndarray
    counts: np.ndarray


@pytest.mark.parametrize("count", [2, 3, 8, 33])
def test_signals_of_one_clock_leave_in_the_order_of_queueing(count, monkeypatch):
    """A heap alone would exchange signals of one clock. The functions run without numba, which
    would keep code for this test's tables."""
    monkeypatch.setattr(signals, "push", signals.push.py_func)
    queue = Queue(np.zeros((2 * count, signals.SIGNAL_COLUMNS), np.int64), np.zeros(2, np.int64))
    clocks = [100 + number % 2 for number in range(2 * count)]
    for number, clock in enumerate(clocks):
        signals.signal.py_func(queue, clock, number, 1, 0, 0)
    left = []
    while queue.counts[signals.SIGNALLED]:
        left.append(int(queue.signal[0, 2]))
        signals.drop.py_func(queue)
    assert left == sorted(range(2 * count), key=lambda number: clocks[number])
