"""Cases of tests marked `sampled` that run: `suite.sampled_cases`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from suite import sampled_cases, takes_all_cases

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
