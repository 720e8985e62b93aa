"""Scheduler of a call: the argument, then FA_CLC, then the default by mask and lengths."""

import pytest

from fa4_hd256.schedulers import (
    ClcScheduler,
    CounterScheduler,
    StaticPersistentScheduler,
    clc_requested,
    of_clusters,
    prefers_clc,
    scheduler_class,
)


@pytest.mark.parametrize(
    ("argument", "environment", "expected"),
    [
        (None, {}, False),
        (None, {"FA_CLC": "0"}, False),
        (None, {"FA_CLC": "1"}, True),
        (True, {"FA_CLC": "0"}, True),
        (False, {"FA_CLC": "1"}, False),
        # The argument decides, so the variable is not even read.
        (False, {"FA_CLC": "maybe"}, False),
    ],
)
def test_argument_before_variable(argument, environment, expected):
    assert clc_requested(argument, environment=environment) is expected


@pytest.mark.parametrize("default", [False, True])
def test_variable_before_default(default):
    assert clc_requested(None, default, {}) is default
    assert clc_requested(None, default, {"FA_CLC": "1"}) is True
    assert clc_requested(None, default, {"FA_CLC": "0"}) is False


@pytest.mark.parametrize(
    ("bounded", "rows", "capacity", "expected"),
    [
        (False, 1, 1, False),  # all tiles are equal
        (True, 1, 1, True),
        (True, 6528, 8 * 3732, True),
        (True, 30044, 64 * 4002, False),  # most tiles lie past the end of a sequence
        (False, 6528, 8 * 3732, True),
        (False, 30044, 64 * 4002, False),
        (False, 4096, 4 * 1024, False),  # packed, of equal length
    ],
)
def test_the_default(bounded, rows, capacity, expected):
    """The packed ones are two batches that docs/benchmarks.md has times of."""
    assert prefers_clc(bounded, rows, capacity) is expected


@pytest.mark.parametrize("bounded", [False, True])
def test_shared_sms_are_the_dynamic_schedulers(bounded):
    """Many empty tiles cost less than a static grid that does not fit."""
    assert prefers_clc(bounded, 1, 100, shared=True)


def test_the_process_environment_is_read_at_each_call(monkeypatch):
    monkeypatch.setenv("FA_CLC", "1")
    assert clc_requested() is True
    monkeypatch.setenv("FA_CLC", "0")
    assert clc_requested() is False
    monkeypatch.delenv("FA_CLC")
    assert clc_requested() is False


@pytest.mark.parametrize("value", ["", "true", "2", " 1", "CLC"])
def test_other_values_are_refused(value):
    with pytest.raises(ValueError, match="FA_CLC is .*accepted are 0 .*and 1"):
        clc_requested(None, environment={"FA_CLC": value})


@pytest.mark.parametrize("value", [1, 0, "1"])
def test_other_types_are_refused(value):
    with pytest.raises(TypeError, match="use_clc must be True, False or None"):
        clc_requested(value)


def test_classes():
    assert scheduler_class(True) is ClcScheduler
    assert scheduler_class(False) is StaticPersistentScheduler
    counting = scheduler_class(True, cluster_size=1, counts=True)
    assert issubclass(counting, CounterScheduler) and counting.cluster_size == 1
    assert scheduler_class(False, 1, counts=True) is of_clusters(StaticPersistentScheduler, 1)
