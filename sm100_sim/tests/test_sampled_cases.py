"""Collection of tests: cases of tests marked `sampled`, and workers in a fresh checkout."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace

import pytest
from suite import first_alone, sampled_cases, takes_all_cases

CASES = ["one-static", "one-clc", "two-static"]


def item(test, case, *marks):
    """A collected case; marks: the closest one's arguments, if there is one."""
    mark = SimpleNamespace(args=marks[0]) if marks else None
    return SimpleNamespace(
        nodeid=f"{test}[{case}]", callspec=SimpleNamespace(id=case),
        get_closest_marker=lambda name: mark,
    )  # fmt: skip


def ids(items):
    return [one.nodeid for one in items]


def test_cases_that_match_run():
    items = [item("a", case, ("*-clc", "two-*")) for case in CASES] + [item("b", "any")]
    kept, left_out = sampled_cases(items)
    assert ids(kept) == ["a[one-clc]", "a[two-static]", "b[any]"] and ids(left_out) == [
        "a[one-static]"
    ]


def test_without_a_pattern_none_runs():
    plain = SimpleNamespace(nodeid="c", get_closest_marker=lambda name: SimpleNamespace(args=()))
    kept, left_out = sampled_cases([plain, item("a", "one", ())])
    assert kept == [] and ids(left_out) == ["c", "a[one]"]


def test_a_pattern_of_no_case_is_an_error():
    with pytest.raises(pytest.UsageError, match=r"a has no case like \{'three-\*'\}"):
        sampled_cases([item("a", case, ("one-*", "three-*")) for case in CASES])


@pytest.mark.parametrize(
    ("arguments", "asked", "device", "expected"),
    [(["tests"], False, "cpu", False), (["tests"], True, "cpu", True),
     (["tests"], False, "cuda", True), (["tests/test_a.py::test_b"], False, "cpu", True)],
)  # fmt: skip
def test_where_nothing_is_left_out(arguments, asked, device, expected):
    options = {"--all-cases": asked, "--device": device}
    assert takes_all_cases(SimpleNamespace(args=arguments, getoption=options.get)) == expected


def test_others_wait_for_the_first_worker(tmp_path):
    """Let the others go on together behind the first, and the next be first where one failed."""
    marker, order, both = tmp_path / "cache" / "collected", [], [Event(), Event()]

    def other(number):
        with first_alone(marker):
            order.append("other")
            both[number].set()
            assert both[1 - number].wait(60)

    with ThreadPoolExecutor() as pool:
        with pytest.raises(KeyError), first_alone(marker):
            raise KeyError
        with first_alone(marker):
            others = [pool.submit(other, number) for number in range(2)]
            assert not both[0].wait(0.1)
            order.append("first")
        for one in others:
            one.result()
    assert order == ["first", "other", "other"]
