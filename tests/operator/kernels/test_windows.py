"""Windows with negative bounds, as windows of shorter sequences."""

from __future__ import annotations

import itertools

import pytest
import torch

from fa4_hd256.call.options import UNBOUNDED, ExactWindow, Options, window_of
from fa4_hd256.check.reference import visible
from fa4_hd256.kernels.mask.windows import ALL_ROWS, Reach

#: Unbounded, the level key, around it, and beyond all lengths, on either side.
SIDES = (None, 0, 1, 3, 20, -1, -2, -5, -20)
LENGTHS = (1, 2, 5, 9)


@pytest.mark.parametrize("window", list(itertools.product(SIDES, SIDES)), ids=str)
def test_the_rest_sees_the_same(window):
    """A window of 0 or more sees the same keys without hidden rows; hidden rows see none."""
    reach = Reach.of(window)
    assert all(side is None or side >= 0 for side in reach.window)
    assert [side is None for side in reach.window] == [side is None for side in window]
    for lengths in itertools.product(LENGTHS, LENGTHS):
        queries, keys = reach.lengths(*lengths)
        seen = visible(lengths, window)
        assert torch.equal(seen[:queries, :keys], visible((queries, keys), reach.window))
        assert not seen[queries:].any() and not seen[:, keys:].any()


def test_bounds_beyond_32_bits():
    assert Reach.of((None, -(1 << 60))) == (0, ALL_ROWS, (None, 0))
    assert Reach.of((-(1 << 60), 1 << 60)).queries == ALL_ROWS


@pytest.mark.parametrize(
    ("given", "causal", "expected"),
    [
        ((-1, -1), False, (None, None)),
        ([-1, 3], False, (None, 3)),
        ((None, -861), False, (None, -861)),
        ((-788, -1), False, (-788, None)),
        ((-5, 20), False, (-5, 20)),
        ((5, -5), False, (5, -5)),
        ((7, -3), True, (7, 0)),
        ((-2, None), True, (None, -(1 << 39))),
        ((3, -4), False, (None, -(1 << 39))),
        ((-7, -9), False, (None, -(1 << 39))),
        ((1 << 50, -(1 << 50)), False, (1 << 39, -(1 << 39))),
        (ExactWindow(-1, 5), False, (-1, 5)),
        (ExactWindow(None, -1), False, (None, -1)),
        (ExactWindow(-1, -1), False, (None, -(1 << 39))),
    ],
)
def test_windows_as_users_give_them(given, causal, expected):
    """-1 is unbounded but in an `ExactWindow`; all empty windows are one."""
    assert window_of(given, causal) == expected
    options = Options(1.0, expected)
    values = type("Values", (), {
        "softmax_scale": 1.0, "softcap": 0.0, "use_clc": False,
        "window_left": options.bounds[0], "window_right": options.bounds[1],
    })  # fmt: skip
    assert Options.of_operator(values, (None, None)) == options
    assert (options.bounds[0] == UNBOUNDED) == (expected[0] is None)
