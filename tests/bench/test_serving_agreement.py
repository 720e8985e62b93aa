"""Agreement of engines: what is compared, and what is not."""

from __future__ import annotations

import pytest

from bench.serving.agreement import Agreement, Generated, Scored, agreement

SCORED = Scored([[-1.0, -2.0], [-3.0]], [[5, 6], [7]])


def test_only_tokens_before_a_difference_are_compared():
    one = Generated([[1, 2, 3], [4, 5, 6]], [[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]])
    other = Generated([[1, 9, 3], [4, 5, 6]], [[-1.5, -7.0, -8.0], [-1.0, -1.25, -1.0]])
    scored = Scored([[-1.0, -2.5], [-3.0]], [[5, 8], [7]])
    found = agreement((one, SCORED), (other, scored))
    assert found == Agreement(1, 2, 1.0, 0.75 / 4, 0.5, 0.5 / 3, 0.5, 2 / 3)


def test_equal_answers():
    same = Generated([[1, 2]], [[-1.0, -2.0]])
    assert agreement((same, SCORED), (same, SCORED)) == (1, 1, None, 0.0, 0.0, 0.0, 0.0, 1.0)


def test_answers_to_other_requests_are_refused():
    one, other = Generated([[1]], [[-1.0]]), Generated([[1, 2]], [[-1.0, -1.0]])
    with pytest.raises(ValueError, match=r"answers of \[1\] and of \[2\] tokens; accepted: equal"):
        agreement((one, SCORED), (other, SCORED))
