"""Rows that begin in time, and what is said of the others."""

import pytest

from bench.measure.time_limit import TimeLimit
from bench.tables.table import BASIS, MACHINE, Column, Table

JOBS = [("1x512", "forward"), ("1x1024", "forward"), ("1x512", "backward")]


class Clock:
    """Each row takes ten seconds."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def rows_within(seconds):
    clock = Clock()
    limit, found = TimeLimit(seconds, clock), []
    for job in limit.begun(JOBS):
        clock.now += 10
        found.append(job)
    return limit, found


def table_of(jobs):
    rows = [{"shape": shape, BASIS: "measured", MACHINE: "a GPU"} for shape, _ in jobs]
    return Table("throughput", "Rates", (Column("shape"),), rows, ("One note.",))


@pytest.mark.parametrize(("seconds", "count"), [(None, 3), (0, 1), (5, 1), (15, 2), (25, 3)])
def test_rows_begin_in_time(seconds, count):
    limit, found = rows_within(seconds)
    assert found == JOBS[:count]
    assert limit.left_out == JOBS[count:]


def test_what_is_left_out_is_named():
    limit, found = rows_within(5)
    text = limit.noted(table_of(found)).as_markdown()
    assert "One note. 2 not begun within 5 s: 1x1024, forward; 1x512, backward." in " ".join(
        text.split()
    )
    limit, found = rows_within(None)
    whole = table_of(found)
    assert limit.noted(whole) is whole


def test_a_wrong_limit_is_refused():
    with pytest.raises(ValueError, match="--within -1; accepted: a number of seconds"):
        TimeLimit(-1)
